"""DanceGRPO on the toy world by hand: torch, diffusers and the toy's prompts and reward, nothing else.

The lower bound that a benchmark holds the framework against: the same mathematics and micro-batches, with no plug-ins,
no workers, no checkpoints and no logs. Learns, too: `python -m tests.bench.bare_loop FOLDER --iterations 80`.
"""

import argparse
import json
import random
import sys
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from transformers import AutoTokenizer, UMT5EncoderModel

from crossrl.types import Sample
from crossrl_t2v.toy.rewards import ToyReward
from crossrl_t2v.toy.world import heldout_prompts, train_prompts


@dataclass
class Settings:
    """As in the demo config. Sizes in samples, except `update_micro` (rows)."""

    prompts: int = 8
    samples: int = 16
    steps: int = 8
    eta: float = 1.0
    fraction: float = 1.0
    clip: float = 3e-3
    updates: int = 4
    lr: float = 3e-4
    total: int = 320  # optimizer steps of the linear decay of lr to 0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    rollout_micro: int = 64
    decode_micro: int = 32
    update_micro: int = 128
    eval_samples: int = 4
    seed: int = 0


@dataclass
class Bare:
    """The model, its optimizer and what it has cost so far: seconds by stage on `clock`."""

    folder: Path
    settings: Settings
    clock: object = time.perf_counter
    seconds: dict = field(default_factory=lambda: defaultdict(float))

    def __post_init__(self):
        torch.manual_seed(self.settings.seed)
        self.random = random.Random(self.settings.seed)
        self.net = WanTransformer3DModel.from_pretrained(self.folder / "transformer")
        self.vae = AutoencoderKLWan.from_pretrained(self.folder / "vae").float().eval()
        for module in self.vae.modules():
            if isinstance(module, torch.nn.Conv3d):
                module.to(memory_format=torch.channels_last_3d)
            elif isinstance(module, torch.nn.Conv2d):
                module.to(memory_format=torch.channels_last)
        self.mean, self.std = (
            torch.tensor(self.vae.config[name]).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std")
        )
        self.texts = self._encode([p.text for p in train_prompts() + heldout_prompts()])
        self.reward = ToyReward()
        s = self.settings
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=s.lr, weight_decay=s.weight_decay)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: max(0.0, 1 - n / s.total))
        self.sigmas = torch.linspace(1, 0, s.steps + 1)

    def _encode(self, texts):
        tokenizer = AutoTokenizer.from_pretrained(self.folder / "tokenizer")
        encoder = UMT5EncoderModel.from_pretrained(self.folder / "text_encoder").eval()
        tokens = tokenizer(texts, padding="max_length", max_length=tokenizer.model_max_length, return_tensors="pt")
        with torch.no_grad():
            hidden = encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
        return dict(zip(texts, hidden * tokens.attention_mask[..., None], strict=True))

    @contextmanager
    def timed(self, stage):
        start = self.clock()
        yield
        self.seconds[stage] += self.clock() - start

    def velocity(self, x, sigma, texts):
        embeddings = torch.stack([self.texts[t] for t in texts])
        return self.net(x, 1000 * sigma, embeddings, return_dict=False)[0]

    def step(self, x, v, sigma, after, eta):
        """Mean and standard deviation of the next state, sigma and after [n]."""
        sigma, after = sigma.view(-1, 1, 1, 1, 1), after.view(-1, 1, 1, 1, 1)
        delta = sigma - after
        drift = eta**2 * delta / (2 * sigma)
        return x * (1 - drift) - v * (delta + drift * (1 - sigma)), eta * delta.sqrt()

    def log_prob(self, x, mean, std):
        return -0.5 * ((x - mean) / std).square().flatten(1).mean(1) - std.flatten().log() - 0.5 * np.log(2 * np.pi)

    @torch.no_grad()
    def sample(self, texts, x, eta):
        """Latents of all texts, the states [n, T, ...] and log-probabilities [n, T - 1] of the steps."""
        parts = []
        for start in range(0, len(texts), self.settings.rollout_micro):
            part = slice(start, start + self.settings.rollout_micro)
            parts.append(self._denoise(texts[part], x[part], eta))
        return [torch.cat(p) for p in zip(*parts, strict=True)]

    def _denoise(self, texts, x, eta):
        states, log_probs = [], []
        for k, (sigma, after) in enumerate(zip(self.sigmas[:-1], self.sigmas[1:], strict=True)):
            sigma, after = sigma.expand(len(x)), after.expand(len(x))
            states.append(x)
            v = self.velocity(x, sigma, texts)
            if k == self.settings.steps - 1:
                return x - sigma.view(-1, 1, 1, 1, 1) * v, torch.stack(states, 1), torch.stack(log_probs, 1)
            mean, std = self.step(x, v, sigma, after, eta)
            x = mean + std * torch.randn(x.shape) if eta else mean
            log_probs.append(self.log_prob(x, mean, std) if eta else torch.zeros(len(x)))

    @torch.no_grad()
    def decode(self, latents):
        """uint8 videos [n, F, H, W, 3]."""
        videos = []
        for part in latents.split(self.settings.decode_micro):
            part = (part * self.std + self.mean).contiguous(memory_format=torch.channels_last_3d)
            video = ((self.vae.decode(part).sample / 2 + 0.5) * 255).round().to(torch.uint8)
            videos.append(video.permute(0, 2, 3, 4, 1).numpy())
        return np.concatenate(videos)

    def score(self, prompts, videos):
        samples = [Sample(p, i, v, 8.0) for i, (p, v) in enumerate(zip(prompts, videos, strict=True))]
        return torch.tensor([s.value for s in self.reward.score(samples)], dtype=torch.float64)

    def update(self, rows, texts):
        """One optimizer step on rows of equal weight: x, x_next, sigma, after, log_prob, advantage, each [n, ...]."""
        self.optimizer.zero_grad()
        n, micro, clip = len(texts), self.settings.update_micro, self.settings.clip
        for start in range(0, n, micro):
            part = slice(start, start + micro)
            x, x_next, sigma, after, old, advantage = (t[part] for t in rows)
            mean, std = self.step(x, self.velocity(x, sigma, texts[part]), sigma, after, self.settings.eta)
            ratio = (self.log_prob(x_next, mean, std) - old).exp()
            loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip))
            (loss.sum() / n).backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.settings.max_grad_norm)
        self.optimizer.step()
        self.schedule.step()

    def iteration(self, step):
        """One rollout with its updates; the mean reward."""
        s = self.settings
        chosen = self.random.sample(train_prompts(), s.prompts)
        prompts = [p for p in chosen for _ in range(s.samples)]
        texts = [p.text for p in prompts]
        with self.timed("rollout"):
            first = torch.randn(s.prompts, *self.latent_shape).repeat_interleave(s.samples, 0)
            latents, states, log_probs = self.sample(texts, first, s.eta)
        with self.timed("decode"):
            videos = self.decode(latents)
        with self.timed("reward"):
            rewards = self.score(prompts, videos).view(s.prompts, s.samples)
        centred = rewards - rewards.mean(1, keepdim=True)
        advantage = (centred / (rewards.std(1, keepdim=True) + 1e-8)).clamp(-5, 5).flatten().float()
        with self.timed("update"):
            n_steps = int((s.steps - 1) * s.fraction)
            orders = torch.stack([torch.randperm(s.samples) for _ in range(s.prompts)])
            orders += torch.arange(s.prompts)[:, None] * s.samples
            for part in orders.chunk(s.updates, 1):
                owner = part.flatten().repeat_interleave(n_steps)
                k = torch.cat([torch.randperm(s.steps - 1)[:n_steps] for _ in range(part.numel())])
                rows = (states[owner, k], states[owner, k + 1], self.sigmas[k], self.sigmas[k + 1])
                rows += (log_probs[owner, k], advantage[owner])
                self.update(rows, [texts[i] for i in owner.tolist()])
        return float(rewards.mean())

    def evaluate(self, prompts):
        """Mean reward of the deterministic sampler, with the same noise at every call."""
        prompts = [p for p in prompts for _ in range(self.settings.eval_samples)]
        noise = torch.randn(len(prompts), *self.latent_shape, generator=torch.Generator().manual_seed(1234))
        latents, *_ = self.sample([p.text for p in prompts], noise, 0.0)
        return float(self.score(prompts, self.decode(latents)).mean())

    @property
    def latent_shape(self):
        return self.vae.config.z_dim, 3, 4, 4


def run(folder, iterations, *, evaluate=False, clock=time.perf_counter, **settings):
    """`iterations` of DanceGRPO from the pipeline in `folder`.

    Returns {"seconds": {stage: total on `clock`}, "rewards": [mean of each rollout], "heldout": [before, after]}.
    """
    bare = Bare(Path(folder), Settings(**settings), clock)
    heldout = [bare.evaluate(heldout_prompts())] if evaluate else []
    rewards = [bare.iteration(i) for i in range(iterations)]
    heldout += [bare.evaluate(heldout_prompts())] if evaluate else []
    return {"seconds": dict(bare.seconds), "rewards": rewards, "heldout": heldout}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--iterations", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    report = run(options.folder, options.iterations, evaluate=True, seed=options.seed)
    json.dump(report, sys.stdout, indent=1)
