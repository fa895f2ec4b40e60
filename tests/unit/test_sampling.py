"""The denoising loop and the choice of trained steps (T10, T11, P3, P5 of the method notes)."""

import pytest
import torch

from crossrl.errors import ConfigError
from crossrl.noise import Noise
from crossrl.types import Prompt, SampleKey, Sampling
from crossrl_t2v import kernel
from crossrl_t2v.sampling import denoise, select_steps, trained_steps

SHAPE = (2, 1, 2, 2)
DANCE = kernel.NoiseRule("dance", 0.7)
KEYS = tuple(SampleKey(Prompt(f"p{b}", "text"), g) for b in range(2) for g in range(4))


def velocity(x, sigma):
    return 0.3 * x + sigma.view(-1, 1, 1, 1, 1)


def run(keys=KEYS, steps=6, step=3, rule=DANCE, stochastic=True, predict=velocity, **options):
    return denoise(predict, Noise(7, step, keys, SHAPE), Sampling(steps, 3.0, 1.0, stochastic), rule, **options)


def test_kept_states_and_log_probs_are_those_of_the_steps_taken():
    path = run(keep=True)
    assert path.states.shape == (8, 6, *SHAPE) and path.log_probs.shape == (8, 5)
    noise = Noise(7, 3, KEYS, SHAPE)
    assert torch.equal(path.states[:, 0], noise("init"))
    for k in range(5):
        sigma, after = path.sigmas[k].expand(8), path.sigmas[k + 1].expand(8)
        x = path.states[:, k]
        out = kernel.step(x, velocity(x, sigma), sigma, after, DANCE)
        assert torch.equal(path.states[:, k + 1], out.mean + out.std * noise(f"step/{k}"))
        assert torch.equal(path.log_probs[:, k], kernel.log_prob(path.states[:, k + 1], out.mean, out.std))


def test_the_denoised_estimate_of_the_last_step_is_returned_without_noise():
    path = run(keep=True)
    x, sigma = path.states[:, -1], path.sigmas[-2].expand(8)
    torch.testing.assert_close(path.x0, x - sigma.view(-1, 1, 1, 1, 1) * velocity(x, sigma))


def test_the_network_is_asked_once_a_step_at_each_steps_sigma():
    seen = []
    run(predict=lambda x, s: seen.append(s) or velocity(x, s), steps=4)
    assert torch.equal(torch.stack(seen)[:, 0], kernel.sigmas(4, 3.0)[:-1]) and all(len(s) == 8 for s in seen)


def test_nothing_is_kept_unless_asked():
    path = run()
    assert path.states is None and path.log_probs is None
    assert torch.equal(path.x0, run(keep=True).x0)


def test_ode_adds_no_noise_and_is_the_limit_of_no_noise():
    ode = run(stochastic=False).x0
    x = Noise(7, 3, KEYS, SHAPE)("init")
    s = kernel.sigmas(6, 3.0)
    for k in range(6):
        x = x - (s[k] - s[k + 1]) * velocity(x, s[k].expand(8))
    torch.testing.assert_close(ode, x)
    torch.testing.assert_close(run(rule=kernel.NoiseRule("dance", 1e-6)).x0, ode, rtol=1e-4, atol=1e-4)


def test_same_noise_gives_a_group_one_start_and_many_ends():
    path = run(keep=True, same_noise=True)
    starts = path.states[:, 0].unflatten(0, (2, 4))
    assert (starts == starts[:, :1]).all() and not torch.equal(starts[0], starts[1])
    assert len(path.x0.flatten(1).unique(dim=0)) == 8


def test_same_noise_is_off_for_the_ode_which_would_repeat_one_sample():
    assert len(run(stochastic=False, same_noise=True).x0.flatten(1).unique(dim=0)) == 8


@pytest.mark.parametrize("same_noise", [True, False])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_samples_do_not_depend_on_how_they_are_shared_out(same_noise, parts):
    whole = run(keep=True, same_noise=same_noise)
    for rank in range(parts):
        mine = run(KEYS[rank::parts], keep=True, same_noise=same_noise)
        assert torch.equal(mine.x0, whole.x0[rank::parts])
        assert torch.equal(mine.states, whole.states[rank::parts])
        assert torch.equal(mine.log_probs, whole.log_probs[rank::parts])


def test_another_step_or_prompt_draws_other_noise():
    assert not torch.equal(run().x0, run(step=4).x0)
    renamed = [SampleKey(Prompt("q", "text"), k.index) for k in KEYS[:4]]
    assert not torch.equal(run(KEYS[:4]).x0, run(renamed).x0)


def test_only_the_noisy_steps_are_random_and_kept():
    path, whole = run(keep=True, noisy=range(1, 3)), run(keep=True)
    assert path.states.shape[:2] == (8, 3) and path.log_probs.shape == (8, 2)
    ode = run(stochastic=False, keep=True).states
    assert torch.equal(path.states[:, 0], ode[:, 1]) and not torch.equal(path.states[:, 1], ode[:, 2])
    x = path.states[:, -1]
    for k in range(3, 6):
        s = path.sigmas
        x = x - (s[k] - s[k + 1]) * velocity(x, s[k].expand(8))
    torch.testing.assert_close(path.x0, x)
    assert whole.states.shape[1] == 6 and whole.log_probs.shape[1] == 5


def test_trained_steps_are_the_head_of_a_permutation():
    chosen = select_steps(KEYS, 15, 0.6, seed=0, step=5)
    assert chosen.shape == (8, 9)
    for row in chosen.tolist():
        assert len(set(row)) == 9 and set(row) <= set(range(15))
    assert len({tuple(row) for row in chosen.tolist()}) == 8  # every sample has its own
    everything = select_steps(KEYS, 15, 1.0, seed=0, step=5)
    assert (everything.sort(1).values == torch.arange(15)).all()
    assert torch.equal(everything[:, :9], chosen)


def test_trained_steps_depend_on_seed_step_and_sample_alone():
    whole = select_steps(KEYS, 9, 0.5, seed=0, step=5)
    assert torch.equal(select_steps(KEYS[3:5], 9, 0.5, seed=0, step=5), whole[3:5])
    assert not torch.equal(select_steps(KEYS, 9, 0.5, seed=1, step=5), whole)
    assert not torch.equal(select_steps(KEYS, 9, 0.5, seed=0, step=6), whole)


def test_every_candidate_is_trained_equally_often():
    keys = [SampleKey(Prompt("p", ""), g) for g in range(2000)]
    counts = torch.bincount(select_steps(keys, 7, 0.6, seed=0, step=0).flatten(), minlength=7)
    assert ((counts / 2000 - 4 / 7).abs() < 0.05).all()


@pytest.mark.parametrize(("steps", "fraction", "count"), [(15, 0.6, 9), (7, 0.6, 4), (1, 1.0, 1), (9, 0.99, 8)])
def test_number_of_trained_steps(steps, fraction, count):
    assert trained_steps(steps, fraction) == count


@pytest.mark.parametrize(("steps", "fraction"), [(0, 1.0), (1, 0.9), (7, 0.1)])
def test_no_step_to_train_is_refused(steps, fraction):
    with pytest.raises(ConfigError, match="leaves none to train"):
        trained_steps(steps, fraction)
