import torch

from crossrl import env

env.use_cpu_platform_if_alone()  # before anything asks verl for its platform
torch.set_num_threads(1)  # tiny models: two threads would mostly wait for each other
