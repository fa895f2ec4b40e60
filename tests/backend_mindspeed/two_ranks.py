"""What `test_two_ranks.py` runs in two processes at once: every check is a function of (this rank, folders)."""

from __future__ import annotations

import gc
import json
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from crossrl.errors import ConfigError
from crossrl_mindspeed import compat
from crossrl_mindspeed.engine import MindSpeedEngine  # noqa: F401  imported here, before the clock of the first check
from tests.backend_mindspeed import tiny
from tests.backend_veomni import tiny as veomni
from tests.backend_veomni.two_ranks import diffusers_step

STEP = {"lr": 1e-3, "eps": 1e-3}  # with a small eps Adam turns rounding errors of tiny gradients into whole steps
NEEDS = {"old": True, "reference": True}
LORA = {"rank": 4, "alpha": 8}
CHECKS: dict[str, Callable[[int, Path], None]] = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def compare_step(engine, pipeline, mine_of, rows, keys):
    """One step of `engine` on its share of `rows` against diffusers on all of them."""
    model, velocity = diffusers_step(pipeline, rows, keys)
    mine = rows.take(mine_of)
    with torch.no_grad():
        got = engine.velocity(mine.x, mine.sigma, keys=[keys[i] for i in mine.owner])
    assert tiny.relative(got, velocity[mine_of]) < 1e-5
    engine.accumulate(mine, keys, torch.full((len(mine),), 1 / len(rows)))
    assert tiny.worst(tiny.gradients(engine), veomni.gradients(model)) < 2e-5  # Ulysses: 1.04e-5 on one of two machines
    o = engine.config.optimizer
    optimizer = torch.optim.AdamW(model.parameters(), o.lr, o.betas, o.eps, o.weight_decay)
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), o.max_grad_norm))
    optimizer.step()
    assert abs(engine.optimizer_step()["grad_norm"] - norm) < 1e-5 * norm
    assert tiny.worst(tiny.weights(engine), dict(model.named_parameters())) < 1e-5


@check
def data_parallel_step_equals_diffusers_on_the_whole_batch(rank, shared):
    engine = tiny.build(shared / "wan", optimizer=STEP)
    place = engine.data_parallel
    assert (place.rank, place.size, place.primary, dist.get_world_size(place.group)) == (rank, 2, True, 2)
    compare_step(engine, shared / "wan", slice(4 * rank, 4 * rank + 4), *tiny.training_rows(8))


@check
def every_block_is_sharded_not_only_the_root(rank, shared):
    engine = tiny.build(shared / "wan")
    assert sum(isinstance(m, FSDPModule) for m in engine.module.modules()) == 4
    local = sum(p.to_local().numel() for p in engine.module.parameters())
    assert local < 0.52 * sum(p.numel() for p in engine.module.parameters())


@check
def micro_batches_recompute_and_prefetch_change_nothing(rank, shared):
    found = []
    plan = compat.fsdp_plan
    ahead = {"num_to_forward_prefetch": 1, "num_to_backward_prefetch": 1}
    for micro, on, reshard, extra in ((4, False, True, {}), (1, True, True, ahead), (2, False, False, {})):
        compat.fsdp_plan = lambda *args, extra=extra: plan(*args) | extra
        engine = tiny.build(
            shared / "wan",
            needs=NEEDS,
            batch={"update_micro": micro},
            model={"gradient_checkpointing": on},
            parallel={"reshard_after_forward": reshard},
        )
        tiny.train(engine, steps=1)
        rows, keys = tiny.training_rows(4, seed=rank)
        engine.accumulate(rows, keys, torch.full((4,), 1 / 8))
        found.append(tiny.gradients(engine))
    compat.fsdp_plan = plan
    assert tiny.worst(found[1], found[0]) < 1e-5 and tiny.worst(found[2], found[0]) < 1e-5


@check
def a_sum_instead_of_the_mean_is_found_and_divided(rank, shared):
    """Torch 2.7's gloo summed where it was asked for the mean; so does this one for the time of the check."""
    name = next(n for n in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, n))  # by torch version
    honest = getattr(dist, name)

    def summing(*args, op=dist.ReduceOp.SUM, **kwargs):
        return honest(*args, op=dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op, **kwargs)

    setattr(dist, name, summing)
    try:
        engine = tiny.build(shared / "wan", optimizer=STEP)
        assert compat.reduces_to_a_sum(engine.state.get_hsdp_device_mesh(), "cpu")
        compare_step(engine, shared / "wan", slice(4 * rank, 4 * rank + 4), *tiny.training_rows(8))
    finally:
        setattr(dist, name, honest)
    assert not compat.reduces_to_a_sum(engine.state.get_hsdp_device_mesh(), "cpu")


@check
def slots_are_exact_also_after_errors(rank, shared):
    for sections in ({}, {"lora": LORA}, {"dtype": "bfloat16"}):
        engine = tiny.build(shared / "wan", needs=NEEDS, model={"ema": 0.9, **sections})
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


@check
def checkpoints_of_one_worker_load_on_two(rank, shared):
    for name, sections in (("full", {}), ("lora", {"lora": LORA})):
        engine = tiny.build(shared / "wan", needs=NEEDS, model={"ema": 0.9, **sections}, seed=3)
        tiny.velocity(engine)
        engine.load_checkpoint(shared / f"one_{name}")
        assert tiny.same(tiny.everything(engine), torch.load(shared / f"one_{name}.pt"))
        assert tiny.relative(tiny.velocity(engine, "old"), torch.load(shared / f"one_{name}_old.pt")) < 1e-6


@check
def checkpoints_of_two_workers_load_on_two(rank, shared):
    """The parent loads them on one."""
    for name, sections in (("full", {}), ("lora", {"lora": LORA}), ("bf16", {"dtype": "bfloat16"})):
        engine = tiny.build(shared / "wan", needs=NEEDS, model={"ema": 0.9, **sections})
        tiny.train(engine)
        engine.save_checkpoint(shared / f"two_{name}")
        saved = tiny.everything(engine)
        tiny.train(engine, seed=70)
        engine.load_checkpoint(shared / f"two_{name}")
        assert tiny.same(tiny.everything(engine), saved)
        if rank == 0:
            torch.save(saved, shared / f"two_{name}.pt")


@check
def export_writes_full_weights(rank, shared):
    for name, sections in (("full", {}), ("lora", {"lora": LORA})):
        engine = tiny.build(shared / "wan", needs=NEEDS, model=sections, optimizer={"lr": 1e-3})
        tiny.train(engine)
        engine.export(shared / f"export_{name}", "old")
        model = tiny.exported(shared / f"export_{name}")
        x, sigma, condition = tiny.inputs(4)
        with torch.no_grad():
            out = model(x, 1000 * sigma, **condition, return_dict=False)[0]
        assert tiny.relative(out, tiny.velocity(engine, "old")) < 1e-5
        assert tiny.relative(out, tiny.velocity(engine, "reference")) > 1e-4


@check
def adapters_start_the_same_at_any_world_size(rank, shared):
    engine = tiny.build(shared / "wan", model={"lora": LORA}, seed=7)
    assert tiny.same(tiny.weights(engine), torch.load(shared / "lora_start.pt"))


@check
def ulysses_equals_diffusers(rank, shared):
    for on in (False, True):
        engine = tiny.build(
            shared / "wan4",
            parallel={"ulysses": 2},
            optimizer=STEP,
            model={"gradient_checkpointing": on},
            batch={"update_micro": 8},
        )
        place = engine.data_parallel
        assert (place.rank, place.size, place.primary) == (0, 1, rank == 0)
        compare_step(engine, shared / "wan4", slice(0, 8), *tiny.training_rows(8))


@check
def ulysses_with_single_rows_micro_batches_and_lora(rank, shared):
    found = []
    for ulysses in (1, 2):
        engine = tiny.build(
            shared / "wan4", parallel={"ulysses": ulysses}, model={"lora": LORA}, batch={"update_micro": 1}
        )
        tiny.train(engine)
        rows, keys = tiny.training_rows(3)
        engine.accumulate(rows, keys, torch.full((3,), 1 / 3 / engine.data_parallel.size))
        found.append(tiny.gradients(engine))
    assert tiny.worst(found[1], found[0]) < 1e-4


@check
def ulysses_refuses_what_would_be_wrong(rank, shared):
    with pytest.raises(ConfigError, match="3 tokens"):
        tiny.build(shared / "wan4", parallel={"ulysses": 2}, shape=(8, 3, 2, 2))
    with pytest.raises(ConfigError, match="3 attention heads"):
        tiny.build(shared / "wan", parallel={"ulysses": 2})
    engine = tiny.build(shared / "wan4", parallel={"ulysses": 2})
    x, sigma, condition = tiny.inputs(2, shape=(8, 1, 2, 2))
    with pytest.raises(ConfigError, match="1 tokens"):
        engine.predict(x, sigma, condition)


def main(rank: int, shared: Path, port: str) -> None:
    """Run all checks and write what failed to `result_<rank>.json`; after an error the other rank times out."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    gc.collect()
    gc.freeze()  # every build collects garbage, which takes half a second with so many modules
    results = {}
    for name, function in CHECKS.items():
        try:
            function(rank, shared)
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
        (shared / f"result_{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
