"""One worker: velocities, gradients, clipping and weight slots against diffusers, in fp32 (plain) and bf16 (FSDP2)."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests.backend_veomni import tiny

pytestmark = pytest.mark.usefixtures("group")
BOTH = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def reference(pipeline, rows, keys):
    """diffusers' loss, gradients and clipped norm for `rows`."""
    model = tiny.plain_model(pipeline)
    text = tiny.TinyFamily(pipeline).encode_text([keys[i].prompt.text for i in rows.owner])
    out = model(rows.x, 1000 * rows.sigma, **text, return_dict=False)[0]
    loss = (out - rows.targets["target"]).square().mean()
    loss.backward()
    return model, loss.detach()


def even(rows):
    return torch.full((len(rows),), 1 / len(rows))


def test_velocity_equals_diffusers(pipeline):
    engine, model = tiny.build(pipeline), tiny.plain_model(pipeline)
    x, sigma, condition = tiny.inputs(5)
    with torch.no_grad():
        wanted = model(x, 1000 * sigma, **condition, return_dict=False)[0]
    assert tiny.relative(tiny.velocity(engine, rows=5), wanted) < 1e-6
    assert tiny.velocity(engine).dtype == torch.float32


def test_every_gradient_the_norm_and_the_step_equal_diffusers(pipeline):
    engine, (rows, keys) = tiny.build(pipeline, optimizer={"lr": 1e-3}), tiny.training_rows()
    model, loss = reference(pipeline, rows, keys)
    stats = engine.accumulate(rows, keys, even(rows))
    assert stats.sums["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert tiny.worst(tiny.gradients(engine.module), tiny.gradients(model)) < 1e-5
    o = engine.config.optimizer
    optimizer = torch.optim.AdamW(model.parameters(), o.lr, o.betas, o.eps, o.weight_decay)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), o.max_grad_norm)
    optimizer.step()
    assert engine.optimizer_step()["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert tiny.worst(tiny.weights(engine), dict(model.named_parameters())) < 1e-5


def test_clipping_scales_the_gradient_to_the_norm_asked(pipeline):
    engine, (rows, keys) = tiny.build(pipeline), tiny.training_rows()
    engine.accumulate(rows, keys, even(rows))
    before = tiny.gradients(engine.module)
    norm = engine.clip_grad_norm(0.01)
    assert norm == pytest.approx(float(torch.stack([g.norm() for g in before.values()]).norm()), rel=1e-5)
    assert tiny.worst(tiny.gradients(engine.module), {n: g * (0.01 / norm) for n, g in before.items()}) < 1e-5


@BOTH
@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["full", "lora"])
def test_gradient_checkpointing_changes_nothing(pipeline, dtype, lora):
    found = []
    for on in (False, True):
        engine = tiny.build(pipeline, model={"dtype": dtype, "lora": lora, "gradient_checkpointing": on})
        rows, keys = tiny.training_rows()
        engine.accumulate(rows, keys, even(rows))
        found.append(tiny.gradients(engine.module))
        assert engine.module.is_gradient_checkpointing == on
    assert tiny.same(*found) and len(found[0]) == len(engine._slots.parameters)


@BOTH
def test_micro_batches_accumulate_to_the_whole_batch(pipeline, dtype):
    found = []
    for micro in (8, 3):
        engine = tiny.build(
            pipeline, model={"dtype": dtype}, batch={"update_micro": micro}, needs={"old": True, "reference": True}
        )
        rows, keys = tiny.training_rows()
        engine.accumulate(rows, keys, even(rows))
        found.append(tiny.gradients(engine.module))
    assert tiny.worst(*found) < (1e-5 if dtype == "float32" else 5e-2)


def test_gradients_are_reduced_at_the_last_micro_batch_only(pipeline):
    engine = tiny.build(pipeline, model={"dtype": "bfloat16"})
    for last in (False, True):
        engine.backward(engine.predict(*tiny.inputs(2)).square().mean(), last=last)
        assert all((p.grad is not None) == last for p in engine._slots.parameters.values())


def test_bf16_shards_every_block_and_keeps_fp32_masters(pipeline):
    engine = tiny.build(pipeline, model={"dtype": "bfloat16"})
    assert sum(isinstance(m, FSDPModule) for m in engine.module.modules()) == 4  # three blocks and the root
    assert {p.dtype for p in engine.module.parameters()} == {torch.float32}


def test_bf16_velocity_is_near_fp32_and_tells_close_timesteps_apart(pipeline):
    fp32, bf16 = tiny.build(pipeline), tiny.build(pipeline, model={"dtype": "bfloat16"})
    assert float((tiny.velocity(bf16) - tiny.velocity(fp32)).norm() / tiny.velocity(fp32).norm()) < 0.01
    x, _, condition = tiny.inputs(3)
    x, condition = x[:1].expand(3, -1, -1, -1, -1), {k: v[:1].expand(3, -1, -1) for k, v in condition.items()}
    with torch.no_grad():
        out = bf16.predict(x, torch.tensor([0.999, 0.998, 0.9985]), condition)
    assert all(not torch.equal(out[i], out[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


def test_the_timestep_reaches_the_network_as_a_float(pipeline):
    engine = tiny.build(pipeline)
    seen = []
    inner = engine.module.condition_embedder
    inner.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    engine.predict(*tiny.inputs(2)[:1], torch.tensor([0.12345, 0.9999]), tiny.inputs(2)[2])
    assert seen[0].dtype == torch.float32
    assert torch.equal(seen[0], 1000.0 * torch.tensor([0.12345, 0.9999]))


@BOTH
def test_a_slot_is_exact_and_the_policy_comes_back_bit_for_bit(pipeline, dtype):
    engine = tiny.build(pipeline, model={"dtype": dtype, "ema": 0.5}, needs={"old": True, "reference": True})
    start = tiny.velocity(engine)
    assert all(torch.equal(tiny.velocity(engine, s), start) for s in ("ema", "old", "reference"))
    tiny.train(engine)
    policy, old, ema = (tiny.velocity(engine, s) for s in ("policy", "old", "ema"))
    weights = tiny.everything(engine)
    assert not torch.equal(policy, start) and not torch.equal(old, policy) and not torch.equal(old, ema)
    assert torch.equal(tiny.velocity(engine, "reference"), start)
    with pytest.raises(ArithmeticError), engine.slot("old"):
        assert torch.equal(tiny.weights(engine)["proj_out.weight"], weights["old.proj_out.weight"])
        raise ArithmeticError
    assert torch.equal(tiny.velocity(engine), policy) and torch.equal(tiny.velocity(engine, "old"), old)
    assert tiny.same(tiny.everything(engine), weights)


def test_blending_follows_its_formula(pipeline):
    engine = tiny.build(pipeline, needs={"old": True})
    start = tiny.everything(engine)
    rows, keys = tiny.training_rows()
    engine.accumulate(rows, keys, even(rows))
    engine.optimizer_step()
    engine.blend_slot("old", 0.9)
    now = tiny.everything(engine)
    for name, value in tiny.weights(engine).items():
        assert torch.allclose(now[f"old.{name}"], 0.9 * start[f"old.{name}"] + 0.1 * value, rtol=1e-6, atol=1e-8)
    engine.blend_slot("old", 0.0)
    assert all(torch.equal(tiny.everything(engine)[f"old.{n}"], v) for n, v in tiny.weights(engine).items())


@BOTH
def test_a_failed_forward_in_a_slot_leaves_the_policy_in_place(pipeline, dtype):
    engine = tiny.build(pipeline, model={"dtype": dtype}, needs={"old": True})
    tiny.train(engine)
    policy, old = tiny.velocity(engine), tiny.velocity(engine, "old")
    x, sigma, _ = tiny.inputs(4)
    for slot in ("old", "policy"):
        with pytest.raises(RuntimeError), engine.slot(slot):
            engine.predict(x, sigma, {"encoder_hidden_states": torch.zeros(4, 8, 7)})  # wrong width
    assert torch.equal(tiny.velocity(engine), policy) and torch.equal(tiny.velocity(engine, "old"), old)


@BOTH
def test_an_error_between_micro_batches_leaves_no_gradient_behind(pipeline, dtype):
    engine = tiny.build(pipeline, model={"dtype": dtype}, batch={"update_micro": 4})
    rows, keys = tiny.training_rows()
    engine.accumulate(rows, keys, even(rows))
    wanted = tiny.gradients(engine.module)
    bad, _ = tiny.training_rows()
    bad.targets["target"][5] = torch.nan
    with pytest.raises(ArithmeticError):
        engine.accumulate(bad, keys, even(bad))
    engine.accumulate(rows, keys, even(rows))
    assert tiny.same(tiny.gradients(engine.module), wanted)


@BOTH
def test_a_step_that_is_not_finite_is_skipped(pipeline, dtype):
    engine, (rows, keys) = tiny.build(pipeline, model={"dtype": dtype}), tiny.training_rows()
    before = tiny.weights(engine)
    rows.targets["target"][0] = torch.inf
    engine.accumulate(rows, keys, even(rows))
    assert engine.optimizer_step()["skipped"] == 1.0
    assert tiny.same(tiny.weights(engine), before)


@BOTH
@pytest.mark.parametrize("offload", ["params", "all"])
def test_offloading_changes_nothing(pipeline, dtype, offload):
    found = []
    for mode in ("none", offload):
        engine = tiny.build(pipeline, model={"dtype": dtype}, parallel={"offload": mode}, needs={"old": True})
        rows, keys = tiny.training_rows()
        engine.train_rows(rows, keys, even(rows))
        engine.blend_slot("old", 0.7)
        engine.train_rows(rows, keys, even(rows))
        found.append(tiny.everything(engine))
    assert tiny.same(*found)


def test_fewer_layers(pipeline):
    engine, model = tiny.build(pipeline, model={"layers": 2}), tiny.plain_model(pipeline)
    del model.blocks[2:]
    x, sigma, condition = tiny.inputs(4)
    with torch.no_grad():
        wanted = model(x, 1000 * sigma, **condition, return_dict=False)[0]
    assert tiny.relative(tiny.velocity(engine), wanted) < 1e-6


def test_two_engines_in_one_process_do_not_disturb_each_other(pipeline):
    one, two = tiny.build(pipeline, needs={"old": True}), tiny.build(pipeline, model={"lora": {"rank": 2}})
    start = tiny.velocity(two)
    tiny.train(one)
    assert torch.equal(tiny.velocity(two), start)
    assert one.data_parallel.size == 1 and one.data_parallel.primary
