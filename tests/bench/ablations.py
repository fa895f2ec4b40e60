"""Lessons of the field, tried on the toy world: `make ablations`, or `python -m tests.bench.ablations [NAME ...]`.

Every variant is the demo with a few settings changed, run in this process on the real engine (VeOmni, one thread), from
the same base, evaluated on the held-out prompts every 5 iterations. Variants with the same settings, such as each
table's row of the demo itself, are one run. Results go to `docs/lessons/NAME.json` (a variant
and seed that is there already is not run again) and are drawn to `docs/lessons/NAME.png`: a thin line a seed, a thick
one their mean.
"""

import argparse
import json
import logging
import multiprocessing
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

from crossrl.build import build_algorithm, build_engine
from crossrl.data import PromptCursor, load_prompts
from crossrl.evaluate import evaluate
from crossrl.launch import prepare
from crossrl.local import LocalWorkers
from crossrl.loop import Run, run_iteration
from crossrl.rewards import InlineRewards, RewardSet

OUT = Path(__file__).parents[2] / "docs/lessons"
EVERY = 5
NFT = ["algorithm=diffusion_nft"]


def bf16_trajectory(engine):
    """Trajectories are stored in bf16, as a careless port would."""
    add = engine.held.add

    def add_rounded(trajectory, step):
        trajectory.latents = trajectory.latents.bfloat16().float()
        add(trajectory, step)

    engine.held.add = add_rounded


def integer_timesteps(engine):
    """The update truncates timesteps to whole numbers, the rollout does not: at shift 3 they differ by less than 1."""
    predict = engine.predict

    def truncated(x, sigma, condition):
        return predict(x, (1000 * sigma).floor() / 1000 if torch.is_grad_enabled() else sigma, condition)

    engine.predict = truncated


def wrong_timesteps(engine):
    """The update takes sigma to be 5 % larger than the rollout did, as after a wrong shift."""
    predict = engine.predict

    def shifted(x, sigma, condition):
        return predict(x, (1.05 * sigma).clamp(max=1) if torch.is_grad_enabled() else sigma, condition)

    engine.predict = shifted


ABLATIONS = {
    "batch": {
        "128 samples": [],
        "32 samples": ["batch.prompts=2"],
    },
    "cfg": {
        "off": [],
        "3 in RL and evaluation": ["sampling.guidance=3", "eval.guidance=3"],
    },
    "noise": {"shared in a group": [], "independent": ["algorithm.same_noise=false"]},
    "clip": {
        "clip 1e-4": ["algorithm.clip_range=1e-4"],
        "clip 3e-3": [],
        "clip 0.1": ["algorithm.clip_range=0.1"],
    },
    "drift": {
        "none": ["sampling.shift=3"],
        "bf16 trajectories": ["sampling.shift=3", bf16_trajectory],
        "integer timesteps": ["sampling.shift=3", integer_timesteps],
        "sigma 5 % wrong": ["sampling.shift=3", wrong_timesteps],
    },
    "updates": {
        "1 update": ["batch.updates=1", "optimizer.total=30"],
        "4 updates": [],
        "8 updates": ["batch.updates=8", "optimizer.total=240"],
    },
    **{
        f"nft_shift_{shift}": {
            name: [*NFT, f"sampling.shift={shift}", *settings]
            for name, settings in {
                "grid": [],
                "uniform": ["algorithm.density=uniform"],
                "late: last 3 steps": ["algorithm.density={name: last_k, k: 3}"],
                "grid with 1/t": ["algorithm.inverse_t=true"],
            }.items()
        }
        for shift in (1, 5, 8)
    },
}
LOGGED = ("reward/within_group_std", "update/clip_high", "update/clip_low", "update/log_ratio", "update/grad_norm")


def start():
    """Make a worker process ready: a process group of its own, one thread, no chatter."""
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    with tempfile.NamedTemporaryFile() as store:
        torch.distributed.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)


def train(settings, seed, iterations):
    """One run: rewards and metrics by iteration, and [iteration, held-out reward] pairs."""
    total = ["optimizer.total=120"] if not any("total" in s for s in settings if isinstance(s, str)) else []
    overrides = [s for s in settings if isinstance(s, str)]
    config = prepare("demo", [f"seed={seed}", *total, *overrides]).run
    engine = build_engine(config, "cpu")
    for change in settings:
        if callable(change):
            change(engine)
    cursor = PromptCursor(load_prompts(config.data.train), config.batch.prompts, config.seed)
    rewards = InlineRewards(RewardSet.from_config(config))
    run = Run(config, cursor, LocalWorkers(engine), rewards, build_algorithm(config))
    heldout = load_prompts(config.data.heldout)
    start = time.monotonic()
    out = {"rewards": [], "heldout": [], "metrics": {}}
    for step in range(iterations + 1):
        if step % EVERY == 0:
            out["heldout"].append([step, evaluate(config, run.workers, rewards, heldout).mean])
        if step < iterations:
            metrics = run_iteration(run, step)
            out["rewards"].append(metrics["reward/mean"])
            for name in LOGGED:
                if name in metrics:
                    out["metrics"].setdefault(name, []).append(metrics[name])
            out["pull"] = {k: v for k, v in metrics.items() if k.startswith("update/pull_")}
    return out | {"seconds": time.monotonic() - start}


def rounded(value):
    """`value` with its numbers to five digits, for the file."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def jitter(rewards):
    """Standard deviation of the training reward around its own running mean of 5, over the second half."""
    smooth = np.convolve(rewards, np.ones(5) / 5, mode="valid")
    rest = np.array(rewards[2:-2]) - smooth
    return float(rest[len(rest) // 2 :].std())


def draw(name, found):
    figure, axes = plt.subplots(figsize=(7, 4), dpi=110)
    for number, (variant, runs) in enumerate(found.items()):
        curves = [np.array(run["heldout"]) for run in runs.values()]
        for curve in curves:
            axes.plot(*curve.T, color=f"C{number}", lw=0.7, alpha=0.5)
        axes.plot(*np.mean(curves, 0).T, color=f"C{number}", lw=2.2, label=f"{variant} ({len(curves)} seeds)")
    axes.set(xlabel="iteration", ylabel="held-out reward", ylim=(0, 1), title=name)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(OUT / f"{name}.png")
    plt.close(figure)


def table(found):
    """Markdown: the end of each variant over its seeds."""
    lines = [
        "| variant | held-out reward at the end, by seed | mean | jitter of the training reward |",
        "|---|---|---|---|",
    ]
    for variant, runs in found.items():
        ends = [run["heldout"][-1][1] for run in runs.values()]
        shake = np.mean([jitter(run["rewards"]) for run in runs.values()])
        lines.append(f"| {variant} | {', '.join(f'{e:.3f}' for e in ends)} | {np.mean(ends):.3f} | {shake:.3f} |")
    return "\n".join(lines)


def main():
    """Run what is missing, two at a time, draw, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(ABLATIONS), help=", ".join(ABLATIONS))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="none: draw and print again")
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    found = {name: {variant: {} for variant in ABLATIONS[name]} for name in options.names}
    for name in options.names:
        if (OUT / f"{name}.json").exists():
            kept = json.loads((OUT / f"{name}.json").read_text())
            found[name] |= {variant: kept.get(variant, {}) for variant in found[name]}
    tasks = {}  # (settings, seed) -> where its result belongs
    for name, variant in ((n, v) for n in options.names for v in found[n]):
        for seed in options.seeds:
            if str(seed) not in found[name][variant]:
                tasks.setdefault((tuple(ABLATIONS[name][variant]), seed), []).append((name, variant))
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn"), start) as pool:
        running = {pool.submit(train, *task, options.iterations): task for task in tasks}
        for number, future in enumerate(as_completed(running), start=1):
            seed = running[future][1]
            for name, variant in tasks[running[future]]:
                found[name][variant][str(seed)] = future.result()
                (OUT / f"{name}.json").write_text(json.dumps(rounded(found[name])))
            sys.stderr.write(f"{number}/{len(tasks)} {name}: {variant}, seed {seed}\n")
    for name, variants in found.items():
        if done := {variant: runs for variant, runs in variants.items() if runs}:
            draw(name, done)
            sys.stdout.write(f"## {name}\n\n{table(done)}\n\n")


if __name__ == "__main__":
    main()
