"""What the tests of the algorithms share: a small network in fp64, rollouts with it, and gradients of its losses."""

import numpy as np
import torch

from crossrl.noise import Noise
from crossrl.types import Prompt, SampleKey, Sampling
from tests.unit.test_dance_grpo import SHAPE, Net

B, G = 2, 6
KEYS = tuple(SampleKey(Prompt(f"p{b}", "text"), g) for b in range(B) for g in range(G))
SAMPLING = Sampling(steps=8, shift=3.0)


class Net64(Net):
    """The small network in fp64, so that what is compared with a closed form has no rounding of its own."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.double()

    def forward(self, x, sigma):
        return super().forward(x.double(), sigma.double())


def make(cls, **options):
    return cls(cls.Config(**options), (1.0,))


def nearby(net, size=0.03, seed=1):
    """A network with slightly other weights."""
    other = Net64()
    for p, q in zip(other.parameters(), net.parameters(), strict=True):
        p.data = q.data + size * torch.randn(q.shape, generator=torch.Generator().manual_seed(seed)).double()
    return other


def trajectory_of(algorithm, net, keys=KEYS, sampling=SAMPLING, seed=0, step=1):
    with torch.no_grad():
        return algorithm.sample(net, Noise(seed, step, keys, SHAPE), keys, sampling, True)[1]


def advantages_of(algorithm):
    scores = np.random.default_rng(0).normal(size=(B, G, 1))
    return torch.from_numpy(algorithm.advantages(scores, np.ones((B, G), bool)).values).flatten()


def rows_of(algorithm, net, advantages=None, **how):
    advantages = advantages_of(algorithm) if advantages is None else advantages
    return algorithm.rows(trajectory_of(algorithm, net, **how), advantages, 0, 1)


def loss_of(algorithm, net, rows, reference=None, old=None):
    """The loss of `rows`, with other weights for the reference and the old policy, or the same."""
    velocity = {"policy": net(rows.x, rows.sigma)}
    with torch.no_grad():
        if algorithm.needs.reference:
            velocity["reference"] = (reference or net)(rows.x, rows.sigma)
        if algorithm.needs.old:
            velocity["old"] = (old or net)(rows.x, rows.sigma)
    return algorithm.loss(velocity, rows)


def gradient(loss, net):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])
