"""One worker with MindSpeed-MM's real source: against diffusers and VeOmni, files, LoRA, what must stay untouched."""

import diffusers
import peft
import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from crossrl import env
from crossrl.errors import CheckpointError, ConfigError, WorkerError
from crossrl_mindspeed import attention, compat
from crossrl_mindspeed.source import components
from tests.backend_mindspeed import tiny
from tests.backend_veomni import tiny as veomni
from tests.backend_veomni.test_compute import even, reference

pytestmark = [pytest.mark.mindspeed, pytest.mark.usefixtures("group")]
BOTH = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
LORA = {"rank": 4, "alpha": 8, "targets": ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.2")}
NEEDS = {"old": True, "reference": True}


def full(pipeline, dtype="float32", **sections):
    model = {"dtype": dtype, "ema": 0.9, **sections.pop("model", {})}
    return tiny.build(pipeline, model=model, needs=NEEDS, **sections)


class TestCompute:
    def test_every_gradient_the_norm_and_the_step_equal_diffusers(self, pipeline):
        engine, (rows, keys) = tiny.build(pipeline, optimizer={"lr": 1e-3, "eps": 1e-3}), tiny.training_rows()
        model, loss = reference(pipeline, rows, keys)
        stats = engine.accumulate(rows, keys, even(rows))
        assert stats.sums["loss"] == pytest.approx(float(loss), rel=1e-5)
        assert tiny.worst(tiny.gradients(engine), veomni.gradients(model)) < 1e-5
        o = engine.config.optimizer
        optimizer = torch.optim.AdamW(model.parameters(), o.lr, o.betas, o.eps, o.weight_decay)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), o.max_grad_norm)
        optimizer.step()
        assert engine.optimizer_step()["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        assert tiny.worst(tiny.weights(engine), dict(model.named_parameters())) < 1e-5

    def test_bf16_shards_every_block_keeps_fp32_masters_and_is_near_fp32(self, pipeline):
        fp32, bf16 = tiny.build(pipeline), tiny.build(pipeline, model={"dtype": "bfloat16"})
        assert sum(isinstance(m, FSDPModule) for m in bf16.module.modules()) == 4  # three blocks and the root
        assert {p.dtype for p in bf16.module.parameters()} == {torch.float32}
        wanted = tiny.velocity(fp32)
        assert float((tiny.velocity(bf16) - wanted).norm() / wanted.norm()) < 0.02

    def test_the_timestep_reaches_the_network_as_a_float(self, pipeline, monkeypatch):
        engine, seen = tiny.build(pipeline, model={"dtype": "bfloat16"}), []
        inner = components().modeling.sinusoidal_embedding_1d
        monkeypatch.setattr(
            components().modeling, "sinusoidal_embedding_1d", lambda d, t: (seen.append(t), inner(d, t))[1]
        )
        x, _, condition = tiny.inputs(2)
        engine.predict(x, torch.tensor([0.12345, 0.9999]), condition)
        assert seen[0].dtype == torch.float32
        assert torch.equal(seen[0], 1000.0 * torch.tensor([0.12345, 0.9999]))

    @BOTH
    def test_slots_are_exact_also_after_errors(self, pipeline, dtype):
        engine = full(pipeline, dtype)
        start = tiny.velocity(engine)
        tiny.train(engine)
        state = tiny.everything(engine)
        seen = {s: tiny.velocity(engine, s) for s in ("policy", "ema", "old", "reference")}
        assert torch.equal(seen["reference"], start)
        assert len({float(v.double().sum()) for v in seen.values()}) == 4
        x, sigma, _ = tiny.inputs(4)
        for slot in ("old", "policy"):
            with pytest.raises(RuntimeError), engine.slot(slot):
                engine.predict(x, sigma, {"encoder_hidden_states": torch.zeros(4, 8, 7)})
        assert all(torch.equal(tiny.velocity(engine, s), v) for s, v in seen.items())
        assert tiny.same(tiny.everything(engine), state)

    def test_fewer_layers(self, pipeline):
        engine, model = tiny.build(pipeline, model={"layers": 2}), tiny.plain_model(pipeline)
        del model.blocks[2:]
        x, sigma, condition = tiny.inputs(4)
        with torch.no_grad():
            wanted = model(x, 1000 * sigma, **condition, return_dict=False)[0]
        assert tiny.relative(tiny.velocity(engine), wanted) < 1e-5


class TestFiles:
    @BOTH
    def test_mindspeed_mms_own_checkpointer_reads_it(self, pipeline, dtype, tmp_path):
        engine = full(pipeline, dtype)
        from mindspeed_mm.fsdp.checkpoint.dcp_checkpointer import DistributedCheckpointer

        tiny.train(engine)
        engine.save(tmp_path)
        assert {p.name for p in (tmp_path / "mindspeed").iterdir()} == {
            "iter_0000002",
            "latest_checkpointed_iteration.txt",
        }
        other = full(pipeline, dtype)
        with other.in_force():
            state = {"model": other.module, "optimizer": other.optimizer}
            DistributedCheckpointer.load(str(tmp_path / "mindspeed"), state, load_strict=True)
        got, wanted = (
            {n: t for n, t in tiny.everything(e).items() if n.startswith(("policy", "adam"))} for e in (other, engine)
        )
        assert tiny.same(got, wanted)

    @BOTH
    def test_saving_before_the_first_step_does_not_step(self, pipeline, dtype, tmp_path):
        plain, saving = full(pipeline, dtype), full(pipeline, dtype)
        saving.save(tmp_path)
        assert not saving.optimizer.state
        stepped = full(pipeline, dtype)
        tiny.train(stepped)
        stepped.load(tmp_path)
        for engine in (plain, saving, stepped):
            tiny.train(engine)
        assert tiny.same(tiny.everything(saving), tiny.everything(plain))
        assert tiny.same(tiny.everything(stepped), tiny.everything(plain))

    def test_checkpoints_that_do_not_fit_are_refused(self, pipeline, tmp_path):
        with pytest.raises(CheckpointError, match="no readable checkpoint"):
            full(pipeline).load(tmp_path)
        tiny.build(pipeline).save(tmp_path)
        for other in (full(pipeline), tiny.build(pipeline, model={"lora": LORA})):
            with pytest.raises(CheckpointError, match="does not fit"):
                other.load(tmp_path)
        (tmp_path / "mindspeed/latest_checkpointed_iteration.txt").write_text("release")
        with pytest.raises(CheckpointError, match="no readable checkpoint"):
            tiny.build(pipeline).load(tmp_path)

    @BOTH
    @pytest.mark.parametrize("slot", ["policy", "ema"])
    def test_export_loads_in_diffusers_with_the_same_weights(self, pipeline, dtype, slot, tmp_path):
        engine = full(pipeline, dtype)
        tiny.train(engine)
        engine.export(tmp_path, slot)
        model, state = tiny.exported(tmp_path), tiny.everything(engine)
        exact = {n.removeprefix(f"{slot}."): t for n, t in state.items() if n.startswith(f"{slot}.")}
        assert tiny.same(dict(model.state_dict()), tiny.named(exact))
        assert torch.equal(tiny.velocity(full(tmp_path, dtype)), tiny.velocity(engine, slot))  # and trains on

    @pytest.mark.parametrize("slot", ["policy", "old"])
    def test_lora_export_merges_and_also_writes_the_adapter(self, pipeline, tmp_path, slot):
        engine = full(pipeline, model={"lora": LORA}, optimizer={"lr": 1e-3})
        tiny.train(engine)
        engine.export(tmp_path, slot)
        wanted = tiny.velocity(engine, slot)
        x, sigma, condition = tiny.inputs(4)
        adapted = peft.PeftModel.from_pretrained(tiny.plain_model(pipeline), tmp_path / "transformer_lora")
        with torch.no_grad():
            for model in (tiny.exported(tmp_path), adapted):
                assert tiny.relative(model(x, 1000 * sigma, **condition, return_dict=False)[0], wanted) < 1e-5
        assert tiny.relative(tiny.velocity(engine, "reference"), wanted) > 1e-4  # else the test shows nothing


class TestAgainstVeOmni:
    @pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
    def test_the_same_updates(self, pipeline, lora):
        found = []
        for build in (tiny.build, veomni.build):
            engine = build(
                pipeline, model={"ema": 0.9, "lora": lora}, needs=NEEDS, optimizer={"lr": 1e-3, "eps": 1e-3}, seed=3
            )
            engine.parts_named = tiny.named if build is tiny.build else _plain
            start = engine.parts_named(veomni.weights(engine))
            tiny.train(engine, steps=3)
            found.append((start, engine.parts_named(veomni.weights(engine)), tiny.velocity(engine, "old")))
        (start, weights, old), (start2, weights2, old2) = found
        assert tiny.same(start, start2)  # adapters too: the same initial values by name
        assert tiny.worst(weights, weights2) < 1e-5 and tiny.relative(old, old2) < 1e-5

    def test_a_mini_dance_grpo_update(self, pipeline):
        """Sample, log-probabilities, advantages, update: by the real algorithm, on both backends."""
        from crossrl.types import Prompt, RolloutRequest, SampleKey, Sampling, UpdatePlan
        from crossrl_t2v.dance_grpo import DanceGRPO

        keys = tuple(SampleKey(Prompt(f"p{i}", "a red circle" * (i + 1)), j) for i in range(2) for j in range(2))
        found = []
        for build in (tiny.build, veomni.build):
            engine = build(pipeline, optimizer={"lr": 1e-3, "eps": 1e-3})
            engine.algorithm = DanceGRPO(DanceGRPO.Config(name="dance_grpo", eta=0.5), (1.0,))
            engine.rollout(RolloutRequest(keys, Sampling(steps=4), seed=1, step=1))
            held, _, _ = engine.held.share(UpdatePlan(1, 1, keys, (0.0,) * 4, 4))
            stats = engine.update(UpdatePlan(1, 1, keys, (1.0, -1.0, 0.5, -0.5), 4))
            weights = (tiny.named if build is tiny.build else _plain)(veomni.weights(engine))
            found.append((held, stats, weights))
        (held, stats, weights), (held2, stats2, weights2) = found
        assert stats.scalars["grad_norm"] == pytest.approx(stats2.scalars["grad_norm"], rel=1e-5) and stats.sums
        assert stats.scalars["grad_norm"] > 1e-4
        assert tiny.relative(held.latents, held2.latents) < 1e-5
        assert all(tiny.relative(held.data[n].double(), held2.data[n].double()) < 1e-5 for n in held.data)
        assert tiny.worst(weights, weights2) < 1e-5


def _plain(weights):
    return {n.removeprefix("base_model.model."): t for n, t in weights.items()}


class TestManners:
    def test_nothing_of_the_process_is_changed(self, pipeline):
        modeling = components().modeling
        before = (modeling.flash_attention, diffusers.WanTransformer3DModel.forward, dict(ALL_ATTENTION_FUNCTIONS))
        accelerator, variables = torch.accelerator, dict(env.os.environ)
        engine = tiny.build(pipeline, needs={"old": True})
        tiny.train(engine)
        assert modeling.flash_attention is before[0]
        assert diffusers.WanTransformer3DModel.forward is before[1]
        assert dict(ALL_ATTENTION_FUNCTIONS) == before[2]
        assert torch.accelerator is accelerator and dict(env.os.environ) == variables
        assert components().states._PARALLEL_STATE is None
        assert not any(t.is_meta for t in (*engine.module.parameters(), *engine.module.buffers()))

    def test_neither_megatron_nor_torch_npu_is_there(self):
        import sys

        components()
        assert not [n for n in sys.modules if n.split(".")[0] in ("megatron", "torch_npu", "apex")]

    def test_attention_is_put_back_after_an_error(self, pipeline):
        modeling = components().modeling
        kept = modeling.flash_attention
        with pytest.raises(ArithmeticError), attention.in_fp32(modeling):
            assert modeling.flash_attention is not kept
            raise ArithmeticError
        assert modeling.flash_attention is kept

    def test_what_cannot_run_is_refused(self, pipeline):
        for sections, words in (
            ({"model": {"family": "flux"}}, "model.family"),
            ({"model": {"attention": "flash_attention_2"}}, "bfloat16"),
            ({"parallel": {"ulysses": 2}}, "1 workers cannot be split"),
            ({"model": {"lora": {"targets": ("no_such_layer",)}}}, "targets"),
            ({"shape": (8, 3, 5, 4)}, "patch"),
        ):
            with pytest.raises(ConfigError, match=words):
                tiny.build(pipeline, **sections)
        engine = tiny.build(pipeline)
        x, sigma, condition = tiny.inputs(2)
        for inputs, words in (
            ((x, sigma, {**condition, "guidance": sigma}), "guidance"),
            ((x, sigma[:, None].expand(2, 12), condition), "one a token"),
        ):
            with pytest.raises(ConfigError, match=words):
                engine.predict(*inputs)
        with pytest.raises(ConfigError, match="'cpu'"):
            compat.check_device(components(), "meta")


def test_gradients_that_are_summed_are_found_and_divided(pipeline, monkeypatch):
    """World size 1 can't sum; what the probe finds is made up here, and two ranks test the real one."""
    mesh = tiny.build(pipeline).state.get_hsdp_device_mesh()
    assert compat.reduces_to_a_sum(mesh, "cpu") is False
    monkeypatch.setattr(compat, "_probe_gradient", lambda mesh, device, by_sum: 7.0)
    with pytest.raises(WorkerError, match="reduced to 7.0"):
        compat.reduces_to_a_sum(mesh, "cpu")
