import tempfile

import pytest
import torch

from crossrl.build import build_algorithm, build_engine
from crossrl.config import RunConfig
from crossrl.data import PromptCursor, load_prompts
from crossrl.launch import prepare
from crossrl.local import LocalWorkers
from crossrl.loop import Run
from crossrl.rewards import InlineRewards, RewardSet


@pytest.fixture(scope="module", autouse=True)
def one_process():
    """A world of one for the engines of a module."""
    with tempfile.NamedTemporaryFile() as store:
        torch.distributed.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def job(tmp_path):
    """Makes a `Run` of the demo in this process: the real engine, model, rewards and data."""

    def make(*overrides: str, engine=None) -> Run:
        small = ("batch.prompts=2", "batch.samples=8", "batch.updates=2", "eval.samples=2", f"run_dir={tmp_path}/run")
        config: RunConfig = prepare("demo", [*small, *overrides]).run
        engine = engine or build_engine(config, "cpu")
        engine.config = config
        data = PromptCursor(load_prompts(config.data.train), config.batch.prompts, config.seed)
        rewards = InlineRewards(RewardSet.from_config(config))
        return Run(config, data, LocalWorkers(engine), rewards, build_algorithm(config))

    return make
