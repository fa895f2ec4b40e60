"""What every diffusion algorithm must do, shown with a small network by what it draws, trains and reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from crossrl.config import Batch, SamplingConfig
from crossrl.errors import ConfigError
from crossrl.noise import Noise, generator
from crossrl.protocols import Algorithm
from crossrl.registry import select
from crossrl.testing.suite import Suite
from crossrl.types import Advantages, Prompt, Rows, SampleKey, Sampling, Trajectory
from crossrl.validation import validated

SHAPE = (4, 2, 4, 4)
GROUPS, SIZE = 2, 6
KEYS = tuple(SampleKey(Prompt(f"p{b}", "text"), g) for b in range(GROUPS) for g in range(SIZE))
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
"""fp32 convolutions differ by rounding from one batch size to another."""


class Net(torch.nn.Module):
    """(x [n, C, F, H, W], sigma [n]) -> velocity: a small convolution that knows sigma; its weights are `seed`'s."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.inner, self.outer = torch.nn.Conv3d(5, 8, 3, padding=1), torch.nn.Conv3d(8, 4, 3, padding=1)
        for parameter in self.parameters():
            parameter.data.normal_(generator=generator("net", seed)).mul_(0.2)

    def forward(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        """Velocities."""
        level = sigma.view(-1, 1, 1, 1, 1).expand(-1, 1, *x.shape[2:])
        return self.outer(torch.tanh(self.inner(torch.cat([x, level], 1))))


class AlgorithmSuite(Suite):
    """Subclass it as `Test...` and set `algorithm`; every test runs for each of the sets of `options`.

    The sets together should make every option matter: one that no set makes the algorithm read is reported as unread.
    An algorithm that trains on clips (`Needs.clips`) skips what concerns samples and advantages.
    """

    algorithm: ClassVar[str]  # its entry point
    options: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    sampling: ClassVar[Sampling] = Sampling(steps=6, shift=3.0)
    rows_together: ClassVar[int] = 1  # rows that the loss needs in one micro-batch: 2 for pairs

    # ---- set-up ------------------------------------------------------------------------------------------------

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Each test once for each set of options."""
        if "method" in metafunc.fixturenames:
            metafunc.parametrize("method", self.options, indirect=True, ids=lambda o: str(dict(o)) if o else "default")

    @pytest.fixture
    def method(self, request: pytest.FixtureRequest) -> Algorithm:
        """The algorithm with one set of options."""
        return self.make(request.param)

    @classmethod
    def make(cls, options: Mapping[str, Any], read: set[str] | None = None) -> Algorithm:
        """The algorithm under test, checked as before a run; `read` collects the options that it reads from now on."""
        target = select("crossrl.algorithms", cls.algorithm)
        config = target.Config if read is None else _watched(target.Config, read)
        chosen = validated(config, {"name": cls.algorithm, **options}, source="the suite")
        if read is not None:
            read.clear()  # of what validators have read
        method = target(chosen, (1.0,))
        method.check(SamplingConfig(steps=cls.sampling.steps, shift=cls.sampling.shift), Batch(samples=SIZE))
        return method

    def draw(
        self, method: Algorithm, keys: Sequence[SampleKey] = KEYS, seed: int = 0, step: int = 1
    ) -> tuple[torch.Tensor, Trajectory]:
        """Samples of `keys` and their trajectory."""
        if method.needs.clips:
            pytest.skip(f"{self.algorithm} draws no samples")
        with torch.no_grad():
            return method.sample(Net(), Noise(seed, step, keys, SHAPE), keys, self.sampling, True)

    def training_rows(self, method: Algorithm, keys: Sequence[SampleKey] = KEYS) -> Rows:
        """Rows of the samples (or clips) of `keys`, with advantages that are a function of the key."""
        sigmas = torch.linspace(1, 0, self.sampling.steps + 1)
        clips = Trajectory(tuple(keys), sigmas, Noise(0, 1, keys, SHAPE)("clips")[:, None], {})
        trajectory = clips if method.needs.clips else self.draw(method, keys)[1]
        values = {key: (-1) ** i * (0.2 + 0.3 * i) for i, key in enumerate(KEYS)}
        return method.rows(trajectory, torch.tensor([values[key] for key in keys]), 0, 1)

    def velocities(self, method: Algorithm, rows: Rows, **nets: Net) -> dict[str, torch.Tensor]:
        """Those of the slots that the algorithm declares; of one network, where `nets` names no other."""
        slots = {"old": method.needs.old is not None, "reference": method.needs.reference}
        with torch.no_grad():
            others = {name: nets.get(name, Net())(rows.x, rows.sigma) for name, needed in slots.items() if needed}
        return {"policy": nets.get("policy", Net())(rows.x, rows.sigma), **others}

    def scored(self, method: Algorithm, scores: np.ndarray, valid: np.ndarray | None = None) -> Advantages:
        """Advantages of `scores` [B, G, 1]."""
        if method.needs.clips:
            pytest.skip(f"{self.algorithm} has no rewards")
        return method.advantages(scores, np.ones(scores.shape[:2], bool) if valid is None else valid)

    # ---- samples -----------------------------------------------------------------------------------------------

    def test_a_sample_is_a_function_of_seed_step_prompt_and_index(self, method: Algorithm) -> None:
        """So it is the same in any micro-batch, on any rank, and after a resume."""
        x, _ = self.draw(method)
        some, _ = self.draw(method, KEYS[::-1][:5])
        torch.testing.assert_close(some, x.flip(0)[:5], **CLOSE)
        for other in ({"seed": 1}, {"step": 2}):
            assert not torch.allclose(self.draw(method, **other)[0], x, **CLOSE)
        apart = (x[:, None] - x[None]).flatten(2).abs().amax(2) + torch.eye(len(x))
        assert apart.min() > 1e-4, "two samples are one"

    def test_a_trajectory_is_fp32_on_the_host(self, method: Algorithm) -> None:
        """Rounded states are other states: the ratio would not be 1."""
        x, trajectory = self.draw(method)
        assert trajectory.keys == KEYS and trajectory.sigmas.shape == (self.sampling.steps + 1,)
        for tensor in (trajectory.latents, *trajectory.data.values()):
            assert tensor.device.type == "cpu" and len(tensor) == len(KEYS) and not tensor.requires_grad
        assert trajectory.latents.dtype == torch.float32 and trajectory.latents.shape[2:] == SHAPE == x.shape[1:]

    def test_evaluation_draws_without_noise_and_keeps_nothing(self, method: Algorithm) -> None:
        """Held-out rewards must not jump from one evaluation to the next; samples of a prompt differ all the same."""
        sampling = Sampling(self.sampling.steps, self.sampling.shift, stochastic=False)
        with torch.no_grad():
            found = [method.sample(Net(), Noise(0, step, KEYS, SHAPE), KEYS, sampling, False) for step in (1, 1)]
        assert found[0][1] is None and torch.equal(found[0][0], found[1][0])
        assert len({float(x.double().sum()) for x in found[0][0]}) == len(KEYS)

    # ---- rows and the loss -------------------------------------------------------------------------------------

    def test_every_sample_has_as_many_rows(self, method: Algorithm) -> None:
        """All ranks then run the same forwards; drawn again, they are the same rows."""
        rows, again = self.training_rows(method), self.training_rows(method)
        assert len(rows.owner.bincount().unique()) == 1 and len(rows.owner.unique()) == len(KEYS)
        assert rows.x.dtype == rows.sigma.dtype == torch.float32 and rows.x.shape[1:] == SHAPE
        assert rows.sigma.min() > 0 and rows.sigma.max() <= 1
        assert all(len(t) == len(rows) for t in rows.targets.values())
        assert torch.equal(rows.x, again.x) and torch.equal(rows.sigma, again.sigma)

    def test_rows_do_not_depend_on_the_other_groups(self, method: Algorithm) -> None:
        """Groups may be shared out among ranks."""
        rows, half = self.training_rows(method), self.training_rows(method, KEYS[SIZE:])
        both = (rows.take(rows.owner >= SIZE), half)
        whole, alone = (r.take(r.owner.argsort(stable=True)) for r in both)
        torch.testing.assert_close(alone.x, whole.x, **CLOSE)
        assert torch.equal(alone.sigma, whole.sigma) and torch.equal(alone.owner + SIZE, whole.owner)

    def test_the_loss_is_per_row(self, method: Algorithm) -> None:
        """And its metrics carry no graph."""
        rows = self.training_rows(method)
        out = method.loss(self.velocities(method, rows), rows)
        assert out.loss.shape == (len(rows),) and bool(out.loss.isfinite().all()) and out.loss.requires_grad
        assert all(m.shape == (len(rows),) and not m.requires_grad for m in out.metrics.values())

    def test_micro_batches_are_slices_of_the_whole(self, method: Algorithm) -> None:
        """The loss of a row does not depend on the rows beside it."""
        rows = self.training_rows(method)
        velocity = self.velocities(method, rows, policy=Net(1), reference=Net(2))
        whole = method.loss(velocity, rows).loss
        size = 5 * self.rows_together
        cuts = [slice(i, min(i + size, len(rows))) for i in range(0, len(rows), size)]
        parts = [method.loss({k: v[cut] for k, v in velocity.items()}, rows.take(cut)).loss for cut in cuts]
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-7)

    def test_at_the_policy_that_drew_the_samples_the_gradient_is_not_zero(self, method: Algorithm) -> None:
        """And the ratio, where there is one, is 1."""
        rows, net = self.training_rows(method), Net()
        out = method.loss(self.velocities(method, rows, policy=net), rows)
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(out.loss.mean(), list(net.parameters()))])
        assert bool(gradient.isfinite().all()) and float(gradient.norm()) > 1e-6
        if "ratio_deviation_max" in out.metrics:
            assert float(out.metrics["ratio_deviation_max"].max()) < 1e-5

    def test_needs_are_true(self, method: Algorithm) -> None:
        """The loss uses the slots that are declared, and no other: the engine keeps and computes only those."""
        rows = self.training_rows(method)
        same = method.loss(self.velocities(method, rows), rows).loss  # a slot not declared is a KeyError
        for name in self.velocities(method, rows).keys() - {"policy"}:
            other = method.loss(self.velocities(method, rows, **{name: Net(3)}), rows).loss
            assert not torch.equal(other, same), f"{name} is declared and not used"
        if method.needs.old is not None:
            assert all(0 <= method.needs.old(iteration) <= 1 for iteration in (0, 1, 100, 10_000))

    # ---- advantages --------------------------------------------------------------------------------------------

    def test_advantages_follow_their_samples(self, method: Algorithm) -> None:
        """The order within a group and of the groups, and a constant added to all scores, change nothing."""
        scores, order = np.random.default_rng(0).normal(size=(3, SIZE, 1)), np.random.default_rng(1)
        values = self.scored(method, scores).values
        groups, samples = order.permutation(3), order.permutation(SIZE)
        moved = self.scored(method, scores[groups][:, samples] + 7.0)
        np.testing.assert_allclose(moved.values, values[groups][:, samples], rtol=1e-9, atol=1e-9)

    def test_a_sample_without_a_score_does_not_train(self, method: Algorithm) -> None:
        """Its group is normalised without it."""
        scores, valid = np.random.default_rng(0).normal(size=(GROUPS, SIZE, 1)), np.ones((GROUPS, SIZE), bool)
        scores[0, 2], valid[0, 2] = np.nan, False
        out = self.scored(method, scores, valid)
        assert not out.keep[0, 2] and (out.values[0, 2] == 0).all() and np.isfinite(out.values).all()
        assert out.keep[1].any() and out.keep[0].any()

    def test_a_group_without_spread_has_no_advantage(self, method: Algorithm) -> None:
        """Float noise of equal scores must not become a whole advantage."""
        scores = np.random.default_rng(0).normal(size=(GROUPS, SIZE, 1))
        scores[1] = 0.1 + 1e-12 * scores[1]
        out = self.scored(method, scores)
        assert (out.values[1] == out.values[1, 0]).all() and not (out.values[0] == out.values[0, 0]).all()

    # ---- options -----------------------------------------------------------------------------------------------

    def test_every_option_is_read(self) -> None:
        """By a run with one of the sets of options; a key that nothing reads is a lie in a config."""
        fields = set(select("crossrl.algorithms", self.algorithm).Config.model_fields) - {"name"}
        for options in self.options:
            read: set[str] = set()
            method = self.make(options, read)
            rows = self.training_rows(method)
            method.loss(self.velocities(method, rows, policy=Net(1)), rows)
            if not method.needs.clips:
                self.scored(method, np.random.default_rng(0).normal(size=(GROUPS, SIZE, 1)))
            if method.needs.old is not None:
                method.needs.old(1)
            fields -= read
        assert not fields, f"not read with any of `options`: {sorted(fields)}"

    def test_an_unknown_option_is_refused(self) -> None:
        """By name."""
        with pytest.raises(ConfigError, match="no_such_option"):
            self.make({**self.options[0], "no_such_option": 1})


def _watched(config: type, read: set[str]) -> type:
    class Watched(config):
        """Notes what is read of it."""

        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    return Watched
