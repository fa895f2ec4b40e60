"""CrossRL against the published DanceGRPO loop for Wan 2.1: seconds of a training iteration on a CPU, at equal loss.

    git clone https://github.com/XueZeyue/DanceGRPO  # tested with 15cc71d53cc2e6e18a68ee607d5fb6ba9a99e344
    python -m tests.bench.published_loop --checkout DanceGRPO            # ours in the demo's micro-batches
    python -m tests.bench.published_loop --checkout DanceGRPO --micro 1  # ours one by one, as theirs: without batching

Both sides train the same random, tiny Wan (16 latent channels and 8x in space, as their file takes for granted) at the
demo's sizes and settings, on the same prompts. Theirs is `train_one_step` of `fastvideo/train_grpo_wan_2_1.py`, which
is imported from the reader's checkout and called as it is, with its own sampling, decoding, loss and updates. Ours is
`run_iteration`. They take turns in this process, in random order, with one thread; the network evaluations of both are
counted. A/A pairs of ours give the noise of the machine. With so small a model most of the time goes into calls, not
into arithmetic, and with `--micro 1` both sides take about as long: the ratio is what batching brings here, and says
nothing of 1.3 B parameters on a GPU.

Equal loss: theirs trains on a rollout of slightly other weights, so that some ratios leave the clip range; our engine
gets the same states, actions, rewards and old log-probabilities, and loads the same weights. Compared are the losses of
all rows, their mean and the norm of the gradient. Ours needs no setting for that: at shift 1 and 8 steps every timestep
is a whole number, so that their truncation of timesteps to integers changes nothing.

Adapted, all from outside of their file:
- imports that are not used here are stubs: cv2, wandb and all of fastvideo.* (parallelism, data, checkpoints, logging)
- its main() is replaced: one gloo process, no FSDP (their Wan file has none), constant learning rate, no logs
- weights and arithmetic are fp32 on both sides; its main() loads bf16
- torch.autocast("cuda") is an empty context: without CUDA it has no effect, but looks for torch_xla at every call
- a hook casts the bf16 initial state to fp32 before the network, as autocast would on a GPU
- HPSv2 (model, tokenizer, preprocessing) is replaced by our side's reward: smoothness of all frames, in closed form
- decoded frames are handed over in memory; leaving out the mp4's writing and reading saves time on their side only
- text embeddings are made beforehand, as in their preprocessing, and by the warm-up on our side
- guidance is off on both sides (cfg_infer=1; their script has 5), and so is gradient checkpointing
- prints and progress bars are swallowed; reward.txt goes to a temporary folder
Different, but the same work:
- one initial state for all prompts of their iteration, one a prompt in ours
- their updates take the samples in order, ours an equal part of each group
"""

import argparse
import contextlib
import importlib.util
import io
import json
import os
import platform
import sys
import tempfile
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import numpy as np
import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel

from crossrl.build import build_algorithm, build_engine
from crossrl.data import PromptCursor, load_prompts
from crossrl.launch import prepare
from crossrl.local import LocalWorkers
from crossrl.loop import Run, run_iteration
from crossrl.rewards import InlineRewards, RewardSet
from crossrl.types import Rows, Sample, SampleKey
from crossrl_t2v import kernel
from crossrl_t2v.toy.build import build_text, build_transformer
from tests.bench.iteration import compare

FILE = Path("fastvideo", "train_grpo_wan_2_1.py")
STUBS = ["cv2", "wandb", "fastvideo.dataset.latent_wan_2_1_rl_datasets"]
STUBS += [f"fastvideo.utils.{name}" for name in ("parallel_states", "communications_flux", "validation")]
STUBS += [f"fastvideo.utils.{name}" for name in ("dataset_utils", "fsdp_util", "load", "checkpoint", "logging_")]
OFF_POLICY = 0.2  # relative change of the weights between rollout and training in the comparison of losses


def build_pipeline(folder):
    """A random Wan 2.1 in diffusers' layout: the demo's network and the layout of Wan 2.1's VAE, at 16 channels."""
    tokenizer, text_encoder = build_text(0)
    network = dict(build_transformer(0).config) | {"in_channels": 16, "out_channels": 16}
    torch.manual_seed(0)
    transformer = WanTransformer3DModel.from_config(network)
    layout = {"dim_mult": [1, 2, 2, 2], "num_res_blocks": 1, "temperal_downsample": [False, True, True]}
    vae = AutoencoderKLWan(base_dim=8, z_dim=16, **layout)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    WanPipeline(tokenizer, text_encoder, vae, scheduler, transformer).save_pretrained(folder)


class Ours:
    """Our iteration in this process; `micro` replaces all micro-batches of the demo."""

    def __init__(self, folder, micro):
        sizes = [f"batch.{stage}_micro={micro}" for stage in ("rollout", "decode", "reward", "update") if micro]
        same = ["optimizer.schedule=constant", "rewards=[{name:toy,options:{kind:smoothness}}]"]
        config = prepare("demo", [f"model.path={folder}", *same, *sizes]).run
        self.engine = build_engine(config, "cpu")
        data = PromptCursor(load_prompts(config.data.train), config.batch.prompts, config.seed)
        rewards = InlineRewards(RewardSet.from_config(config))
        self.run = Run(config, data, LocalWorkers(self.engine), rewards, build_algorithm(config))
        self.forwards = config.batch.prompts * config.batch.samples * (2 * config.sampling.steps - 1)

    def iteration(self, step):
        """One; asserts the amount of work."""
        metrics = run_iteration(self.run, step)
        assert metrics["rollout/forwards"] + metrics["update/forwards"] == self.forwards


class Captions(list):
    """What the reward's tokenizer returns: the texts themselves."""

    def to(self, **_):
        """They live nowhere."""
        return self


class Scorer:
    """The checkout's way from decoded frames to a score, without files, around one of our rewards."""

    def __init__(self, reward, prompts):
        self.reward, self.prompts = reward, {p.text: p for p in prompts}

    def write(self, frames, path, fps):
        """In the place of the mp4 writer."""
        self.frames = (frames * 255).round().astype(np.uint8)

    def model(self, image, text):
        """In the place of HPSv2: features whose product is the score."""
        score = self.reward.score([Sample(self.prompts[text[0]], 0, image[0].numpy(), 8.0)])[0].value
        return {"image_features": torch.tensor([[score]]), "text_features": torch.ones(1, 1)}


def load_module(checkout):
    """Their file as a module; the stubs are gone again afterwards."""
    added = {name: MagicMock() for name in STUBS if name not in sys.modules}
    spec = importlib.util.spec_from_file_location("published_wan", Path(checkout) / FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules.update(added)
    try:
        spec.loader.exec_module(module)
    finally:
        for name in added:
            del sys.modules[name]
    return module


def load_network(folder):
    """The transformer, which takes any float dtype as it would under autocast."""
    net = WanTransformer3DModel.from_pretrained(folder / "transformer")
    net.register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | {"hidden_states": kwargs["hidden_states"].float()}), with_kwargs=True
    )
    return net


class Published:
    """Their iteration with the model, prompts, sizes and settings of `ours`."""

    def __init__(self, checkout, ours):
        self.run, self.condition, self.scratch = ours.run, ours.engine.condition, ours.engine.family.folder
        config, self.expected, self.forwards = ours.run.config, ours.forwards, 0
        self.net = load_network(self.scratch)
        self.net.register_forward_hook(self._count, with_kwargs=True)
        self.vae = AutoencoderKLWan.from_pretrained(self.scratch / "vae").requires_grad_(False)
        adam = config.optimizer.model_dump(include={"lr", "betas", "eps", "weight_decay"})
        self.optimizer = torch.optim.AdamW(self.net.parameters(), **adam)
        self.scorer = Scorer(ours.run.rewards.rewards.rewards[0], load_prompts(config.data.train))
        self.module = load_module(checkout)
        self.module.tqdm = partial(self.module.tqdm, disable=True)
        self.module.export_to_video = self.scorer.write
        self.module.video_first_frame_to_pil = lambda path: self.scorer.frames
        self.schedule = self.module.get_scheduler("constant", self.optimizer)
        batch, options, video = config.batch, ours.run.algorithm.options, config.video
        self.args = SimpleNamespace(w=video.width, h=video.height, t=video.frames, use_group=True, use_hpsv2=True)
        self.args.sampling_steps, self.args.shift = config.sampling.steps, config.sampling.shift
        self.args.cfg_infer, self.args.init_same_noise = config.sampling.guidance, options.same_noise
        self.args.eta, self.args.timestep_fraction = options.eta, options.timestep_fraction
        self.args.clip_range, self.args.adv_clip_max = options.clip_range, options.adv_clip
        self.args.num_generations = batch.samples
        self.args.gradient_accumulation_steps = batch.prompts * batch.samples // batch.updates

    def _count(self, _module, _args, kwargs, _output):
        self.forwards += len(kwargs["hidden_states"])

    def step(self, step):
        """Their (sum of losses, norm of the last gradient) of one iteration."""
        texts = [p.text for p in self.run.data.batch_at(step)]
        embeddings = self.condition(texts)["encoder_hidden_states"]
        parts = (self.net, self.vae, self.scorer.model, Captions, self.optimizer, self.schedule)
        conditions = (embeddings, torch.zeros_like(embeddings), texts)
        rest = (None, self.run.config.optimizer.max_grad_norm, torch.from_numpy)
        with contextlib.ExitStack() as stack:
            for module in (torch, torch.amp):
                stack.enter_context(patch.object(module, "autocast", lambda *_, **__: contextlib.nullcontext()))
            stack.enter_context(contextlib.chdir(self.scratch))
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            return self.module.train_one_step(self.args, "cpu", *parts, *conditions, *rest)

    def iteration(self, step):
        """One; asserts the amount of work."""
        self.forwards = 0
        self.step(step)
        assert self.forwards == self.expected


def record(function, seen):
    """`function`, which also appends (arguments, result) to `seen`."""

    def recorded(*args, **kwargs):
        result = function(*args, **kwargs)
        seen.append((args, result))
        return result

    return recorded


def compare_losses(checkout, ours):
    """Both losses and gradients on the rows of one published rollout, at equal weights; see the module."""
    published, engine = Published(checkout, ours), ours.engine
    module, batch, rollouts, rows, losses, outs = published.module, ours.run.config.batch, [], [], [], []
    n = published.args.gradient_accumulation_steps = batch.prompts * batch.samples  # one gradient of all rows
    behaviour, torch_rng = load_network(published.scratch), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in behaviour.parameters():
            p.mul_(1 + OFF_POLICY * torch.randn(p.shape, generator=torch_rng))
    rollout = record(module.sample_reference_model, rollouts)
    module.sample_reference_model = lambda args, device, _, *rest: rollout(args, device, behaviour, *rest)
    module.grpo_one_step = record(module.grpo_one_step, rows)
    with patch.object(torch.distributed, "all_reduce", record(torch.distributed.all_reduce, losses)):
        mean, norm = published.step(0)

    (_, (rewards, _, log_probs, _)), sampling = rollouts[0], ours.run.config.sampling
    scores = rewards.double().numpy().reshape(batch.prompts, batch.samples, 1)
    advantages = ours.run.algorithm.advantages(scores, np.ones(scores.shape[:2], dtype=bool)).values.flatten()
    k = torch.tensor([int(args[7]) for args, _ in rows])
    owner = torch.arange(n).repeat_interleave(len(rows) // n)
    sigmas = kernel.sigmas(sampling.steps, sampling.shift)
    targets = {
        "x_next": torch.cat([args[2] for args, _ in rows]),
        "sigma_next": sigmas[k + 1],
        "log_prob": log_probs[owner, k],
        "advantage": torch.tensor(advantages, dtype=torch.float32)[owner],
    }
    keys = [SampleKey(p, g) for p in ours.run.data.batch_at(0) for g in range(batch.samples)]
    same = Rows(torch.cat([args[1] for args, _ in rows]), sigmas[k], owner, targets)
    with patch.object(engine.algorithm, "loss", record(engine.algorithm.loss, outs)):
        stats = engine.accumulate(same, keys, torch.full((len(rows),), 1 / len(rows)))
    our_norm = engine.clip_grad_norm(ours.run.config.optimizer.max_grad_norm)
    engine.optimizer.zero_grad()
    engine.take_forwards()

    a = torch.cat([out.loss for _, out in outs]).detach().double()
    b = torch.tensor([args[0].item() for args, _ in losses], dtype=torch.float64) * len(rows)
    ratio = torch.cat([out.metrics["ratio"] for _, out in outs])
    their_ratio = (torch.cat([result.detach() for _, result in rows]) - targets["log_prob"]).exp()
    relative, size = (a - b).abs() / b.abs(), b.abs().mean()
    return {
        "rows": len(rows),
        "rows_clipped": round((stats.sums["clip_high"] + stats.sums["clip_low"]) * len(rows)),
        "ratio_range": [float(ratio.min()), float(ratio.max())],
        "ratio_largest_relative_difference": float((ratio / their_ratio - 1).abs().max()),
        "largest_relative_difference": float(relative.max()),  # of a row with an advantage close to 0
        "its_loss": float(b[relative.argmax()]),
        "median_relative_difference": float(relative.median()),
        "largest_difference_over_mean_size": float((a - b).abs().max() / size),
        "mean": {"ours": stats.sums["loss"], "published": mean, "mean_size": float(size)},
        "gradient_norm": {"ours": our_norm, "published": norm, "relative_difference": abs(our_norm / norm - 1)},
    }


class Stopwatch:
    """`function`, with the wall seconds of all its calls."""

    def __init__(self, function):
        self.function, self.seconds = function, []

    def __call__(self, step):
        start = time.perf_counter()
        self.function(step)
        self.seconds.append(time.perf_counter() - start)

    def summary(self):
        """For the report."""
        return {"median": float(np.median(self.seconds)), "all": self.seconds}


def measure(options):
    """The report."""
    torch.set_num_threads(1)
    os.environ["RANK"] = "0"  # read by their sampling
    with tempfile.NamedTemporaryFile() as store:
        torch.distributed.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        build_pipeline(folder)
        ours = Ours(folder, options.micro)
        report = {"loss": compare_losses(options.checkout, ours)}
        published = Published(options.checkout, ours)
        for warm in (ours.iteration, published.iteration):
            warm(0)
        left, right = Stopwatch(ours.iteration), Stopwatch(published.iteration)
        report["ratio_ours_over_published"] = compare(left, right, options.pairs)
        report["seconds_per_iteration"] = {"ours": left.summary(), "published": right.summary()}
        report["noise_ours_over_ours"] = compare(ours.iteration, ours.iteration, options.pairs)
    sizes = ours.run.config.model_dump(include={"algorithm", "video", "sampling", "batch", "optimizer"})
    report["settings"] = sizes | {"latents": ours.engine.family.latent_shape(*list(sizes["video"].values())[:3])}
    report["adaptations"] = [line[2:] for line in __doc__.splitlines() if line.startswith("- ")]
    versions = {name: version(name) for name in ("crossrl-core", "torch", "veomni", "verl", "diffusers")}
    return report | {"machine": {"processor": platform.machine(), "load": os.getloadavg(), "versions": versions}}


def main():
    """Print the report as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True, help="a clone of DanceGRPO")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--micro", type=int, help="samples or rows a call on our side, in all stages")
    options = parser.parse_args()
    with contextlib.redirect_stdout(sys.stderr):  # VeOmni logs to stdout
        report = measure(options)
    json.dump(report, sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
