"""One worker: checkpoints, export, and weights that do not fit."""

import json

import pytest
import torch
from safetensors.torch import load_file

from crossrl.errors import CheckpointError, ConfigError
from tests.backend_veomni import tiny

pytestmark = pytest.mark.usefixtures("group")
BOTH = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def build(pipeline, dtype="float32", **sections):
    needs = {"old": True, "reference": True}
    return tiny.build(pipeline, model={"dtype": dtype, "ema": 0.9}, needs=needs, **sections)


@BOTH
def test_saving_before_the_first_step_does_not_step(pipeline, dtype, tmp_path):
    plain, saving = build(pipeline, dtype), build(pipeline, dtype)
    saving.save(tmp_path)
    assert not saving.optimizer.state
    stepped = build(pipeline, dtype)
    tiny.train(stepped)
    stepped.load(tmp_path)
    for engine in (plain, saving, stepped):
        tiny.train(engine)
    assert tiny.same(tiny.everything(saving), tiny.everything(plain))
    assert tiny.same(tiny.everything(stepped), tiny.everything(plain))


def test_the_config_and_not_the_checkpoint_sets_the_optimizer(pipeline, tmp_path):
    engine = build(pipeline, optimizer={"weight_decay": 0.5, "betas": (0.5, 0.6)})
    tiny.train(engine)
    engine.save(tmp_path)
    other = build(pipeline, optimizer={"weight_decay": 0.1, "eps": 1e-5})
    other.load(tmp_path)
    (group,) = other.optimizer.param_groups
    assert (group["weight_decay"], group["betas"], group["eps"]) == (0.1, (0.9, 0.999), 1e-5)


def test_checkpoints_that_do_not_fit_are_refused(pipeline, tmp_path):
    with pytest.raises(CheckpointError, match="no readable checkpoint"):
        build(pipeline).load(tmp_path)
    tiny.build(pipeline).save(tmp_path)
    with pytest.raises(CheckpointError, match="does not fit"):
        build(pipeline).load(tmp_path)  # no slots in it
    with pytest.raises(CheckpointError, match="does not fit"):
        tiny.build(pipeline, model={"lora": {"rank": 2}}).load(tmp_path)
    other = tiny.write_pipeline(tmp_path / "wide", ffn_dim=96)
    with pytest.raises(CheckpointError, match="does not fit"):
        tiny.build(other).load(tmp_path)


@BOTH
@pytest.mark.parametrize("slot", ["policy", "ema"])
def test_export_loads_in_diffusers_with_the_same_velocity(pipeline, dtype, slot, tmp_path):
    engine = build(pipeline, dtype)
    tiny.train(engine)
    before = tiny.everything(engine)
    engine.export(tmp_path, slot)
    assert tiny.same(tiny.everything(engine), before)
    model = tiny.exported(tmp_path)
    exact = {n: before[f"{slot}.{n}"] for n in model.state_dict()}
    assert tiny.same(dict(model.state_dict()), exact)
    if dtype == "float32":
        x, sigma, condition = tiny.inputs(4)
        with torch.no_grad():
            out = model(x, 1000 * sigma, **condition, return_dict=False)[0]
        assert tiny.relative(out, tiny.velocity(engine, slot)) < 1e-6
    names = {p.name for p in (tmp_path / "transformer").iterdir()}
    assert names == {"config.json", "diffusion_pytorch_model.safetensors"}
    assert (tmp_path / "scheduler/scheduler_config.json").is_file()
    written, original = (json.loads((p / "transformer/config.json").read_text()) for p in (tmp_path, pipeline))
    assert {k: v for k, v in written.items() if k[0] != "_"} == {k: v for k, v in original.items() if k[0] != "_"}
    assert torch.equal(tiny.velocity(build(tmp_path, dtype)), tiny.velocity(engine, slot))  # and trains on


def test_a_bf16_file_is_read_into_fp32_masters(pipeline, tmp_path):
    tiny.plain_model(pipeline).to(torch.bfloat16).save_pretrained(tmp_path / "transformer")
    engine = tiny.build(tmp_path)
    file = load_file(tmp_path / "transformer/diffusion_pytorch_model.safetensors")
    assert tiny.same(tiny.weights(engine), {n: t.float() for n, t in file.items()})


def test_a_file_in_shards_is_read(pipeline, tmp_path):
    tiny.plain_model(pipeline).save_pretrained(tmp_path / "transformer", max_shard_size="500KB")
    assert len(list((tmp_path / "transformer").glob("*.safetensors"))) > 2
    assert tiny.same(tiny.weights(tiny.build(tmp_path)), tiny.weights(tiny.build(pipeline)))


def test_a_folder_without_weights_is_refused(pipeline, tmp_path):
    tiny.plain_model(pipeline).save_pretrained(tmp_path / "transformer")
    (tmp_path / "transformer/diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(CheckpointError):
        tiny.build(tmp_path)


def test_a_folder_that_is_no_wan_is_refused(pipeline, tmp_path):
    with pytest.raises(ConfigError, match="config.json is missing"):
        tiny.build(tmp_path)
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer/config.json").write_text(json.dumps({"_class_name": "Flux", "guidance_embeds": True}))
    with pytest.raises(ConfigError, match="guidance_embeds"):
        tiny.build(tmp_path)
    (tmp_path / "transformer_2").mkdir()
    with pytest.raises(ConfigError, match="two transformers"):
        tiny.build(tmp_path)
