"""Two workers over gloo: one launch runs every check of `two_ranks.py`; then one worker reads what they saved."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.backend_mindspeed import tiny

if tiny.ABSENT:
    pytest.skip(tiny.ABSENT, allow_module_level=True)
from tests.backend_mindspeed import two_ranks

pytestmark = [pytest.mark.slow, pytest.mark.mindspeed]
ROOT = Path(__file__).parents[2]
STEPS = {"full": {}, "lora": {"lora": two_ranks.LORA}}


@pytest.fixture(scope="module")
def shared(tmp_path_factory, group):
    """A folder with what one worker saved, and after the launch with what two workers found and saved."""
    folder = tmp_path_factory.mktemp("two_ranks")
    tiny.write_pipeline(folder / "wan")
    tiny.write_pipeline(folder / "wan4", num_attention_heads=4)
    torch.save(
        tiny.weights(tiny.build(folder / "wan", model={"lora": two_ranks.LORA}, seed=7)), folder / "lora_start.pt"
    )
    for name, sections in STEPS.items():
        engine = tiny.build(folder / "wan", needs=two_ranks.NEEDS, model={"ema": 0.9, **sections})
        tiny.train(engine)
        engine.save_checkpoint(folder / f"one_{name}")
        torch.save(tiny.everything(engine), folder / f"one_{name}.pt")
        torch.save(tiny.velocity(engine, "old"), folder / f"one_{name}_old.pt")
    command = [sys.executable, "-m", "tests.backend_mindspeed.two_ranks"]
    port = str(tiny.free_port())
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(folder), port], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in range(2)
    ]
    try:
        logs = [w.communicate(timeout=600)[0].decode(errors="replace") for w in workers]
    finally:
        for worker in workers:
            worker.kill()
    for log, worker in zip(logs, workers, strict=True):
        assert worker.returncode == 0, log[-4000:]
    return folder


@pytest.mark.parametrize("name", two_ranks.CHECKS)
def test_on_two_workers(shared, name):
    for rank in range(2):
        problem = json.loads((shared / f"result_{rank}.json").read_text())[name]
        assert not problem, f"rank {rank}:\n{problem}"


@pytest.mark.parametrize("name", ["full", "lora", "bf16"])
def test_checkpoints_of_two_workers_load_on_one(shared, name):
    sections = STEPS.get(name, {"dtype": "bfloat16"})
    engine = tiny.build(shared / "wan", needs=two_ranks.NEEDS, model={"ema": 0.9, **sections}, seed=3)
    engine.load_checkpoint(shared / f"two_{name}")
    assert tiny.same(tiny.everything(engine), torch.load(shared / f"two_{name}.pt"))
