"""Wan 2.1 and Wan 2.2-TI2V-5B text-to-video models (arXiv 2503.20314) in diffusers' folder layout.

Prompts are encoded as `WanPipeline` does. Videos are decoded latent frame by latent frame through the causal VAE's own
feature cache: exactly the result of decoding all at once, with a memory peak that does not grow with the clip.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError

from crossrl.config import Model, Video
from crossrl.errors import ConfigError, DataError
from crossrl_t2v.toy import MODEL_FOLDER

if TYPE_CHECKING:  # the driver checks a config with this class, and can do without their seconds of import
    from diffusers import AutoencoderKLWan
    from transformers import AutoTokenizer, UMT5EncoderModel

MAX_TEXT_TOKENS = 512  # Wan was trained with this many; its tokenizer states no limit of its own


class WanFamily:
    """Text encoder and VAE of a Wan pipeline folder; the transformer is the backend's."""

    def __init__(
        self, folder: Path, tokenizer: AutoTokenizer, text_encoder: UMT5EncoderModel, vae: AutoencoderKLWan
    ) -> None:
        self.folder, self.tokenizer = folder, tokenizer
        self.text_encoder, self.vae = text_encoder.eval().requires_grad_(False), vae.eval().requires_grad_(False)
        self.to("cpu")

    @classmethod
    def check(cls, model: Model, video: Video) -> None:
        """Raise for a folder, a number of layers or a video size that cannot be; reads its JSON files only."""
        folder = _pipeline_folder(model.path)
        _latent_shape(folder, video.frames, video.height, video.width)
        layers = _config(folder, "transformer")["num_layers"]
        if model.layers is not None and model.layers > layers:
            raise ConfigError(f"{model.layers} of {layers} layers", where="model.layers", fix=f"at most {layers}")

    @classmethod
    def open(cls, path: str, dtype: str) -> WanFamily:
        """Load from a local folder, or the model that ships for `path == "toy"`; nothing is downloaded.

        `dtype` ("float32" or "bfloat16") is the text encoder's; the VAE stays in fp32, as diffusers advises for Wan.
        Raises `DataError` for a missing or damaged component or missing weights, `ConfigError` for a two-expert model.
        """
        from diffusers import AutoencoderKLWan
        from transformers import AutoTokenizer, UMT5EncoderModel

        folder = _pipeline_folder(path)
        tokenizer = _load(AutoTokenizer, folder / "tokenizer", trust_remote_code=False)
        text_encoder = _load_model(UMT5EncoderModel, folder / "text_encoder", dtype=getattr(torch, dtype))
        vae = _load_model(AutoencoderKLWan, folder / "vae", torch_dtype=torch.float32)
        return cls(folder, tokenizer, text_encoder, vae)

    def to(self, device: str) -> None:
        """Move the text encoder and the VAE; on a CPU the VAE runs channels-last, which halves its time there."""
        on_cpu = torch.device(device).type == "cpu"
        self.layout = torch.channels_last_3d if on_cpu else torch.contiguous_format
        for module in self.vae.modules():
            if isinstance(module, torch.nn.Conv3d):
                module.to(memory_format=self.layout)
            elif isinstance(module, torch.nn.Conv2d):
                module.to(memory_format=torch.channels_last if on_cpu else torch.contiguous_format)
        self.text_encoder.to(device)
        self.vae.to(device)

    @torch.no_grad()
    def encode_text(self, texts: Sequence[str]) -> dict[str, torch.Tensor]:
        """`encoder_hidden_states` [n, L, text_dim] on CPU in the text encoder's dtype; zero after a text's last token.

        The same as `WanPipeline.encode_prompt`, except that a prompt of more than L tokens is a `DataError`: it is
        never cut. L is the tokenizer's limit, at most 512.
        """
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        limit = min(self.tokenizer.model_max_length, MAX_TEXT_TOKENS)
        tokens = self.tokenizer([prompt_clean(text) for text in texts], padding="max_length", max_length=limit)
        for text, mask in zip(texts, tokens.attention_mask, strict=True):
            if len(mask) > limit:
                text = text if len(text) < 80 else text[:77] + "..."
                raise DataError(f"prompt of {len(mask)} tokens, at most {limit} fit: {text!r}", fix="shorten it")
        ids = torch.tensor(tokens.input_ids, device=self.text_encoder.device)
        mask = torch.tensor(tokens.attention_mask, device=self.text_encoder.device)
        hidden = self.text_encoder(ids, mask).last_hidden_state
        return {"encoder_hidden_states": hidden.masked_fill(~mask.bool()[..., None], 0).cpu()}

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """(C, F, H, W) of a video's latents; raises `ConfigError` for a size that the model cannot make."""
        return _latent_shape(self.folder, frames, height, width)

    def _statistics(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and inverse standard deviation of the latents, [1, C, 1, 1, 1]: the pipeline's own two numbers."""
        mean = torch.tensor(self.vae.config.latents_mean, dtype=like.dtype, device=like.device)
        inverse_std = 1.0 / torch.tensor(self.vae.config.latents_std, dtype=like.dtype, device=like.device)
        return mean.view(1, -1, 1, 1, 1), inverse_std.view(1, -1, 1, 1, 1)

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> np.ndarray:
        """latents [n, C, F, H, W] -> uint8 videos [n, frames, height, width, 3] on the host.

        Every chunk of frames (1, then 4 a latent frame) goes to the host at once, as uint8.
        """
        latents = latents.to(self.vae.device, self.vae.dtype)
        mean, inverse_std = self._statistics(latents)
        latents = (latents / inverse_std + mean).contiguous(memory_format=self.layout)
        chunks = [self._to_uint8(frames) for frames in self._stream(latents)]
        return np.concatenate(chunks, axis=1)

    def _stream(self, latents: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the decoded frames [n, 3, f, height, width] in [-1, 1] of each latent frame in turn."""
        from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, unpatchify

        hidden = self.vae.post_quant_conv(latents)
        cache: list[torch.Tensor | str | None] = [None] * sum(
            isinstance(module, WanCausalConv3d) for module in self.vae.decoder.modules()
        )
        for i in range(hidden.shape[2]):
            frames = self.vae.decoder(hidden[:, :, i : i + 1], feat_cache=cache, feat_idx=[0], first_chunk=i == 0)
            if self.vae.config.patch_size is not None:
                frames = unpatchify(frames, patch_size=self.vae.config.patch_size)
            yield frames.clamp(-1.0, 1.0)

    @staticmethod
    def _to_uint8(frames: torch.Tensor) -> np.ndarray:
        pixels = ((frames.float() / 2 + 0.5) * 255).round().to(torch.uint8)
        return pixels.permute(0, 2, 3, 4, 1).cpu().numpy()

    @torch.no_grad()
    def encode_video(self, videos: np.ndarray) -> torch.Tensor:
        """uint8 videos [n, frames, height, width, 3] -> its posterior's mode, normalised, [n, C, F, H, W] fp32 CPU."""
        pixels = torch.from_numpy(np.ascontiguousarray(videos)).to(self.vae.device).permute(0, 4, 1, 2, 3)
        pixels = (pixels.to(self.vae.dtype) / 127.5 - 1).contiguous(memory_format=self.layout)
        latents = self.vae.encode(pixels).latent_dist.mode()
        mean, inverse_std = self._statistics(latents)
        return ((latents - mean) * inverse_std).float().cpu()


def _pipeline_folder(path: str) -> Path:
    """The folder that `path` names, with all components; `DataError` or `ConfigError` if it is none of a Wan model."""
    folder = MODEL_FOLDER if path == "toy" else Path(path)
    fix = "give a Wan text-to-video pipeline folder in diffusers' layout, on this machine; or toy"
    if not (folder / "model_index.json").is_file():
        raise DataError(f"{path!r} is no pipeline folder: it has no model_index.json", where="model.path", fix=fix)
    if (folder / "transformer_2").exists():
        raise ConfigError(
            "models with two experts (transformer_2, Wan2.2-A14B) cannot be trained yet",
            where="model.path",
            fix="use a Wan2.1 text-to-video model or Wan2.2-TI2V-5B",
        )
    for name in ("tokenizer", "text_encoder", "vae", "transformer"):
        if not (folder / name).is_dir():
            raise DataError(f"component {name!r} is missing", where=str(folder), fix=fix)
    return folder


def _config(folder: Path, component: str) -> dict[str, Any]:
    """A component's `config.json`; `DataError` if it cannot be read."""
    path = folder / component / "config.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read: {error}", where=str(path), fix="copy the model's folder again") from error


def _latent_shape(folder: Path, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
    patch, vae = _config(folder, "transformer")["patch_size"], _config(folder, "vae")
    time, space = vae.get("scale_factor_temporal", 4), vae.get("scale_factor_spatial", 8)  # Wan2.1's has neither
    for name, size, rest, step in (
        ("frames", frames, 1, time * patch[0]),
        ("height", height, 0, space * patch[1]),
        ("width", width, 0, space * patch[2]),
    ):
        if size % step != rest % step:
            near = max(rest + step * round((size - rest) / step), rest or step)
            raise ConfigError(
                f"{name}={size} is not {'1 more than ' if rest else ''}a multiple of {step}",
                where=f"video.{name}",
                fix=f"e.g. {near}",
            )
    return vae["z_dim"], 1 + (frames - 1) // time, height // space, width // space


def _load(cls: type, folder: Path, **options: Any) -> Any:
    """`cls.from_pretrained` of a local folder; `DataError` if it cannot be read."""
    try:
        return cls.from_pretrained(folder, local_files_only=True, **options)
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"cannot be loaded: {error}", where=str(folder)) from error


def _load_model(cls: type, folder: Path, **options: Any) -> Any:
    """`_load` of a network; both libraries only warn when they fill in missing weights at random, this raises."""
    model, report = _load(cls, folder, output_loading_info=True, **options)
    if missing := sorted(report["missing_keys"]):
        raise DataError(f"{len(missing)} weights are missing, e.g. {missing[0]}", where=str(folder))
    return model
