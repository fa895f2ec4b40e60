"""Online Diffusion-DPO (arXiv 2311.12908, on flow matching): prefer the better sample of a prompt over the worse.

The samples of a prompt that take part in an optimizer step are paired, the best with the worst, the second with the
second to last and so on; equals are not paired. Winner and loser are noised to the same sigma with the same eps. With
e the mean squared error of the velocity against eps - x0 and e_ref that of the base model, a pair's loss is (eq. 14)

    -log sigmoid(-beta / 2 [(e - e_ref)_winner - (e - e_ref)_loser])

Only the order of rewards matters. By default a group's best and worst sample alone take part (`best_of_n: 2`), as in
the published online recipes; more samples make more pairs, of less certain order.

A pair's two rows are neighbours and each has the pair's loss, so that the mean over rows is the mean over pairs. Rows
without a partner come last: an odd sample out, a tie, and what fills up a rank's share. They have no gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch.nn import functional

from crossrl.config import Batch, SamplingConfig
from crossrl.errors import ConfigError
from crossrl.noise import generator
from crossrl.protocols import Needs
from crossrl.types import Advice, LossOutput, Rows, Trajectory
from crossrl_t2v.density import Density
from crossrl_t2v.forward_process import ForwardOptions, ForwardProcess
from crossrl_t2v.policy_gradient import mean_square


class DPO(ForwardProcess):
    """The algorithm; see the module for the method."""

    class Config(ForwardOptions):
        """Defaults follow Diffusion-DPO (beta 2000 to 5000; Flow-GRPO's DPO baseline has 100) and its online ports."""

        name: Literal["dpo"] = "dpo"
        best_of_n: Annotated[int, Field(ge=2, multiple_of=2)] | None = 2
        drop_zero_std: bool = True
        density: Density = Density(name="logit_normal")
        beta: Annotated[float, Field(gt=0)] = 2000.0  # how far preferences may lead from the base model: less if larger

    needs = Needs(reference=True)
    rows_together = 2  # neighbours that a micro-batch must not part

    def check(self, sampling: SamplingConfig, batch: Batch) -> list[Advice]:
        """Refuse micro-batches that would part a pair, and optimizer steps that see no pair."""
        advice = super().check(sampling, batch)
        if batch.update_micro % 2:
            raise ConfigError(
                f"update_micro={batch.update_micro} would part a winner from its loser",
                where="batch.update_micro",
                fix="an even number",
            )
        of_a_prompt = self.options.best_of_n or batch.samples
        if of_a_prompt < 2 * batch.updates:
            raise ConfigError(
                f"{batch.updates} optimizer steps share {of_a_prompt} samples of a prompt: some see less than a pair",
                where="algorithm.best_of_n",
                fix=f"batch.updates={max(1, of_a_prompt // 2)}, or algorithm.best_of_n={2 * batch.updates}",
            )
        return advice

    def rows(self, trajectory: Trajectory, advantages: torch.Tensor, seed: int, step: int) -> Rows:
        """`rows_per_sample` rows of each sample; target "side" is 1 of a winner, -1 of a loser, 0 without a partner."""
        draws, keys = self.options.rows_per_sample, trajectory.keys
        owner, side, sigma, eps = [], [], [], []
        for members in _pairs(trajectory, advantages.reshape(len(keys), -1).sum(1).tolist()):
            indices = [keys[i].index for i in members]
            stream = generator(seed, step, keys[members[0]].prompt.id, *indices, "dpo")
            levels = self.options.density.draw(draws, trajectory.sigmas, stream)
            drawn = torch.randn(draws, *trajectory.latents.shape[2:], generator=stream)
            owner += members * draws
            side += ([1.0, -1.0] if len(members) == 2 else [0.0]) * draws
            sigma.append(levels.repeat_interleave(len(members)))
            eps.append(drawn.repeat_interleave(len(members), 0))
        owners, levels, noise = torch.tensor(owner), torch.cat(sigma), torch.cat(eps)
        x0 = trajectory.latents[owners, 0]
        level = levels.view(-1, *[1] * (x0.dim() - 1))
        targets = {"velocity": noise - x0, "side": torch.tensor(side)}
        return Rows((1 - level) * x0 + level * noise, levels, owners, targets)

    def loss(self, velocity: Mapping[str, torch.Tensor], rows: Rows) -> LossOutput:
        """Each row's loss is its pair's; log 2 without a partner.

        Metrics: margin, the implicit reward of the winner less the loser's; accuracy, 1 where that is positive; paired.
        """
        v, side, n = velocity["policy"], rows.targets["side"], len(rows)
        if _of_neighbours(side).any():
            raise ConfigError("a pair is parted", where="batch.update_micro", fix="an even number")
        target = rows.targets["velocity"].to(v)
        gain = mean_square(v - target) - mean_square(velocity["reference"] - target)
        margin = -0.5 * self.options.beta * _of_neighbours(side.to(v) * gain).repeat_interleave(2)[:n]
        metrics = {"margin": margin.detach(), "accuracy": (margin > 0).float(), "paired": side.abs()}
        return LossOutput(-functional.logsigmoid(margin), metrics)


def _of_neighbours(x: torch.Tensor) -> torch.Tensor:
    """x[0] + x[1], x[2] + x[3], ..."""
    return functional.pad(x, (0, len(x) % 2)).view(-1, 2).sum(1)


def _pairs(trajectory: Trajectory, advantages: list[float]) -> list[list[int]]:
    """Places of [winner, loser] in the trajectory, then those of samples that have no partner.

    What fills up a rank's share repeats one key at the end, with advantage 0: it must not be taken for a sample of that
    prompt. (A last sample whose advantage is 0 looks the same and goes without a partner too.)
    """
    keys, real = trajectory.keys, len(trajectory.keys)
    while real and keys[real - 1] == keys[-1] and advantages[real - 1] == 0:
        real -= 1
    groups: dict[str, list[int]] = {}
    for i in range(real):
        groups.setdefault(keys[i].prompt.id, []).append(i)
    pairs, alone = [], list(range(real, len(keys)))
    for members in groups.values():
        order = sorted(members, key=lambda i: (-advantages[i], keys[i].index))
        for winner, loser in zip(order[: len(order) // 2], reversed(order), strict=False):
            if advantages[winner] > advantages[loser]:
                pairs.append([winner, loser])
            else:
                alone += [winner, loser]
        if len(order) % 2:
            alone.append(order[len(order) // 2])
    return pairs + [[i] for i in alone]
