"""What every diffusion backend must do, shown on a tiny random Wan by what it computes and what it writes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from crossrl.engine import DiffusionEngine
from crossrl.errors import CheckpointError, CrossRLError
from crossrl.protocols import Capabilities
from crossrl.registry import require, select
from crossrl.testing import tiny
from crossrl.testing.ranks import run_two
from crossrl.testing.suite import Suite

PRECISIONS = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
ADAPTERS = pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}], ids=["full", "lora"])
STEP = {"lr": 1e-3, "eps": 1e-3}
"""With a small eps Adam turns rounding errors of tiny gradients into whole steps."""

NEEDS = {"old": True, "reference": True}
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


class Engines(Suite):
    """Where the suite's engines come from; an implementer may override each part."""

    backend: ClassVar[str]  # its entry point
    device: ClassVar[str] = "cpu"

    @classmethod
    def engine_class(cls) -> type[DiffusionEngine]:
        """The engine under test."""
        return select("crossrl.backends", cls.backend).engine("diffusion")

    @classmethod
    def capabilities(cls) -> Capabilities:
        """The descriptor's."""
        return require("crossrl.backends", cls.backend).capabilities or Capabilities()

    @pytest.fixture(scope="class", autouse=True)
    def world(self) -> Iterator[None]:
        """A process group of one."""
        with tempfile.NamedTemporaryFile() as store:
            torch.distributed.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
        yield
        torch.distributed.destroy_process_group()

    @pytest.fixture(scope="class")
    def pipeline(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The model's folder."""
        return tiny.write_pipeline(tmp_path_factory.mktemp("wan"))

    @classmethod
    def build(cls, folder: Path, *, needs: dict[str, bool] | None = None, **sections: Any) -> DiffusionEngine:
        """A built engine on the pipeline at `folder`; `sections` of a `RunConfig`."""
        config = tiny.run_config(backend=cls.backend, **sections)
        engine = cls.engine_class()(config, tiny.TinyFamily(folder), tiny.TinyAlgorithm(**(needs or {})), cls.device)
        engine.build()
        return engine

    def can(self, what: bool, name: str) -> None:
        """Skip a test of what the backend does not offer."""
        if not what:
            pytest.skip(f"backend {self.backend} does not offer {name}")


class BackendSuite(Engines):
    """Subclass it as `Test...`, set `backend`, and declare what the backend is known to do otherwise in `deviations`.

    What the descriptor's capabilities leave out is skipped. Runs in one process, and in two where `fsdp2` is offered.
    """

    # ---- the forward -------------------------------------------------------------------------------------------

    def test_velocity_equals_diffusers(self, pipeline: Path) -> None:
        """Velocity on given weights, fp32."""
        model, (x, sigma, condition) = tiny.plain_model(pipeline), tiny.inputs(5)
        with torch.no_grad():
            wanted = model(x, 1000 * sigma, **condition, return_dict=False)[0]
        got = tiny.velocity(self.build(pipeline), rows=5)
        assert got.dtype == torch.float32 and tiny.relative(got, wanted) < 1e-5

    @PRECISIONS
    def test_timesteps_are_not_truncated(self, pipeline: Path, dtype: str) -> None:
        """Three noise levels within one integer timestep or one bf16 step have three velocities."""
        engine, (x, _, condition) = self.build(pipeline, model={"dtype": dtype}), tiny.inputs(1)
        sigma = torch.tensor([0.9989, 0.9985, 0.9981])
        x, condition = x.expand(3, -1, -1, -1, -1), {k: v.expand(3, -1, -1) for k, v in condition.items()}
        on = [t.to(engine.device) for t in (x, sigma)]
        with torch.no_grad():
            out = engine.predict(*on, {k: v.to(engine.device) for k, v in condition.items()})
        assert not any(torch.equal(out[i], out[j]) for i, j in ((0, 1), (0, 2), (1, 2)))

    @PRECISIONS
    def test_training_and_rollout_predict_the_same_bits(self, pipeline: Path, dtype: str) -> None:
        """Then the importance ratio before the first update is exactly 1."""
        engine = self.build(pipeline, model={"dtype": dtype, "gradient_checkpointing": True}, needs=NEEDS)
        x, sigma, condition = tiny.inputs(4)
        on = x.to(engine.device), sigma.to(engine.device), {k: v.to(engine.device) for k, v in condition.items()}
        assert torch.equal(engine.predict(*on).detach().cpu(), tiny.velocity(engine))

    # ---- the update --------------------------------------------------------------------------------------------

    def test_a_step_equals_diffusers_and_torch(self, pipeline: Path, tmp_path: Path) -> None:
        """Loss, gradient norm, clipping and AdamW; the weights through an export."""
        engine, (rows, keys) = self.build(pipeline, optimizer=STEP), tiny.training_rows()
        model, loss, norm = tiny.diffusers_step(pipeline, engine.config)
        stats = engine.train_rows(rows, keys, tiny.even(rows))
        assert stats.sums["loss"] == pytest.approx(loss, rel=1e-5)
        assert stats.scalars["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert tiny.worst(tiny.weights_of(engine, tmp_path), dict(model.state_dict())) < 1e-5

    def test_clipping_scales_the_gradient_to_the_norm_asked(self, pipeline: Path) -> None:
        """And returns the norm from before."""
        engine, (rows, keys) = self.build(pipeline), tiny.training_rows()
        engine.accumulate(rows, keys, tiny.even(rows))
        before = engine.clip_grad_norm(0.01)
        assert before > 0.02 and engine.clip_grad_norm(1e9) == pytest.approx(0.01, rel=1e-4)

    @PRECISIONS
    def test_micro_batches_accumulate_to_the_whole_batch(self, pipeline: Path, tmp_path: Path, dtype: str) -> None:
        """Gradients are summed over micro-batches of a mean over the step: 8 rows at once, or 3, 3 and 2."""
        found, close = [], 1e-5 if dtype == "float32" else 2e-2
        for micro in (8, 3):
            sections = {"model": {"dtype": dtype}, "batch": {"update_micro": micro}}
            engine, (rows, keys) = self.build(pipeline, optimizer=STEP, needs=NEEDS, **sections), tiny.training_rows()
            norm = engine.train_rows(rows, keys, tiny.even(rows)).scalars["grad_norm"]
            found.append((norm, tiny.weights_of(engine, tmp_path / str(micro))))
        assert found[1][0] == pytest.approx(found[0][0], rel=close)
        assert tiny.worst(found[1][1], found[0][1]) < close

    @PRECISIONS
    @ADAPTERS
    def test_recompute_and_offload_change_nothing(self, pipeline: Path, tmp_path: Path, dtype: str, lora: Any) -> None:
        """The same weights, bit for bit, whatever is recomputed or moved."""
        self.can(lora is None or self.capabilities().lora, "LoRA")
        found = []
        for on, offload in ((False, "none"), (True, "none"), (False, "params"), (True, "all")):
            model = {"dtype": dtype, "lora": lora, "gradient_checkpointing": on}
            sections = {"model": model, "parallel": {"offload": offload}}
            engine, (rows, keys) = self.build(pipeline, needs={"old": True}, **sections), tiny.training_rows()
            for _ in range(2):
                engine.train_rows(rows, keys, tiny.even(rows))
                engine.blend_slot("old", 0.7)
            found.append(tiny.weights_of(engine, tmp_path / f"{on}-{offload}"))
        assert all(tiny.same(other, found[0]) for other in found[1:])

    @PRECISIONS
    def test_a_step_that_is_not_finite_is_skipped(self, pipeline: Path, dtype: str) -> None:
        """And says so; the weights stay."""
        engine, (rows, keys) = self.build(pipeline, model={"dtype": dtype}), tiny.training_rows()
        before = tiny.velocity(engine)
        rows.targets["target"][0] = torch.inf
        assert engine.train_rows(rows, keys, tiny.even(rows)).scalars["skipped"] == 1.0
        assert torch.equal(tiny.velocity(engine), before)

    @PRECISIONS
    def test_an_error_between_micro_batches_leaves_no_gradient_behind(self, pipeline: Path, dtype: str) -> None:
        """The next step is as if nothing had happened."""
        sections = {"model": {"dtype": dtype}, "batch": {"update_micro": 4}}
        engine, (rows, keys) = self.build(pipeline, **sections), tiny.training_rows()
        engine.accumulate(rows, keys, tiny.even(rows))
        wanted = engine.clip_grad_norm(1e9)
        bad, _ = tiny.training_rows()
        bad.targets["target"][5] = torch.nan
        with pytest.raises(ArithmeticError):
            engine.accumulate(bad, keys, tiny.even(bad))
        engine.accumulate(rows, keys, tiny.even(rows))
        assert engine.clip_grad_norm(1e9) == wanted

    def test_two_workers_make_the_step_of_one(self, pipeline: Path, tmp_path: Path) -> None:
        """Each holds half of the rows; gradients are averaged over ranks, and a checkpoint reshards from 2 to 1."""
        self.can("fsdp2" in self.capabilities().parallelism, "fsdp2")
        found = run_two(type(self), pipeline, tmp_path)
        model, loss, norm = tiny.diffusers_step(pipeline, tiny.run_config(optimizer=STEP))
        assert sum(rank["loss"] for rank in found) == pytest.approx(loss, rel=1e-5)
        assert [rank["grad_norm"] for rank in found] == pytest.approx([norm, norm], rel=1e-5)
        assert tiny.worst(dict(tiny.exported(tmp_path / "export").state_dict()), dict(model.state_dict())) < 1e-5
        alone = self.build(pipeline, optimizer=STEP)
        alone.load_checkpoint(tmp_path / "checkpoint")
        assert tiny.worst(tiny.weights_of(alone, tmp_path / "alone"), dict(model.state_dict())) < 1e-5

    # ---- weight slots and adapters -----------------------------------------------------------------------------

    @PRECISIONS
    def test_a_slot_is_exact_and_the_policy_comes_back_bit_for_bit(self, pipeline: Path, dtype: str) -> None:
        """Old, reference and EMA start as the policy and go their own ways; also after an error within one."""
        engine = self.build(pipeline, model={"dtype": dtype, "ema": 0.5}, needs=NEEDS)
        start = tiny.velocity(engine)
        assert all(torch.equal(tiny.velocity(engine, s), start) for s in ("ema", "old", "reference"))
        tiny.train(engine)
        policy, old, ema = (tiny.velocity(engine, s) for s in ("policy", "old", "ema"))
        assert len({float(v.double().sum()) for v in (start, policy, old, ema)}) == 4
        assert torch.equal(tiny.velocity(engine, "reference"), start)
        with pytest.raises(ArithmeticError), engine.slot("old"):
            raise ArithmeticError
        assert torch.equal(tiny.velocity(engine), policy) and torch.equal(tiny.velocity(engine, "old"), old)

    def test_blending_follows_its_formula(self, pipeline: Path, tmp_path: Path) -> None:
        """slot <- decay slot + (1 - decay) policy."""
        engine = self.build(pipeline, needs={"old": True}, optimizer=STEP)
        start, (rows, keys) = tiny.weights_of(engine, tmp_path / "start", "old"), tiny.training_rows()
        engine.train_rows(rows, keys, tiny.even(rows))
        engine.blend_slot("old", 0.9)
        policy = tiny.weights_of(engine, tmp_path / "policy")
        wanted = {n: 0.9 * start[n] + 0.1 * policy[n] for n in policy}
        assert tiny.worst(tiny.weights_of(engine, tmp_path / "old", "old"), wanted) < 1e-6
        assert tiny.worst(start, policy) > 1e-4  # else the test shows nothing
        engine.blend_slot("old", 0.0)
        assert torch.equal(tiny.velocity(engine, "old"), tiny.velocity(engine))

    @PRECISIONS
    def test_adapters_train_alone_and_are_switched(self, pipeline: Path, dtype: str) -> None:
        """A fresh adapter is the base model; after training every slot has its own, and the reference has none."""
        self.can(self.capabilities().lora, "LoRA")
        base = tiny.velocity(self.build(pipeline, model={"dtype": dtype}))
        lora = {"rank": 4, "alpha": 8}
        engine = self.build(pipeline, model={"dtype": dtype, "lora": lora, "ema": 0.5}, optimizer=STEP, needs=NEEDS)
        assert torch.equal(tiny.velocity(engine), base)
        tiny.train(engine)
        found = [tiny.velocity(engine, s) for s in ("policy", "old", "ema")]
        assert len({float(v.double().sum()) for v in (base, *found)}) == 4
        assert torch.equal(tiny.velocity(engine, "reference"), base)
        assert torch.equal(tiny.velocity(engine), found[0])

    # ---- files -------------------------------------------------------------------------------------------------

    @PRECISIONS
    @ADAPTERS
    def test_save_perturb_load_goes_on_bit_for_bit(self, pipeline: Path, tmp_path: Path, dtype: str, lora: Any) -> None:
        """In the same engine and in a fresh one, after forwards that must not leave older weights in use."""
        self.can(lora is None or self.capabilities().lora, "LoRA")
        model = {"dtype": dtype, "ema": 0.9, "lora": lora}
        engine = self.build(pipeline, model=model, needs=NEEDS)
        tiny.train(engine)
        engine.save_checkpoint(tmp_path)
        saved = [tiny.velocity(engine, s) for s in ("policy", *engine.slots)]
        tiny.train(engine, seed=50)
        after = [tiny.velocity(engine, s) for s in ("policy", *engine.slots)]
        assert not torch.equal(after[0], saved[0])
        for again in (engine, self.build(pipeline, model=model, needs=NEEDS, seed=5)):
            tiny.velocity(again)
            again.load_checkpoint(tmp_path)
            for wanted, slot in zip(saved, ("policy", *again.slots), strict=True):
                assert torch.equal(tiny.velocity(again, slot), wanted), slot
            assert again.updates == 2
            tiny.train(again, seed=50)
            for wanted, slot in zip(after, ("policy", *again.slots), strict=True):
                assert torch.equal(tiny.velocity(again, slot), wanted), slot

    def test_a_checkpoint_of_another_model_is_refused(self, pipeline: Path, tmp_path: Path) -> None:
        """So is a folder without one."""
        with pytest.raises(CheckpointError):
            self.build(pipeline).load(tmp_path)
        self.build(pipeline).save(tmp_path)
        with pytest.raises(CheckpointError):
            self.build(tiny.write_pipeline(tmp_path / "wide", ffn_dim=96)).load(tmp_path)

    @pytest.mark.parametrize("slot", ["policy", "ema"])
    def test_an_export_is_the_model(self, pipeline: Path, tmp_path: Path, slot: str) -> None:
        """diffusers loads it and predicts the same, this backend too, and the engine is as before."""
        self.can("diffusers" in self.capabilities().export, "export to diffusers")
        engine = self.build(pipeline, model={"ema": 0.9}, optimizer=STEP)
        tiny.train(engine)
        wanted = tiny.velocity(engine, slot)
        engine.export(tmp_path, slot)
        x, sigma, condition = tiny.inputs(4)
        with torch.no_grad():
            out = tiny.exported(tmp_path)(x, 1000 * sigma, **condition, return_dict=False)[0]
        assert tiny.relative(out, wanted) < 1e-5
        assert torch.equal(tiny.velocity(self.build(tmp_path)), wanted)
        assert torch.equal(tiny.velocity(engine, slot), wanted)

    @pytest.mark.parametrize("fault", ["missing", "unexpected", "shape"])
    def test_weights_that_do_not_fit_are_refused_by_name(self, pipeline: Path, tmp_path: Path, fault: str) -> None:
        """Half-loaded weights draw garbled videos."""
        tiny.plain_model(pipeline).save_pretrained(tmp_path / "transformer")
        weights = load_file(tmp_path / WEIGHTS)
        name = "blocks.3.attn1.to_q.weight" if fault == "unexpected" else "proj_out.bias"
        if fault == "missing":
            del weights[name]
        else:
            weights[name] = torch.zeros(3)
        save_file(weights, tmp_path / WEIGHTS)
        with pytest.raises(CrossRLError, match=name):
            self.build(tmp_path)

    def test_two_engines_in_one_process_do_not_disturb_each_other(self, pipeline: Path) -> None:
        """No state of the module or the library is shared."""
        one, two = self.build(pipeline, needs=NEEDS), self.build(pipeline)
        start = tiny.velocity(two)
        tiny.train(one)
        assert torch.equal(tiny.velocity(two), start)
