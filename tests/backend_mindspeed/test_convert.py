"""Names both ways, folders both ways, and the settings: all without MindSpeed-MM's source."""

import json
import re
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import crossrl_t2v.toy
from crossrl import cli
from crossrl.build import build_engine
from crossrl.data import load_prompts
from crossrl.errors import CheckpointError, ConfigError, CrossRLError
from crossrl.evaluate import eval_sampling
from crossrl.launch import prepare
from crossrl.layouts import convert as convert_pipeline
from crossrl.types import RolloutRequest, SampleKey
from crossrl_mindspeed import convert
from crossrl_mindspeed.models import wan
from tests.backend_mindspeed import tiny

FILE = "diffusion_pytorch_model.safetensors"


def test_every_name_of_a_real_size_model_has_one_other_name_and_back():
    with torch.device("meta"):
        names = list(diffusers.WanTransformer3DModel(num_layers=40).state_dict())
    there = [convert.to_mindspeed(n) for n in names]
    assert len(set(there)) == len(names) == 40 * 27 + 15
    assert [convert.to_diffusers(n) for n in there] == names


@pytest.mark.parametrize(
    ("diffusers_name", "mindspeed_name"),
    [
        ("blocks.12.attn2.to_out.0.bias", "blocks.12.cross_attn.o.bias"),
        ("blocks.0.norm2.weight", "blocks.0.norm3.weight"),
        ("blocks.0.scale_shift_table", "blocks.0.modulation"),
        ("scale_shift_table", "head.modulation"),
        ("blocks.3.attn1.to_q.lora_A.default.weight", "blocks.3.self_attn.q.lora_A.default.weight"),
        ("blocks.3.ffn.net.0.proj.base_layer.bias", "blocks.3.ffn.0.base_layer.bias"),
        ("blocks.3.ffn.net.2", "blocks.3.ffn.2"),
    ],
)
def test_names(diffusers_name, mindspeed_name):
    assert convert.to_mindspeed(diffusers_name) == mindspeed_name
    assert convert.to_diffusers(mindspeed_name) == diffusers_name


def test_unknown_names_are_refused_by_name():
    weights = {"patch_embedding.weight": 1, "blocks.0.attn2.add_k_proj.weight": 2, "patch_embeddings.bias": 3}
    with pytest.raises(CheckpointError, match="add_k_proj.weight, patch_embeddings.bias"):
        convert.converted(weights, convert.to_mindspeed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_there_and_back_is_the_same_bit_for_bit(pipeline, tmp_path, dtype):
    tiny.plain_model(pipeline).to(dtype).save_pretrained(tmp_path / "a", max_shard_size="500KB")
    convert.convert_folder(tmp_path / "a", tmp_path / "b", "mindspeed")
    convert.convert_folder(tmp_path / "b", tmp_path / "c", "diffusers")
    files = sorted(p.name for p in (tmp_path / "a").glob("*.safetensors"))
    assert len(files) > 1
    for name in files:
        a, b, c = (load_file(tmp_path / folder / name) for folder in "abc")
        assert tiny.same(a, c) and tiny.same(convert.converted(a, convert.to_mindspeed), b)
        assert all(t.dtype == dtype for t in c.values())
    assert tiny.same(
        dict(diffusers.WanTransformer3DModel.from_pretrained(tmp_path / "c", torch_dtype=dtype).state_dict()),
        dict(diffusers.WanTransformer3DModel.from_pretrained(tmp_path / "a", torch_dtype=dtype).state_dict()),
    )


@pytest.mark.parametrize("to", ["mindspeed", "diffusers"])
@pytest.mark.parametrize("fault", ["missing", "unexpected", "shape"])
def test_a_folder_that_is_not_complete_is_refused_before_anything_is_written(pipeline, tmp_path, fault, to):
    source, name = tmp_path / "source", "blocks.1.attn1.to_q.bias"
    convert.convert_folder(pipeline / "transformer", tmp_path / "m", "mindspeed")
    tiny.plain_model(pipeline).save_pretrained(source)
    if to == "diffusers":
        source, name = tmp_path / "m", convert.to_mindspeed(name)
    weights = load_file(source / FILE)
    if fault == "unexpected":
        name = "blocks.1.another.weight"
    weights |= {name: torch.zeros(3)}
    if fault == "missing":
        del weights[name]
    save_file(weights, source / FILE)
    words = {"missing": f"missing {name}", "unexpected": f"unexpected {name}", "shape": rf"{name} is \(3,\)"}[fault]
    with pytest.raises(CheckpointError, match=words):
        convert.convert_folder(source, tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


def test_settings(pipeline):
    config = wan.load_config(pipeline, layers=2)
    assert wan.arguments(config, "eager") == {
        "model_type": "t2v",
        "patch_size": (1, 2, 2),
        "in_dim": 8,
        "out_dim": 8,
        "hidden_size": 96,
        "num_heads": 3,
        "num_layers": 2,
        "ffn_dim": 288,
        "freq_dim": 64,
        "text_dim": 64,
        "qk_norm": True,
        "cross_attn_norm": True,
        "eps": 1e-6,
        "attn_implementation": "eager",
    }


@pytest.mark.parametrize(
    ("index", "settings", "words"),
    [
        ({"expand_timesteps": True}, {}, "timestep for every token"),
        ({}, {"image_dim": 1280}, "image-to-video"),
        ({}, {"qk_norm": None}, "qk_norm=None"),
        ({}, {"guidance_embed": True}, "unknown settings"),
    ],
)
def test_models_that_mindspeed_mm_cannot_do_are_refused(pipeline, tmp_path, index, settings, words):
    for name, changes in (("model_index.json", index), ("transformer/config.json", settings)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(json.loads((pipeline / name).read_text()) | changes))
    with pytest.raises(ConfigError, match=words):
        wan.load_config(tmp_path, None)


def test_two_experts_and_too_many_layers_are_refused(pipeline, tmp_path):
    with pytest.raises(ConfigError, match="the model has 3"):
        wan.load_config(pipeline, layers=4)
    tiny.write_pipeline(tmp_path)
    (tmp_path / "transformer_2").mkdir()
    with pytest.raises(ConfigError, match="two transformers"):
        wan.load_config(tmp_path, None)


@pytest.mark.parametrize(
    ("shape", "ulysses", "words"),
    [((3, 5, 4), 1, "patch"), ((3, 2, 2), 2, "3 tokens"), ((1025, 2, 2), 1, "1024")],
)
def test_latents_that_do_not_fit(pipeline, shape, ulysses, words):
    with pytest.raises(ConfigError, match=words):
        wan.check_latents(wan.load_config(pipeline, None), shape, ulysses)


def test_a_pipeline_goes_to_either_layout_and_back_by_the_command_line(pipeline, tmp_path):
    there = tmp_path / "m"
    for source, to, out in ((pipeline, "mindspeed", "m"), (there, "veomni", "v"), (there, "diffusers", "d")):
        done = CliRunner().invoke(cli.app, ["export", str(source), "--to", to, "--out", str(tmp_path / out)])
        assert done.exit_code == 0, done.output
    assert convert.layout.is_of(tmp_path / "m" / "transformer")
    original = load_file(pipeline / "transformer" / FILE)
    for out in "vd":
        assert tiny.same(load_file(tmp_path / out / "transformer" / FILE), original)
        assert (tmp_path / out / "model_index.json").read_text() == (pipeline / "model_index.json").read_text()


@pytest.mark.parametrize(
    ("to", "source", "words"),
    [
        ("megatron", "pipeline", "unknown layout 'megatron'.*diffusers, mindspeed, veomni"),
        ("mindspeed", "empty", "no transformer/"),
        ("mindspeed", "full", "not empty"),
    ],
)
def test_what_cannot_be_exported_is_refused(pipeline, tmp_path, to, source, words):
    (tmp_path / "empty").mkdir()
    out = tmp_path if source == "full" else tmp_path / "out"
    with pytest.raises(CrossRLError, match=re.compile(words, re.DOTALL)):
        convert_pipeline(tmp_path / "empty" if source == "empty" else pipeline, out, to)


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """The demo's pipeline in MindSpeed-MM's names and back, and the video of one prompt by an engine on a folder."""
    folder = tmp_path_factory.mktemp("golden")
    source = Path(crossrl_t2v.toy.__file__).parent / "assets" / "wan_tiny"
    convert_pipeline(source, folder / "mindspeed", "mindspeed")
    convert_pipeline(folder / "mindspeed", folder / "back", "diffusers")

    def video(path, backend):
        run = prepare("demo", [f"model.path={path}", f"backend={backend}"]).run
        prompt = load_prompts(run.data.heldout, run.data.bad_rows)[0]
        keys = (SampleKey(prompt, 0), SampleKey(prompt, 1))
        request = RolloutRequest(keys, eval_sampling(run), seed=0, step=0, keep_trajectory=False)
        return build_engine(run, "cpu").rollout(request)

    return {"source": source, "mindspeed": folder / "mindspeed", "back": folder / "back"}, video


@pytest.mark.usefixtures("group")
def test_the_golden_prompt_gives_the_same_video_after_a_round_trip(golden):
    folders, video = golden
    assert np.array_equal(video(folders["source"], "veomni"), video(folders["back"], "veomni"))


@pytest.mark.mindspeed
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("folder", ["source", "mindspeed"])
def test_the_golden_prompt_gives_the_same_video_on_mindspeed_mm(golden, folder):
    folders, video = golden
    wanted, got = (video(folders[f], b).astype(int) for f, b in (("source", "veomni"), (folder, "mindspeed")))
    assert wanted.std() > 10  # there is something to see
    assert np.abs(wanted - got).max() <= 1
