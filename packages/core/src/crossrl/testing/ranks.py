"""A step on two processes: `python -m crossrl.testing.ranks MODULE:SUITE RANK STORE PIPELINE OUT`."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import torch

from crossrl.testing import tiny

TIMEOUT_S = 300
_START = """import runpy, sys
sys.path[:0] = sys.argv.pop(1).split("\\n")  # where pytest finds the suite
runpy.run_module("crossrl.testing.ranks", run_name="__main__", alter_sys=True)"""


def run_two(suite: type, pipeline: Path, out: Path) -> list[dict[str, float]]:
    """Start both ranks of `suite`'s backend; what each found. `AssertionError` with the output of one that failed."""
    where = f"{suite.__module__}:{suite.__qualname__}"
    command = [sys.executable, "-c", _START, "\n".join(p for p in sys.path if p)]
    ranks = [
        subprocess.Popen(
            [*command, where, str(rank), str(out / "store"), str(pipeline), str(out)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(ranks):
        text, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, f"rank {rank}:\n{text}"
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(2)]


def main(where: str, rank: int, store: str, pipeline: Path, out: Path) -> None:
    """Half of a step: train on this rank's rows, save, export."""
    from crossrl.testing.backend import STEP

    torch.set_num_threads(1)
    module, _, name = where.partition(":")
    suite = importlib.import_module(module)
    for part in name.split("."):
        suite = getattr(suite, part)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    engine, (rows, keys) = suite.build(pipeline, optimizer=STEP), tiny.training_rows()
    half = len(rows) // 2
    mine = rows.take(slice(rank * half, (rank + 1) * half))
    stats = engine.train_rows(mine, keys, tiny.even(rows)[:half])
    (out / "checkpoint").mkdir(exist_ok=True)
    engine.save_checkpoint(out / "checkpoint")
    engine.export(out / "export")
    found = {"loss": stats.sums["loss"], "grad_norm": stats.scalars["grad_norm"]}
    (out / f"rank-{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), Path(sys.argv[5]))
