from crossrl import env

env.use_cpu_platform_if_alone()  # before anything asks verl for its platform
