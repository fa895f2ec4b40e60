"""The tiled log-prob head: the naive one's numbers and gradients, in a bounded number of bytes."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close

from crossrl.errors import ConfigError
from crossrl.head import MIB, TilePlan, linear_logprob, plan_tiles


def naive(hidden, weight, labels, *, mask=None, temperature=1.0, forbidden=None):
    """The logits in full, in fp32 or better."""
    z = (hidden.to(weight.dtype) @ weight.T).to(torch.promote_types(torch.float32, weight.dtype))
    z = z / (temperature[..., None] if isinstance(temperature, torch.Tensor) else temperature)
    if forbidden is not None:
        z = z.index_fill(-1, forbidden, -1e30)
    log_p = z.log_softmax(-1)
    logp = log_p.gather(-1, labels[..., None]).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    if mask is not None:
        logp, entropy = logp * mask, entropy * mask
    return logp, entropy


def case(seed):
    """A random problem: shapes, tile, masks and temperatures with the hard edges among them."""
    rng = random.Random(seed)
    g = torch.Generator().manual_seed(seed)
    tokens = rng.choice([0, 1, 2, 7, 33, 70])
    words, width = rng.choice([2, 5, 31, 64, 130]), rng.choice([1, 3, 16])
    plan = TilePlan(rng.choice([1, 3, 16, 100]), rng.choice([1, 7, 32, 200]), 0)
    hidden = torch.randn(tokens, width, generator=g)
    weight = torch.randn(words, width, generator=g) * rng.choice([0.1, 1.0, 3.0])
    labels = torch.randint(words, (tokens,), generator=g)
    kind = rng.choice(["none", "interleaved", "empty", "tail"])
    mask = {
        "none": None,
        "interleaved": torch.rand(tokens, generator=g) < 0.5,
        "empty": torch.zeros(tokens, dtype=torch.bool),
        "tail": torch.arange(tokens) >= tokens // 2,
    }[kind]
    temperature = rng.choice([1.0, 0.7, torch.rand(tokens, generator=g) + 0.5])
    forbidden = None
    if words > 2 and rng.random() < 0.5:
        forbidden = torch.tensor([1])
        labels = torch.where(labels == 1, 0, labels)
    options = {"mask": mask, "temperature": temperature, "forbidden": forbidden}
    return hidden, weight, labels, options, plan


def gradients(function, hidden, weight, labels, options, seed):
    """Values, and the gradients of a random combination of both results."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logp, entropy = function(hidden, weight, labels, **options)
    g = torch.Generator().manual_seed(seed)
    mix = [torch.randn(logp.shape, generator=g) for _ in range(2)]
    (logp * mix[0] + entropy * mix[1]).sum().backward()
    return logp.detach(), entropy.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("seed", range(200))
def test_values_and_all_gradients_are_the_naive_ones(seed):
    hidden, weight, labels, options, plan = case(seed)
    found = gradients(linear_logprob, hidden, weight, labels, {**options, "plan": plan}, seed)
    expected = gradients(naive, hidden, weight, labels, options, seed)
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * (1 + float(theirs.abs().max()) if theirs.numel() else 1))


def test_gradcheck_in_fp64():
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 3, dtype=torch.float64, generator=g, requires_grad=True)
    weight = torch.randn(7, 3, dtype=torch.float64, generator=g, requires_grad=True)
    labels = torch.tensor([0, 6, 3, 3, 1])
    mask = torch.tensor([True, False, True, True, True])
    plan = TilePlan(2, 3, 0)
    assert torch.autograd.gradcheck(lambda h, w: linear_logprob(h, w, labels, mask=mask, plan=plan), (hidden, weight))


def test_masked_rows_are_zero_and_an_empty_mask_stays_connected():
    hidden, weight = torch.randn(2, 4, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
    labels = torch.full((2, 4), -100)  # what a masked row holds is nobody's business
    logp, entropy = linear_logprob(hidden, weight, labels, mask=torch.zeros(2, 4, dtype=torch.bool))
    assert logp.shape == entropy.shape == (2, 4) and not logp.any() and not entropy.any()
    (logp.sum() + entropy.sum()).backward()
    assert torch.equal(hidden.grad, torch.zeros_like(hidden)) and torch.equal(weight.grad, torch.zeros_like(weight))


def test_a_frozen_weight_gets_no_gradient_and_costs_none():
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(9, 8)
    logp, _ = linear_logprob(hidden, weight, torch.arange(6))
    logp.sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_tied_embeddings_add_up():
    table = torch.randn(9, 8, requires_grad=True)
    ids, labels = torch.tensor([1, 2, 3]), torch.tensor([2, 3, 4])
    linear_logprob(table[ids], table, labels)[0].sum().backward()
    ours, table.grad = table.grad, None
    naive(table[ids], table, labels)[0].sum().backward()
    assert_close(ours, table.grad)


def test_without_entropy_the_log_probs_are_the_same_bits():
    hidden, weight, labels = torch.randn(40, 8), torch.randn(50, 8), torch.randint(50, (40,))
    plan = TilePlan(16, 32, 0)
    alone, none = linear_logprob(hidden, weight, labels, entropy=False, plan=plan)
    assert none is None and torch.equal(alone, linear_logprob(hidden, weight, labels, plan=plan)[0])


def test_low_precision_weights_accumulate_in_fp32():
    """A thousand equal contributions to one entry of dW: bf16 sums would stall at 256 of them."""
    rows = 1024
    hidden = torch.ones(rows, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    logp, _ = linear_logprob(hidden, weight, torch.zeros(rows, dtype=torch.long), plan=TilePlan(1, 2, 0))
    logp.sum().backward()
    assert logp.dtype == torch.float32 and weight.grad.dtype == torch.bfloat16
    assert weight.grad.tolist() == [[rows / 2], [-rows / 2]]


def test_values_of_bf16_are_fp32_ones_of_the_same_weights():
    hidden, weight = torch.randn(20, 32).bfloat16(), torch.randn(300, 32).bfloat16()
    labels = torch.randint(300, (20,))
    found = linear_logprob(hidden, weight, labels, plan=TilePlan(8, 64, 0))
    for ours, theirs in zip(found, naive(hidden.float(), weight.float(), labels), strict=True):
        assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_it_is_deterministic_and_autocast_does_not_change_it():
    hidden, weight, labels = torch.randn(40, 8), torch.randn(50, 8), torch.randint(50, (40,))
    first = gradients(linear_logprob, hidden, weight, labels, {"plan": TilePlan(7, 9, 0)}, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        second = gradients(linear_logprob, hidden, weight, labels, {"plan": TilePlan(7, 9, 0)}, 0)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_second_derivative_is_refused():
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    logp, _ = linear_logprob(hidden, weight, torch.arange(3))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(logp.sum(), hidden, create_graph=True)


def test_what_cannot_be_meant_is_named():
    hidden, weight = torch.randn(3, 4), torch.randn(5, 4)
    with pytest.raises(ValueError, match="outside the vocabulary of 5"):
        linear_logprob(hidden, weight, torch.tensor([0, 5, 1]))
    with pytest.raises(ValueError, match=r"hidden \(3, 4\)"):
        linear_logprob(hidden, weight, torch.tensor([0, 1]))


def test_the_plan_keeps_to_its_budget_or_says_what_it_needs():
    for budget in (1 * MIB, 8 * MIB, 64 * MIB, 1024 * MIB):
        for rows in (0, 1, 50, 100_000):
            plan = plan_tiles(rows, 151_936, 512, torch.float32, budget)
            assert plan.bytes <= budget and 1 <= plan.rows <= max(rows, 1) and plan.words >= 256
    with pytest.raises(ConfigError, match="needs .* bytes, more than 1,000") as error:
        plan_tiles(100, 151_936, 4096, torch.bfloat16, 1000)
    assert error.value.where == "max_head_bytes" and "MiB" in error.value.fix


PROBE = """
import resource, sys, torch
from crossrl.head import linear_logprob, plan_tiles
tokens, words, width = 2048, 50_000, 256
hidden, weight = torch.randn(tokens, width).requires_grad_(), torch.randn(words, width).requires_grad_()
labels = torch.randint(words, (tokens,))
linear_logprob(hidden[:64], weight, labels[:64], plan=plan_tiles(64, words, width, weight.dtype, 2**20))
open("/proc/self/clear_refs", "w").write("5")
def rss(key): return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024
before = rss("VmRSS")
sum(x.sum() for x in linear_logprob(hidden, weight, labels, max_bytes=int(sys.argv[1]))).backward()
print(rss("VmHWM") - before, plan_tiles(tokens, words, width, weight.dtype, int(sys.argv[1])).bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("budget", [8 * MIB, 128 * MIB])
def test_the_measured_peak_is_what_the_plan_says(budget):
    run = subprocess.run([sys.executable, "-c", PROBE, str(budget)], capture_output=True, text=True, check=True)
    peak, planned = map(int, run.stdout.split())
    gradients_of = (2048 * 256 + 50_000 * 256) * 4  # hidden's and weight's, which no plan can avoid
    assert peak <= 1.3 * (planned + gradients_of)
