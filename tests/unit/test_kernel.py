"""The step kernel against closed forms (T1, T2, T3 of the method notes): fp64, no Monte Carlo."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossrl_t2v.kernel import ODE, NoiseRule, log_prob, sigmas, step

RULES = (ODE, NoiseRule("dance", 0.3), NoiseRule("dance", 1.2), NoiseRule("flow_sde", 0.7), NoiseRule("cps", 0.5))


def rows(seed: int, n: int = 5):
    """x, velocity [n, 2, 1, 2, 2] and sigma > sigma_next [n], fp64."""
    stream = torch.Generator().manual_seed(seed)
    x, v = torch.randn(2, n, 2, 1, 2, 2, generator=stream, dtype=torch.float64)
    low, high = torch.rand(n, 2, generator=stream, dtype=torch.float64).mul(0.98).add(0.01).sort(1).values.unbind(1)
    return x, v, high, low


def column(t):
    return t.view(-1, 1, 1, 1, 1)


@given(st.integers(1, 60), st.floats(0.2, 12.0))
@settings(max_examples=50, deadline=None)
def test_schedule_falls_from_one_to_zero_with_the_shift(steps, shift):
    s = sigmas(steps, shift)
    assert s.dtype == torch.float32 and len(s) == steps + 1
    assert s[0] == 1.0 and s[-1] == 0.0 and (s.diff() < 0).all()
    u = torch.linspace(1, 0, steps + 1)
    torch.testing.assert_close(s, shift * u / (1 + (shift - 1) * u), rtol=1e-5, atol=1e-6)


@given(st.integers(0, 10_000), st.floats(0.05, 2.0))
@settings(max_examples=30, deadline=None)
def test_mean_is_the_reverse_sde_in_all_three_forms_of_the_score(seed, eta):
    x, v, sigma, after = rows(seed)
    s, delta = column(sigma), column(sigma - after)
    x0, eps = x - s * v, x + (1 - s) * v
    out = step(x, v, sigma, after, NoiseRule("dance", eta))
    torch.testing.assert_close(out.x0, x0)
    for score in (-(x - (1 - s) * x0) / s**2, -eps / s, -(x + (1 - s) * v) / s):
        torch.testing.assert_close(out.mean, x - delta * v + 0.5 * eta**2 * delta * score, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(out.std, eta * delta.sqrt())


@given(st.integers(0, 10_000), st.floats(0.05, 2.0))
@settings(max_examples=30, deadline=None)
def test_flow_sde_is_dance_with_its_own_eta_at_each_row(seed, level):
    x, v, sigma, after = rows(seed)
    out = step(x, v, sigma, after, NoiseRule("flow_sde", level))
    for i in range(len(x)):
        eta = level * math.sqrt(sigma[i] / (1 - sigma[i]))
        row = slice(i, i + 1)
        one = step(x[row], v[row], sigma[row], after[row], NoiseRule("dance", eta))
        torch.testing.assert_close(out.mean[row], one.mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(out.std[row], one.std, rtol=1e-12, atol=1e-12)


def test_flow_sde_takes_the_next_sigma_at_pure_noise():
    x, v, *_ = rows(0, 1)
    out = step(x, v, torch.ones(1), torch.full((1,), 0.9), NoiseRule("flow_sde", 0.7))
    assert float(out.std) == pytest.approx(0.7 * math.sqrt(1 / (1 - 0.9)) * math.sqrt(0.1))


@pytest.mark.parametrize("name", ["dance", "flow_sde", "cps"])
def test_without_noise_every_rule_is_euler(name):
    x, v, sigma, after = rows(1)
    out = step(x, v, sigma, after, NoiseRule(name, 0.0))
    torch.testing.assert_close(out.mean, x - column(sigma - after) * v, rtol=1e-12, atol=1e-12)
    assert (out.std == 0).all()


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_last_step_without_noise_lands_on_the_denoised_estimate(rule):
    x, v, sigma, _ = rows(2)
    out = step(x, v, sigma, torch.zeros(5), NoiseRule(rule.name, 0.0))
    torch.testing.assert_close(out.mean, out.x0)


def test_rows_are_independent_and_dtypes_are_kept():
    x, v, sigma, after = rows(3)
    whole = step(x, v, sigma, after, NoiseRule("flow_sde", 0.7))
    for i in range(len(x)):
        one = step(x[i : i + 1], v[i : i + 1], sigma[i : i + 1], after[i : i + 1], NoiseRule("flow_sde", 0.7))
        assert torch.equal(one.mean, whole.mean[i : i + 1])
    assert whole.mean.dtype == torch.float64
    assert step(x.bfloat16(), v.bfloat16(), sigma, after, ODE).mean.dtype == torch.float32


def final_moments(rule: NoiseRule, steps: int, m: float, variance: float) -> tuple[float, float]:
    """Mean and variance after all steps from N(0, 1), with the exact velocity of data N(m, variance): affine in x."""
    s = sigmas(steps, 3.0).double()
    mean, var = 0.0, 1.0
    probe = torch.tensor([0.0, 1.0], dtype=torch.float64).view(2, 1, 1, 1, 1)
    for k in range(steps):
        sigma = s[k]
        gain = (1 - sigma) * variance / ((1 - sigma) ** 2 * variance + sigma**2)
        v = (probe - (m + gain * (probe - (1 - sigma) * m))) / sigma
        out = step(probe, v, sigma.expand(2), s[k + 1].expand(2), rule)
        offset, slope = float(out.mean[0]), float(out.mean[1] - out.mean[0])
        mean, var = slope * mean + offset, slope**2 * var + float(out.std[0]) ** 2
    return mean, var


TABLE = {  # final variance error with data N(0.7, 0.5) and shift 3, for 10, 16, 50, 1000 steps
    NoiseRule("dance", 0.3): (-0.174, -0.116, -0.041, -0.002),
    NoiseRule("dance", 1.2): (-0.019, -0.022, -0.009, -0.0005),
    NoiseRule("flow_sde", 0.7): (-0.119, -0.078, -0.024, 0.0001),
    ODE: (-0.184, -0.124, -0.043, -0.002),
    NoiseRule("cps", 0.5): (-0.225, -0.179, -0.117, -0.078),
    NoiseRule("cps", 0.8): (-0.282, -0.253, -0.210, -0.178),
}


@pytest.mark.parametrize("rule", TABLE, ids=str)
def test_marginals_converge_except_under_cps(rule):
    errors = []
    for steps, expected in zip((10, 16, 50, 1000), TABLE[rule], strict=True):
        mean, variance = final_moments(rule, steps, 0.7, 0.5)
        assert mean == pytest.approx(0.7, abs=2e-3)
        assert variance - 0.5 == pytest.approx(expected, abs=1.5e-3)
        errors.append(abs(variance - 0.5))
    if rule.name == "cps":
        assert errors[-1] > 0.05
        assert final_moments(rule, 10, 0.7, 0.0)[1] == pytest.approx(0, abs=1e-12)  # exact for a point mass
    else:
        assert errors[-1] < 0.005 and errors[-1] < errors[2] / 5
        assert errors[0] <= 0.185  # never worse than Euler here


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(("sigma", "after"), [(0.167, 0.0), (0.8, 0.7), (0.4, 0.1)])
def test_excess_variance_of_a_perfect_denoiser(rule, sigma, after):
    """x0 known: the ideal variance at sigma' is sigma'^2; what a step adds to it in closed form."""
    probe = torch.tensor([0.0, 1.0], dtype=torch.float64).view(2, 1, 1, 1, 1)
    levels = torch.tensor([sigma, after], dtype=torch.float64)
    out = step(probe, probe / sigma, levels[0].expand(2), levels[1].expand(2), rule)
    slope = float(out.mean[1] - out.mean[0])
    excess = slope**2 * sigma**2 + float(out.std[0]) ** 2 - after**2
    delta, a = sigma - after, rule.level
    expected = {
        "dance": a**2 * delta**2 / sigma + a**4 * delta**2 / (4 * sigma**2),
        "flow_sde": a**2 * delta**2 / (1 - sigma) + a**4 * delta**2 / (4 * (1 - sigma) ** 2),
        "cps": 0.0,
    }
    assert excess == pytest.approx(expected[rule.name], abs=1e-12)
    if (rule, after) == (NoiseRule("dance", 1.2), 0.0):
        assert excess == pytest.approx(0.758, abs=1e-3)  # why the last step's noise is never decoded


@given(st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_log_prob_is_the_mean_over_elements_of_the_normal_density(seed):
    x, v, sigma, after = rows(seed)
    out = step(x, v, sigma, after, NoiseRule("dance", 0.5))
    x_next = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = torch.distributions.Normal(out.mean, out.std).log_prob(x_next).flatten(1).mean(1)
    torch.testing.assert_close(log_prob(x_next, out.mean, out.std), expected, rtol=1e-10, atol=1e-10)
    assert log_prob(x_next.bfloat16(), out.mean.bfloat16(), out.std).dtype == torch.float32


def test_gradient_reaches_the_velocity_of_its_own_row_only():
    x, v, sigma, after = rows(4)
    v.requires_grad_()
    out = step(x, v, sigma, after, NoiseRule("dance", 0.5))
    log_prob(out.mean.detach() + 0.1, out.mean, out.std)[2].backward()
    moved = v.grad.flatten(1).abs().sum(1) > 0
    assert moved.tolist() == [False, False, True, False, False]
