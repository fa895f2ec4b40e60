"""The log-prob head against the others: `make bench-head`, or `python -m tests.bench.head --repeats 3`.

Log-prob and entropy of labels from hidden states [T, H] and an lm_head [V, H], forward and backward, fp32, one thread,
every contender in fresh processes, one after the other in turn. Peak: the most resident memory above what the inputs
take (VmHWM after a reset, minus VmRSS before), so it includes the gradients of hidden and weight; those of the weight
alone are V x H x 4 bytes. Time: CPU seconds of the process, the smallest of the repeats. A library that is not
installed is skipped by name. Results must agree with the naive head's.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

TOKENS, HIDDEN, WORDS = 4096, 512, 151_936
MIB = 1 << 20
COEFFICIENT = 0.01  # of the entropy in the loss


def naive(hidden, weight, labels, mask):
    """What one would write first."""
    log_p = (hidden @ weight.t()).log_softmax(-1)
    return log_p.gather(1, labels[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(1)


def verl_default(hidden, weight, labels, mask):
    """verl's engine without fused kernels."""
    import verl.utils.torch_functional as F
    from verl.utils.torch_functional import logprobs_from_logits

    logits = hidden @ weight.t()
    return logprobs_from_logits(logits, labels, inplace_backward=False), F.entropy_from_logits(logits)


def verl_fused(hidden, weight, labels, mask):
    """verl's `use_fused_kernels` with the torch backend."""
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    log_p, entropy = FusedLinearForPPO(chunk_size=512)(hidden[None], weight, labels[None], 1.0)
    return log_p[0], entropy[0]


def veomni(hidden, weight, labels, mask):
    """VeOmni's chunks over tokens."""
    from veomni.ops.kernels.cross_entropy.chunk_logprobs import chunk_logprobs_function

    log_p, entropy = chunk_logprobs_function(hidden[None], weight, labels[None], shift_labels=labels[None])
    return log_p[0], entropy[0]


def liger(hidden, weight, labels, mask):
    """Liger's chunks over the vocabulary: log-probs only."""
    from liger_kernel.chunked_loss.fused_linear_ppo import _ChunkedSelectiveLogProbFunction

    return _ChunkedSelectiveLogProbFunction.apply(hidden, weight, labels, None, 1.0, 4096), None


def trl(hidden, weight, labels, mask):
    """TRL's tiles: the entropy is a metric, without a gradient."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    found = ChunkedLogProbFunction.apply(hidden, weight, None, labels, 1.0, 8192, None, 1.0, ("entropy",))
    return found[0], found[1].detach()


def ours(hidden, weight, labels, mask, **options):
    """crossrl.head."""
    from crossrl.head import linear_logprob

    return linear_logprob(hidden, weight, labels, mask=mask, **options)


def ours_64(hidden, weight, labels, mask):
    """crossrl.head with buffers of 64 MiB."""
    return ours(hidden, weight, labels, None, max_bytes=64 * MIB)


def ours_16(hidden, weight, labels, mask):
    """crossrl.head with buffers of 16 MiB."""
    return ours(hidden, weight, labels, None, max_bytes=16 * MIB)


def ours_all(hidden, weight, labels, mask):
    """crossrl.head, every row."""
    return ours(hidden, weight, labels, None)


CONTENDERS = {
    "naive": (naive, None),
    "verl default": (verl_default, "verl"),
    "verl fused": (verl_fused, "verl"),
    "VeOmni chunked": (veomni, "veomni"),
    "Liger chunked, no entropy": (liger, "liger-kernel"),
    "TRL chunked, entropy without gradient": (trl, "trl"),
    "crossrl": (ours_all, "crossrl-core"),
    "crossrl, 64 MiB": (ours_64, "crossrl-core"),
    "crossrl, 16 MiB": (ours_16, "crossrl-core"),
    "crossrl, the 10 % of rows that are answers": (ours, "crossrl-core"),
}


def say(line):
    """A line of the table."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def inputs(tokens):
    """hidden, weight, labels and a mask of 10 %, by a fixed seed."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    weight = (torch.randn(WORDS, HIDDEN) * 0.05).requires_grad_()
    return hidden, weight, torch.randint(0, WORDS, (tokens,)), torch.arange(tokens) % 10 == 0


def resident():
    """(peak, now) bytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmHWM", "VmRSS"))}
    return found["VmHWM"], found["VmRSS"]


def one(name, tokens):
    """One contender in this process: a dict for the table."""
    torch.set_num_threads(1)
    head, _ = CONTENDERS[name]
    small = inputs(64)
    head(*small)[0].sum().backward()  # imports and first calls
    del small
    hidden, weight, labels, mask = inputs(tokens)
    Path("/proc/self/clear_refs").write_text("5")
    before, begun = resident()[1], time.process_time()
    log_p, entropy = head(hidden, weight, labels, mask)
    loss = -log_p.sum() if entropy is None else -log_p.sum() - COEFFICIENT * entropy.sum()
    loss.backward()
    seconds = time.process_time() - begun
    return {
        "seconds": seconds,
        "peak": resident()[0] - before,
        "log_prob": log_p.sum().item(),
        "entropy": None if entropy is None else entropy.sum().item(),
        "d_hidden": hidden.grad.norm().item(),
        "d_weight": weight.grad.norm().item(),
    }


def fresh(name, tokens):
    """The same in a process of its own; None if it dies, such as for want of memory."""
    command = [sys.executable, "-m", "tests.bench.head", "--one", name, "--tokens", str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def installed(distribution):
    """Its version, or None."""
    try:
        return version(distribution) if distribution else torch.__version__
    except PackageNotFoundError:
        return None


def largest(name, cap, most):
    """(most tokens, a multiple of 256, whose peak stays under `cap` bytes; its tokens a CPU second)."""
    low, high, speed = 0, most // 256, 0.0
    while low < high:
        middle = (low + high + 1) // 2
        found = fresh(name, middle * 256)
        if found and found["peak"] <= cap:
            low, speed = middle, middle * 256 / found["seconds"]
        else:
            high = middle - 1
    return low * 256, speed


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--cap-mib", type=int, default=2048)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/head.json"))
    parser.add_argument("--one", choices=CONTENDERS)
    arguments = parser.parse_args()
    if arguments.one:
        say(json.dumps(one(arguments.one, arguments.tokens)))
        return
    present = {}
    for name, (_, distribution) in CONTENDERS.items():
        if installed(distribution) is None:
            say(f"skipped {name}: {distribution} is not installed")
        else:
            present[name] = [fresh(name, arguments.tokens)]
    for _ in range(arguments.repeats - 1):
        for name, runs in present.items():
            runs.append(fresh(name, arguments.tokens))
    rows = {name: [run for run in runs if run] for name, runs in present.items()}
    base = rows["verl default"]
    say(f"T={arguments.tokens} H={HIDDEN} V={WORDS}, fp32, one thread; the weight's gradient alone is "
          f"{WORDS * HIDDEN * 4 / MIB:.0f} MiB")  # fmt: skip
    say(f"{'':<44}{'peak MiB':>10}{'of verl':>9}{'CPU s':>8}{'of verl':>9}{'A/A':>6}")
    for name, runs in rows.items():
        if not runs:
            say(f"{name:<44}died, as for want of memory")
            continue
        peak, seconds = max(run["peak"] for run in runs), min(run["seconds"] for run in runs)
        noise = max(run["seconds"] for run in runs) / seconds - 1
        share = f"1/{max(r['peak'] for r in base) / peak:.1f}" if base else "-"
        time_share = f"{seconds / min(r['seconds'] for r in base):.2f}" if base else "-"
        say(f"{name:<44}{peak / MIB:>10.0f}{share:>9}{seconds:>8.2f}{time_share:>9}{noise:>6.0%}")
    fits = {}
    for name in ("verl default", "verl fused", "TRL chunked, entropy without gradient", "crossrl"):
        if name in rows:
            fits[name] = largest(name, arguments.cap_mib * MIB, 16_384)
            say(f"{name:<44}{fits[name][0]:>6} tokens fit {arguments.cap_mib} MiB, {fits[name][1]:.0f} tokens a CPU s")
    about = {"torch": torch.__version__, "machine": platform.processor() or platform.machine()}
    about |= {name: installed(d) for name, (_, d) in CONTENDERS.items() if d}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"about": about, "rows": rows, "fits": fits}, indent=2))
    say(arguments.out)


if __name__ == "__main__":
    main()
