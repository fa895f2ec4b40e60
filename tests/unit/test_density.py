"""Densities of the trained sigma, against their distribution functions."""

import pytest
import torch

from crossrl.errors import ConfigError
from crossrl.noise import generator
from crossrl.types import Prompt, SampleKey, Trajectory
from crossrl.validation import validated
from crossrl_t2v import kernel
from crossrl_t2v.density import Density, noised
from crossrl_t2v.flow_matching import FlowMatching

SCHEDULE = kernel.sigmas(10, 5.0)


def draw(n=20000, **options):
    return Density(**options).draw(n, SCHEDULE, generator("density"))


@pytest.mark.parametrize(
    ("options", "cdf"),
    [
        ({"name": "uniform"}, lambda s: s),
        ({"name": "range", "low": 0.2, "high": 0.4}, lambda s: ((s - 0.2) / 0.2).clamp(0, 1)),
        ({"name": "beta", "a": 1.0, "b": 3.0}, lambda s: 1 - (1 - s) ** 3),
        ({"name": "beta", "a": 2.0, "b": 1.0}, lambda s: s**2),
        (
            {"name": "logit_normal", "mean": -0.5, "std": 0.8},
            lambda s: torch.special.ndtr((torch.logit(s) + 0.5) / 0.8),
        ),
    ],
)
def test_continuous_densities(options, cdf):
    sigma = draw(**options).sort().values
    assert sigma[0] > 0 and sigma[-1] <= 1
    at = torch.linspace(0.05, 0.95, 19)
    found = torch.searchsorted(sigma, at) / len(sigma)
    assert (found - cdf(at)).abs().max() < 0.012  # 1.63 / sqrt(n), the 1 % point of Kolmogorov and Smirnov


def test_the_grid_is_visited_evenly_and_last_k_is_its_end():
    grid = SCHEDULE[:-1]
    assert torch.equal(draw(10, name="grid").sort().values, grid.sort().values)
    values, counts = draw(1000, name="grid").unique(return_counts=True)
    assert len(values) == 10 and (counts == 100).all()
    assert torch.equal(draw(3, name="last_k", k=3).sort().values, grid[-3:].sort().values)


def test_a_shifted_grid_starves_the_end():
    """Density s / (s - (s - 1) sigma)^2 at s = 5: 62 % above 0.75, 6 % below 0.25."""
    sigma = kernel.sigmas(10000, 5.0)[:-1]
    assert float((sigma > 0.75).float().mean()) == pytest.approx(0.625, abs=0.01)
    assert float((sigma < 0.25).float().mean()) == pytest.approx(0.0625, abs=0.01)


def test_a_name_is_short_for_a_density():
    options = validated(FlowMatching.Config, {"density": "uniform"}, source="test")
    assert options.density == Density(name="uniform")


@pytest.mark.parametrize("name", ["grid", "last_k"])
def test_supervised_training_has_no_grid(name):
    with pytest.raises(ConfigError, match="no grid"):
        validated(FlowMatching.Config, {"density": name}, source="test")


def test_an_empty_range_is_refused():
    with pytest.raises(ConfigError, match=r"low=0\.5 must be below high=0\.5"):
        validated(FlowMatching.Config, {"density": {"name": "range", "low": 0.5, "high": 0.5}}, source="test")


def test_noised_rows_interpolate_and_are_a_function_of_the_sample():
    keys = tuple(SampleKey(Prompt(f"p{i}", ""), 0) for i in range(3))
    x0 = torch.randn(3, 1, 2, 1, 2, 2, generator=generator("x0"))
    rows = noised(Trajectory(keys, SCHEDULE, x0, {}), 4, Density(name="uniform"), 0, 7, "tag")
    level = rows.sigma.view(-1, 1, 1, 1, 1)
    torch.testing.assert_close(rows.x, rows.targets["x0"] + level * rows.targets["velocity"])
    assert torch.equal(rows.targets["x0"], x0[rows.owner, 0]) and rows.owner.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    alone = noised(Trajectory(keys[1:2], SCHEDULE, x0[1:2], {}), 4, Density(name="uniform"), 0, 7, "tag")
    assert torch.equal(alone.x, rows.x[4:8])
