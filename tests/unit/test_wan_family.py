"""The Wan family against diffusers' own pipeline, on a tiny random model (T18 of the method notes)."""

import json
import shutil

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from crossrl.errors import ConfigError, DataError
from crossrl_t2v.models.wan import WanFamily

WORDS = ["<pad>", "<unk>", "a", "red", "blue", "circle", "cross", "moving", "up", "&", "down"]
WAN22 = {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12}  # Wan 2.2-TI2V-5B's layout
WAN21 = {"dim_mult": [1, 1, 2, 2], "temperal_downsample": [False, True, True]}


def make_vae(**layout) -> AutoencoderKLWan:
    settings = {"base_dim": 8, "z_dim": 4, "num_res_blocks": 1, "dim_mult": [1, 2, 2]}
    settings |= {"temperal_downsample": [True, True], "scale_factor_spatial": 8}
    statistics = {"latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.5, 0.5, 2.0, 1.1]}
    return AutoencoderKLWan(**(settings | statistics | layout)).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random Wan pipeline in diffusers' layout."""
    path = tmp_path_factory.mktemp("wan")
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", unk_token="<unk>", model_max_length=8
    )
    text = UMT5Config(vocab_size=len(WORDS), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    dit = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 16}
    transformer = WanTransformer3DModel(patch_size=(1, 2, 2), freq_dim=16, ffn_dim=16, num_layers=1, **dit)
    parts = {"tokenizer": tokenizer, "text_encoder": UMT5EncoderModel(text), "vae": make_vae(**WAN22)}
    WanPipeline(scheduler=FlowMatchEulerDiscreteScheduler(), transformer=transformer, **parts).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def family(folder):
    return WanFamily.open(str(folder), "float32")


@pytest.fixture(scope="module")
def pipeline(folder):
    return WanPipeline.from_pretrained(folder)


def with_vae(family, **layout):
    torch.manual_seed(1)
    return WanFamily(family.folder, family.tokenizer, family.text_encoder, make_vae(**layout))


def latents_of(family, n=3, frames=9, size=32, seed=0):
    return torch.randn(n, *family.latent_shape(frames, size, size), generator=torch.Generator().manual_seed(seed))


PROMPTS = ["a red circle moving up", " a  &amp;amp; blue\n cross", "", "a red cross moving down a red cross"]


def test_text_is_encoded_as_the_pipeline_does(family, pipeline):
    expected, _ = pipeline.encode_prompt(PROMPTS, do_classifier_free_guidance=False, max_sequence_length=8)
    got = family.encode_text(PROMPTS)
    assert list(got) == ["encoder_hidden_states"]
    assert torch.equal(got["encoder_hidden_states"], expected)
    assert (expected[0, 5:] == 0).all() and (expected[3] != 0).any(1).all()


def test_text_does_not_depend_on_its_batch(family):
    together = family.encode_text(PROMPTS)["encoder_hidden_states"]
    for i, text in enumerate(PROMPTS):
        torch.testing.assert_close(family.encode_text([text])["encoder_hidden_states"][0], together[i])


def test_a_prompt_that_is_too_long_is_never_cut(family):
    long = "a red circle moving up a red circle moving up"
    with pytest.raises(DataError, match=f"10 tokens, at most 8 fit: '{long}'"):
        family.encode_text(["a red circle", long])


def test_decoding_equals_the_pipeline_to_the_last_bit_but_rounding(family, pipeline):
    latents = latents_of(family)
    config = pipeline.vae.config
    mean, std = (torch.tensor(s).view(1, -1, 1, 1, 1) for s in (config.latents_mean, config.latents_std))
    with torch.no_grad():
        video = pipeline.vae.decode(latents * std + mean).sample
    expected = pipeline.video_processor.postprocess_video(video, output_type="np")
    got = family.decode(latents)
    assert got.shape == (3, 9, 32, 32, 3) and got.dtype == np.uint8
    assert np.abs(got - expected * 255.0).max() <= 0.5 + 1e-3
    assert got.std() > 0


@pytest.mark.parametrize("layout", [WAN22, WAN21], ids=["wan2.2", "wan2.1"])
@pytest.mark.parametrize("frames", [1, 5, 17])
def test_streamed_decode_equals_decoding_all_at_once(family, layout, frames):
    one = with_vae(family, **layout)
    latents = latents_of(one, n=2, frames=frames, size=16)
    with torch.no_grad():
        streamed = torch.cat(list(one._stream(latents)), dim=2)
        whole = one.vae.decode(latents).sample
    torch.testing.assert_close(streamed, whole, rtol=0, atol=0)
    assert streamed.shape == (2, 3, frames, 16, 16)


def test_every_chunk_goes_to_the_host_before_the_next_is_made(family):
    chunks = [chunk.shape[2] for chunk in family._stream(latents_of(family, n=1, frames=13))]
    assert chunks == [1, 4, 4, 4]


def test_decoding_twice_or_in_parts_gives_the_same_videos(family):
    latents = latents_of(family, n=6)
    whole = family.decode(latents).astype(int)
    assert np.array_equal(family.decode(latents), whole)
    for size in (1, 4):
        parts = np.concatenate([family.decode(part) for part in latents.split(size)])
        assert np.abs(parts - whole).max() <= 1  # kernels differ with the batch in the last bits before rounding


def test_encoding_is_the_normalised_mode_and_undoes_the_statistics(family, pipeline):
    videos = np.random.default_rng(0).integers(0, 256, (2, 9, 32, 32, 3), dtype=np.uint8)
    pixels = torch.from_numpy(videos).permute(0, 4, 1, 2, 3).float() / 127.5 - 1
    with torch.no_grad():
        mode = pipeline.vae.encode(pixels).latent_dist.mode()
    config = pipeline.vae.config
    mean, std = (torch.tensor(s).view(1, -1, 1, 1, 1) for s in (config.latents_mean, config.latents_std))
    latents = family.encode_video(videos)
    assert latents.shape == (2, *family.latent_shape(9, 32, 32)) and latents.dtype == torch.float32
    torch.testing.assert_close(latents, (mode - mean) / std, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(family.encode_video(videos[:1]), latents[:1], rtol=1e-4, atol=1e-5)


def test_latent_shapes_and_the_sizes_that_a_model_cannot_make(family):
    assert family.latent_shape(9, 32, 48) == (4, 3, 4, 6)
    assert family.latent_shape(1, 16, 16) == (4, 1, 2, 2)
    for size, message in (((8, 32, 32), "e.g. 9"), ((9, 33, 32), "e.g. 32"), ((9, 32, 40), "multiple of 16")):
        with pytest.raises(ConfigError, match=message):
            family.latent_shape(*size)


def test_models_that_cannot_be_used_are_refused_by_name(folder, tmp_path):
    with pytest.raises(DataError, match="no pipeline folder"):
        WanFamily.open(str(tmp_path / "absent"), "float32")
    for part in ("tokenizer", "text_encoder", "vae", "transformer"):
        copy = tmp_path / part
        copy.mkdir()
        for source in folder.iterdir():
            if source.name != part:
                (copy / source.name).symlink_to(source)
        with pytest.raises(DataError, match=f"component '{part}' is missing"):
            WanFamily.open(str(copy), "float32")
    (copy / "transformer").mkdir()
    (copy / "transformer_2").mkdir()
    with pytest.raises(ConfigError, match="cannot be trained yet"):
        WanFamily.open(str(copy), "float32")


def copy_of(folder, path, *own):
    """`path` as a model folder whose components `own` are copies that may be damaged."""
    for source in folder.iterdir():
        if source.name in own:
            shutil.copytree(source, path / source.name)
        else:
            (path / source.name).symlink_to(source)
    return path


@pytest.mark.parametrize("part", ["text_encoder", "vae"])
def test_missing_weights_are_refused_and_not_drawn_at_random(folder, tmp_path, part):
    (file,) = (copy_of(folder, tmp_path, part) / part).glob("*.safetensors")
    weights = load_file(file)
    lost = next(name for name in weights if "layer_norm" in name or "decoder.conv_in.weight" in name)
    save_file({n: w for n, w in weights.items() if n != lost}, file, metadata={"format": "pt"})
    with pytest.raises(DataError, match=f"1 weights are missing, e.g. {lost}"):
        WanFamily.open(str(tmp_path), "float32")
    file.write_bytes(b"damaged")
    with pytest.raises(DataError, match="cannot be loaded"):
        WanFamily.open(str(tmp_path), "float32")


def test_code_in_a_model_folder_is_never_run(folder, tmp_path):
    tokenizer = copy_of(folder, tmp_path, "tokenizer") / "tokenizer"
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    (tokenizer / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(DataError, match="cannot be loaded"):
        WanFamily.open(str(tmp_path), "float32")
    assert not (tmp_path / "ran").exists()
