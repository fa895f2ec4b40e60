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


def test_recomputation_is_on_if_asked(pipeline):
    for on in (False, True):
        assert tiny.build(pipeline, model={"gradient_checkpointing": on}).module.is_gradient_checkpointing == on


def test_gradients_are_reduced_at_the_last_micro_batch_only(pipeline):
    engine = tiny.build(pipeline, model={"dtype": "bfloat16"})
    for last in (False, True):
        engine.backward(engine.predict(*tiny.inputs(2)).square().mean(), last=last)
        assert all((p.grad is not None) == last for p in engine._slots.parameters.values())


def test_bf16_shards_every_block_and_keeps_fp32_masters(pipeline):
    engine = tiny.build(pipeline, model={"dtype": "bfloat16"})
    assert sum(isinstance(m, FSDPModule) for m in engine.module.modules()) == 4  # three blocks and the root
    assert {p.dtype for p in engine.module.parameters()} == {torch.float32}


def test_bf16_velocity_is_near_fp32(pipeline):
    fp32, bf16 = tiny.build(pipeline), tiny.build(pipeline, model={"dtype": "bfloat16"})
    assert float((tiny.velocity(bf16) - tiny.velocity(fp32)).norm() / tiny.velocity(fp32).norm()) < 0.01


def test_the_timestep_reaches_the_network_as_a_float(pipeline):
    engine = tiny.build(pipeline)
    seen = []
    inner = engine.module.condition_embedder
    inner.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    engine.predict(*tiny.inputs(2)[:1], torch.tensor([0.12345, 0.9999]), tiny.inputs(2)[2])
    assert seen[0].dtype == torch.float32
    assert torch.equal(seen[0], 1000.0 * torch.tensor([0.12345, 0.9999]))


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


def test_fewer_layers(pipeline):
    engine, model = tiny.build(pipeline, model={"layers": 2}), tiny.plain_model(pipeline)
    del model.blocks[2:]
    x, sigma, condition = tiny.inputs(4)
    with torch.no_grad():
        wanted = model(x, 1000 * sigma, **condition, return_dict=False)[0]
    assert tiny.relative(tiny.velocity(engine), wanted) < 1e-6
