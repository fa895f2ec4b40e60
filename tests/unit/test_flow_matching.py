"""Supervised flow matching: its rows are the straight path, its minimum is the conditional velocity."""

import numpy as np
import pytest
import torch

from crossrl.errors import ConfigError
from crossrl.noise import Noise
from crossrl.types import Prompt, SampleKey, Sampling, Trajectory
from crossrl_t2v.flow_matching import FlowMatching

SHAPE = (3, 2, 4, 4)
KEYS = tuple(SampleKey(Prompt(f"clip/{i}", "text"), 0) for i in range(6))
CLEAN = torch.randn(6, 1, *SHAPE, generator=torch.Generator().manual_seed(0))


def make(**options):
    return FlowMatching(FlowMatching.Config(**options))


def rows_of(algorithm, keys=KEYS, clean=CLEAN, step=2):
    return algorithm.rows(Trajectory(keys, torch.empty(0), clean, {}), torch.zeros(len(keys)), 0, step)


@pytest.mark.parametrize("draws", [1, 3])
def test_rows_lie_on_the_straight_path_from_data_to_noise(draws):
    rows = rows_of(make(rows_per_sample=draws))
    assert len(rows) == 6 * draws and rows.owner.tolist() == [i for i in range(6) for _ in range(draws)]
    sigma, v, x0 = rows.sigma.view(-1, 1, 1, 1, 1), rows.targets["velocity"], CLEAN[rows.owner, 0]
    torch.testing.assert_close(rows.x - sigma * v, x0)
    eps = rows.x + (1 - sigma) * v
    assert abs(float(eps.mean())) < 0.15 and abs(float(eps.std()) - 1) < 0.1
    assert len(rows.sigma.unique()) == len(rows)


def test_rows_are_a_function_of_seed_step_and_sample_alone():
    whole, part = rows_of(make()), rows_of(make(), KEYS[2:4], CLEAN[2:4])
    assert torch.equal(whole.x[2:4], part.x) and torch.equal(whole.sigma[2:4], part.sigma)
    assert not torch.equal(rows_of(make(), step=3).sigma, whole.sigma)


@pytest.mark.parametrize(("density", "quartile"), [("uniform", 0.25), ("logit_normal", 0.3375)])
def test_density_of_sigma(density, quartile):
    sigma = rows_of(make(density=density, rows_per_sample=4000), KEYS[:1], CLEAN[:1, :, :1, :1, :1, :1]).sigma
    assert ((sigma > 0) & (sigma < 1)).all()
    assert float(sigma.quantile(0.25)) == pytest.approx(quartile, abs=0.02)
    assert float(sigma.median()) == pytest.approx(0.5, abs=0.03)


def test_loss_is_the_mean_squared_error_of_each_row():
    rows = rows_of(make())
    target = rows.targets["velocity"]
    assert torch.equal(make().loss({"policy": target}, rows).loss, torch.zeros(6))
    torch.testing.assert_close(make().loss({"policy": target + 2.0}, rows).loss, torch.full((6,), 4.0))


def test_a_trained_velocity_samples_the_data():
    """Data of one value: the best constant-in-x0 fit v = (x - x0) / sigma, found by least squares, lands on it."""
    clean = torch.full((6, 1, 1, 1, 1, 1), 2.0)
    rows = rows_of(make(rows_per_sample=200, density="uniform"), clean=clean)
    x, sigma, v = rows.x.flatten(), rows.sigma, rows.targets["velocity"].flatten()
    basis = torch.stack([x / sigma, 1 / sigma], 1).double()
    weights = torch.linalg.lstsq(basis, v.double()[:, None]).solution.flatten().float()

    def predict(x, sigma):
        level = sigma.view(-1, 1, 1, 1, 1)
        return (weights[0] * x + weights[1]) / level

    latents, trajectory = make().sample(predict, Noise(0, 0, KEYS, (1, 1, 1, 1)), KEYS, Sampling(5), True)
    assert trajectory is None
    torch.testing.assert_close(latents, torch.full_like(latents, 2.0), rtol=1e-2, atol=1e-2)


def test_it_trains_on_clips_and_is_no_rl_method():
    assert FlowMatching.needs.clips
    with pytest.raises(ConfigError, match="not an RL method"):
        make().advantages(np.zeros((1, 2, 1)), np.ones((1, 2), bool))
