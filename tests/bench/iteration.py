"""What the framework costs: `make bench`, or `python -m tests.bench.iteration --pairs 10 --scaling`.

Overhead: one DanceGRPO iteration of the demo through CrossRL (loop, engine on VeOmni's FSDP2, checks, metrics) against
the hand-written `tests/bench/bare_loop.py`: the same forwards, backwards and decodes in the same micro-batches, in this
process, one after the other in random order. The noise streams differ, so rewards agree in distribution only; that both
do the same work is asserted by counting network evaluations. A/A pairs of the bare loop give the noise of the machine.

Scaling: seconds an iteration of whole jobs with one and two workers of one thread each; and, because two cores of a
shared machine slow each other, what two independent copies of the bare loop get out of it (2 x alone / together). Three
rounds, sorted: the middle one is the result.
"""

import argparse
import json
import math
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from crossrl.build import build_algorithm, build_engine
from crossrl.data import PromptCursor, load_prompts
from crossrl.launch import prepare
from crossrl.local import LocalWorkers
from crossrl.loop import Run, run_iteration
from crossrl.rewards import InlineRewards, RewardSet
from tests.bench.bare_loop import Bare, Settings

FORWARDS = 8 * 16 * 8 + 8 * 16 * 7  # samples x steps, samples x trained steps


class Ours:
    """The demo's iteration in this process."""

    def __init__(self):
        with tempfile.NamedTemporaryFile() as store:
            torch.distributed.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
        config = prepare("demo", []).run
        engine = build_engine(config, "cpu")
        data = PromptCursor(load_prompts(config.data.train), config.batch.prompts, config.seed)
        rewards = InlineRewards(RewardSet.from_config(config))
        self.run = Run(config, data, LocalWorkers(engine), rewards, build_algorithm(config))
        self.folder = engine.family.folder

    def iteration(self, step):
        """One; asserts the amount of work."""
        metrics = run_iteration(self.run, step)
        assert metrics["rollout/forwards"] + metrics["update/forwards"] == FORWARDS


def timed(function, step):
    """(wall, CPU) seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    function(step)
    return time.perf_counter() - wall, time.process_time() - cpu


def compare(left, right, pairs):
    """Median of paired ratios left / right and its bootstrap 95 % interval, for wall and CPU seconds."""
    logs = []
    for step in range(pairs):
        order = [("left", left), ("right", right)]
        random.shuffle(order)
        seconds = {name: timed(function, step) for name, function in order}
        logs.append([math.log(a / b) for a, b in zip(seconds["left"], seconds["right"], strict=True)])
    rng, out = np.random.default_rng(0), {}
    for name, column in zip(("wall", "cpu"), np.array(logs).T, strict=True):
        medians = np.median(rng.choice(column, (2000, len(column))), axis=1)
        low, high = np.quantile(medians, (0.025, 0.975))
        out[name] = {"ratio": math.exp(np.median(column)), "interval": [math.exp(low), math.exp(high)]}
    return out


def step_seconds(workers, steps):
    """Median seconds an iteration of a whole job, without its first two."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"workers={workers}", "parallel.cpu_threads=1", f"steps={steps}", f"run_dir={folder}"]
        overrides += ["eval.every=0", "eval.samples=1", "checkpoint.every=0"]
        command = [str(Path(sys.executable).with_name("crossrl")), "run", "demo", *overrides]
        subprocess.run(command, check=True, capture_output=True)
        rows = [json.loads(line)["data"] for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return float(np.median([r["time/rollout_and_reward_s"] + r["time/update_s"] for r in rows[2:]]))


def together(folder, copies, iterations=6):
    """Seconds of the bare loop's iterations, of the slowest of `copies` processes that run at once."""
    code = "import sys, torch; from tests.bench.bare_loop import run; torch.set_num_threads(1); "
    code += "sys.stdout.write(str(sum(run(sys.argv[1], int(sys.argv[2]))['seconds'].values())))"
    command = [sys.executable, "-c", code, str(folder), str(iterations)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(copies)]
    return max(float(process.communicate()[0]) for process in running)


def main():
    """Print the report as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--scaling", action="store_true", help="also run whole jobs with one and two workers")
    parser.add_argument("--steps", type=int, default=10, help="iterations of each of those")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ours = Ours()
    bare, again = (Bare(ours.folder, Settings()) for _ in range(2))
    for warm in (ours.iteration, bare.iteration, again.iteration):
        warm(0)
    report = {
        "overhead_ours_over_bare": compare(ours.iteration, bare.iteration, options.pairs),
        "noise_bare_over_bare": compare(again.iteration, bare.iteration, options.pairs),
    }
    if options.scaling:
        rounds = [
            {
                "workers_1_over_2": step_seconds(1, options.steps) / step_seconds(2, options.steps),
                "machine_limit": 2 * together(ours.folder, 1) / together(ours.folder, 2),
            }
            for _ in range(3)
        ]
        report["scaling"] = {name: sorted(r[name] for r in rounds) for name in rounds[0]}
    report["machine"] = {
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg(),
        "processor": platform.processor() or platform.machine(),
        "versions": {name: version(name) for name in ("crossrl-core", "torch", "veomni", "verl", "diffusers")},
    }
    json.dump(report, sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
