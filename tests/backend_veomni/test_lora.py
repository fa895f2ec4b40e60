"""One worker: LoRA adapters, their slots, and what stays frozen."""

import peft
import pytest
import torch

from crossrl.errors import ConfigError
from tests.backend_veomni import tiny

pytestmark = pytest.mark.usefixtures("group")
LORA = {"rank": 4, "alpha": 8, "targets": ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.2")}
BOTH = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def build(pipeline, dtype="float32", **sections):
    needs = {"old": True, "reference": True}
    return tiny.build(pipeline, model={"lora": LORA, "dtype": dtype, "ema": 0.5}, needs=needs, **sections)


@BOTH
def test_only_adapters_train(pipeline, dtype):
    engine = build(pipeline, dtype)
    frozen = tiny.frozen(engine)
    trainable = set(engine._slots.parameters)
    assert trainable and all("lora_" in n for n in trainable)
    tiny.train(engine)
    assert tiny.same(tiny.frozen(engine), frozen)
    assert {n for n, p in engine.module.named_parameters() if p.requires_grad} == trainable


def test_gradients_equal_peft_on_diffusers(pipeline):
    engine, (rows, keys) = build(pipeline), tiny.training_rows()
    tiny.train(engine)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(LORA["targets"]))
    model = peft.get_peft_model(tiny.plain_model(pipeline), config)
    model.load_state_dict(tiny.weights(engine), strict=False)
    text = tiny.TinyFamily(pipeline).encode_text([keys[i].prompt.text for i in rows.owner])
    out = model(rows.x, 1000 * rows.sigma, **text, return_dict=False)[0]
    engine.algorithm = tiny.TinyAlgorithm()
    (out - rows.targets["target"]).square().mean().backward()
    engine.accumulate(rows, keys, torch.full((len(rows),), 1 / len(rows)))
    assert tiny.worst(tiny.gradients(engine.module), tiny.gradients(model)) < 1e-5


def test_initial_values_depend_on_the_seed_alone(pipeline):
    weights = [tiny.weights(build(pipeline, seed=seed)) for seed in (1, 1, 2)]
    assert tiny.same(weights[0], weights[1]) and not tiny.same(weights[0], weights[2])
    a = {n: w for n, w in weights[0].items() if "lora_A" in n}
    assert all(float(w.abs().max()) <= w.shape[1] ** -0.5 for w in a.values())
    assert len({float(w.sum()) for w in a.values()}) == len(a)


def test_a_checkpoint_holds_adapters_alone(pipeline, tmp_path):
    engine = build(pipeline)
    tiny.train(engine)
    engine.save(tmp_path)
    size = sum(f.stat().st_size for f in tmp_path.rglob("*.distcp"))
    assert size < sum(f.stat().st_size for f in (pipeline / "transformer").glob("*.safetensors"))


@pytest.mark.parametrize("slot", ["policy", "old"])
def test_export_merges_and_also_writes_the_adapter(pipeline, tmp_path, slot):
    engine = build(pipeline, optimizer={"lr": 1e-3})
    tiny.train(engine)
    engine.export(tmp_path, slot)
    wanted = tiny.velocity(engine, slot)
    x, sigma, condition = tiny.inputs(4)
    merged = tiny.exported(tmp_path)
    adapted = peft.PeftModel.from_pretrained(tiny.plain_model(pipeline), tmp_path / "transformer_lora")
    with torch.no_grad():
        for model in (merged, adapted):
            assert tiny.relative(model(x, 1000 * sigma, **condition, return_dict=False)[0], wanted) < 1e-5
    assert tiny.relative(tiny.velocity(engine, "reference"), wanted) > 1e-4  # else the test shows nothing


def test_targets_that_match_nothing_are_refused(pipeline):
    with pytest.raises(ConfigError, match="targets"):
        tiny.build(pipeline, model={"lora": {"targets": ("no_such_layer",)}})
