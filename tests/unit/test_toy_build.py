"""The shipped tiny model loads as a Wan pipeline and its VAE reconstructs."""

import json

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, WanPipeline
from transformers import AutoTokenizer, UMT5EncoderModel

from crossrl_t2v.toy import MODEL_FOLDER, TEXT_LENGTH, build, world


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_stored_vae_reconstructs():
    vae = AutoencoderKLWan.from_pretrained(MODEL_FOLDER / "vae").eval()
    assert build.reconstruction_reward(vae, clips=32) >= 0.9


def test_latent_shape_and_statistics():
    vae = AutoencoderKLWan.from_pretrained(MODEL_FOLDER / "vae").eval()
    with torch.no_grad():
        videos = world.ToyData(seed=9).clips("train", range(32))[1]
        latents = vae.encode(build.to_tensor(videos)).latent_dist.mode()
    assert latents.shape == (32, 8, 3, 4, 4)
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    normal = (latents - mean) / std
    assert normal.mean().abs() < 0.1 and 0.85 < normal.std() < 1.15


def test_tokenizer_knows_every_prompt():
    tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDER / "tokenizer")
    texts = [a.text for a in world.COMBINATIONS]
    ids = tokenizer(texts, padding="max_length", max_length=TEXT_LENGTH)["input_ids"]
    assert all(len(row) == TEXT_LENGTH and tokenizer.unk_token_id not in row for row in ids)
    assert len({tuple(row) for row in ids}) == 48
    assert tokenizer("", padding="max_length", max_length=TEXT_LENGTH)["attention_mask"] == [1] + [0] * 7
    assert tokenizer.unk_token_id in tokenizer("a purple circle")["input_ids"]


def test_stored_text_encoder_is_the_seeded_one():
    stored = UMT5EncoderModel.from_pretrained(MODEL_FOLDER / "text_encoder")
    assert stored.dtype == torch.float32 and stored.config.d_model == build.TEXT_DIM


def test_pipeline_loads_and_draws(tmp_path):
    for part in ("model_index.json", "scheduler", "tokenizer", "text_encoder", "vae"):
        (tmp_path / part).symlink_to(MODEL_FOLDER / part)
    build.build_transformer(seed=0).save_pretrained(tmp_path / "transformer")
    pipeline = WanPipeline.from_pretrained(tmp_path)
    pipeline.set_progress_bar_config(disable=True)
    size = {"height": 32, "width": 32, "num_frames": 9, "num_inference_steps": 2}
    draw = {**size, "guidance_scale": 1.0, "max_sequence_length": TEXT_LENGTH}
    prompt = "a red circle moving up"
    assert pipeline(prompt, **draw, output_type="latent").frames.shape == (1, 8, 3, 4, 4)
    frames = pipeline(prompt, **draw, output_type="np").frames
    assert frames.shape == (1, 9, 32, 32, 3) and np.isfinite(frames).all()


def test_stored_configs_are_what_build_makes():
    transformer, vae = build.build_transformer(0), build.build_vae(0)
    for name, made in (("transformer", transformer), ("vae", vae)):
        stored = json.loads((MODEL_FOLDER / name / "config.json").read_text())
        for key, value in made.config.items():
            if not key.startswith(("_", "latents_")):
                assert stored[key] == (list(value) if isinstance(value, tuple) else value), key


def test_shipped_files_are_small():
    size = sum(f.stat().st_size for f in MODEL_FOLDER.rglob("*") if f.is_file() and "transformer" not in f.parts)
    assert size < 1_000_000


def test_two_training_steps_make_a_finite_vae(tmp_path):
    build.build(tmp_path, seed=1, vae_steps=2, transformer_weights=False)
    assert not list((tmp_path / "transformer").glob("*.safetensors"))
    vae = AutoencoderKLWan.from_pretrained(tmp_path / "vae")
    assert all(torch.isfinite(p).all() for p in vae.parameters()) and min(vae.config.latents_std) > 0


def test_video_conversion_is_exact():
    videos = world.ToyData().clips("train", [0])[1]
    assert np.array_equal(build.to_videos(build.to_tensor(videos)), videos)
