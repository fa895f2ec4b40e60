"""Makes the tiny Wan model: `python -m crossrl_t2v.toy.build OUT --seed 0`.

The result is a diffusers folder for `WanPipeline`. The VAE is trained here, in about five minutes of one core; the text
encoder is random and frozen; the transformer is random and becomes a base model by flow matching elsewhere.
"""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from crossrl_t2v.toy import TEXT_LENGTH
from crossrl_t2v.toy.rewards import measure
from crossrl_t2v.toy.world import COLOURS, DIRECTIONS, SHAPES, ToyData, parse

log = logging.getLogger(__name__)

TEXT_DIM, LATENT_CHANNELS = 64, 8
_PAD, _EOS, _UNKNOWN = "<pad>", "</s>", "<unk>"
_WORDS = (_PAD, _EOS, _UNKNOWN, "a", "moving", *COLOURS, *SHAPES, *DIRECTIONS)

_BATCH, _LR, _WARMUP = 8, 3e-3, 20
_SHARPEN = 0.6  # part of the steps after which L1 is added and the KL weight falls
_KL, _KL_LATE = 1e-4, 1e-5
_LOG_VARIANCE = -4.0  # a posterior that starts narrow learns to reconstruct about twice as fast


def build_text(seed: int) -> tuple[PreTrainedTokenizerFast, UMT5EncoderModel]:
    """A 16-word tokenizer and a random frozen encoder, fp32, `TEXT_DIM` wide."""
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(_WORDS)}, unk_token=_UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(
        single=f"$A {_EOS}", special_tokens=[(_EOS, _WORDS.index(_EOS))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=_PAD, eos_token=_EOS, unk_token=_UNKNOWN, model_max_length=TEXT_LENGTH
    )
    torch.manual_seed(seed)
    config = UMT5Config(
        vocab_size=len(_WORDS),
        d_model=TEXT_DIM,
        d_kv=TEXT_DIM // 4,
        d_ff=2 * TEXT_DIM,
        num_layers=1,
        num_heads=4,
        pad_token_id=_WORDS.index(_PAD),
        eos_token_id=_WORDS.index(_EOS),
    )
    return tokenizer, UMT5EncoderModel(config).eval().requires_grad_(False)


def build_vae(seed: int) -> AutoencoderKLWan:
    """An untrained VAE, fp32: videos [n, 3, 9, 32, 32] in [-1, 1] <-> latents [n, 8, 3, 4, 4]."""
    torch.manual_seed(seed)
    vae = AutoencoderKLWan(
        base_dim=8,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        patch_size=2,
        in_channels=12,
        out_channels=12,
        is_residual=True,
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
        scale_factor_temporal=4,
        scale_factor_spatial=8,
    )
    torch.nn.init.constant_(vae.quant_conv.bias[LATENT_CHANNELS:], _LOG_VARIANCE)
    _channels_last(vae)
    return vae


def build_transformer(seed: int) -> WanTransformer3DModel:
    """The network that RL trains, random, fp32, 0.5 M parameters."""
    torch.manual_seed(seed)
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=3,
        attention_head_dim=32,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        text_dim=TEXT_DIM,
        freq_dim=64,
        ffn_dim=288,
        num_layers=3,
    )


def train_vae(seed: int, steps: int) -> AutoencoderKLWan:
    """A VAE trained on toy clips, with `latents_mean` and `latents_std` in its config; logs progress."""
    vae = build_vae(seed)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=_LR, betas=(0.9, 0.95), weight_decay=0.0)
    clips = ToyData(seed).batches("train", _BATCH)
    for step in range(steps):
        sharpen = step >= _SHARPEN * steps
        loss = _vae_loss(vae, to_tensor(next(clips)[1]), sharpen)
        optimizer.param_groups[0]["lr"] = _lr(step, steps)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            reward = reconstruction_reward(vae)
            log.info("VAE step %d of %d: loss %.4f, reconstruction reward %.3f", step + 1, steps, loss.item(), reward)
    mean, std = _latent_statistics(vae, seed)
    vae.register_to_config(latents_mean=mean, latents_std=std)
    return vae.eval().requires_grad_(False)


def reconstruction_reward(vae: AutoencoderKLWan, clips: int = 96) -> float:
    """Mean toy reward of encoded and decoded held-out clips with true captions; 1 for a perfect VAE."""
    captions, videos = ToyData(seed=1_000_003, p_wrong=0.0, p_empty=0.0).clips("heldout", range(clips))
    with torch.no_grad():
        latents = vae.encode(to_tensor(videos).to(vae.dtype)).latent_dist.mode()
        decoded = to_videos(vae.decode(latents).sample)
    return float(measure(decoded, [parse(c) for c in captions])["toy"].mean())


def to_tensor(videos: np.ndarray) -> torch.Tensor:
    """uint8 [n, F, H, W, 3] -> fp32 [n, 3, F, H, W] in [-1, 1]."""
    return torch.from_numpy(videos).permute(0, 4, 1, 2, 3).float() / 127.5 - 1.0


def to_videos(x: torch.Tensor) -> np.ndarray:
    """Floats [n, 3, F, H, W] in [-1, 1] -> uint8 [n, F, H, W, 3]."""
    pixels = ((x.float().clamp(-1.0, 1.0) + 1.0) * 127.5).round().to(torch.uint8)
    return pixels.permute(0, 2, 3, 4, 1).contiguous().numpy()


def build(folder: str | Path, seed: int = 0, vae_steps: int = 900, transformer_weights: bool = True) -> None:
    """Write the whole model into `folder`, the VAE in fp16, the transformer in fp32 or only its config."""
    folder = Path(folder)
    tokenizer, text_encoder = build_text(seed)
    vae = train_vae(seed, vae_steps)
    for parameter in vae.parameters():
        parameter.data = parameter.data.half()
    pipeline = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        vae=vae,
        transformer=build_transformer(seed),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
    )
    pipeline.save_pretrained(folder)
    if not transformer_weights:
        for weights in (folder / "transformer").glob("*.safetensors"):
            weights.unlink()
    stored = AutoencoderKLWan.from_pretrained(folder / "vae")  # computes in fp32
    log.info("wrote %s: reconstruction reward %.4f as stored in fp16", folder, reconstruction_reward(stored))


def _vae_loss(vae: AutoencoderKLWan, x: torch.Tensor, sharpen: bool) -> torch.Tensor:
    posterior = vae.encode(x).latent_dist
    error = vae.decode(posterior.sample()).sample - x
    weight = 1.0 + 8.0 * (x.amax(1, keepdim=True) > -0.7)  # the object is a small part of the picture
    loss = (weight * error**2).mean()
    if sharpen:
        loss = loss + 0.3 * (weight * error.abs()).mean()
    return loss + (_KL_LATE if sharpen else _KL) * posterior.kl().mean() / posterior.mean[0].numel()


def _lr(step: int, steps: int) -> float:
    cosine = 0.5 * (1.0 + math.cos(math.pi * step / steps))
    return _LR * min(1.0, (step + 1) / _WARMUP) * (0.99 * cosine + 0.01)


@torch.no_grad()
def _latent_statistics(vae: AutoencoderKLWan, seed: int) -> tuple[list[float], list[float]]:
    _, videos = ToyData(seed).clips("train", range(256))
    latents = torch.cat([vae.encode(to_tensor(v)).latent_dist.mode() for v in np.array_split(videos, 8)])
    over = (0, 2, 3, 4)
    return [round(m, 5) for m in latents.mean(over).tolist()], [round(s, 5) for s in latents.std(over).tolist()]


def _channels_last(vae: AutoencoderKLWan) -> None:
    """Same numbers, but convolutions and channel norms take about 40 % less time on a CPU."""
    for module in vae.modules():
        if isinstance(module, torch.nn.Conv3d):
            module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last_3d)
        elif isinstance(module, torch.nn.Conv2d):
            module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m crossrl_t2v.toy.build", description=__doc__)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vae-steps", type=int, default=900)
    parser.add_argument("--no-transformer-weights", action="store_true", help="write only the transformer's config")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    build(options.out, options.seed, options.vae_steps, not options.no_transformer_weights)


if __name__ == "__main__":
    main()
