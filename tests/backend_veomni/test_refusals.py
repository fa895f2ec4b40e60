"""What is refused, and the silent traps of VeOmni that the backend must keep shut."""

import inspect
import logging

import diffusers
import pytest
import torch
import torch.distributed as dist
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from crossrl.errors import ConfigError, WorkerError
from crossrl_veomni import attention, plugin
from crossrl_veomni.backend import backend
from tests.backend_veomni import tiny


def test_the_plugin_names_this_backend():
    assert plugin.target == "crossrl_veomni.backend:backend"
    assert inspect.isabstract(backend.engine("diffusion")) is False
    with pytest.raises(ConfigError, match="language"):
        backend.engine("language")


def test_without_a_process_group_the_error_says_so(pipeline):
    assert not dist.is_initialized()
    with pytest.raises(WorkerError, match="init_process_group"):
        tiny.build(pipeline)


def test_a_process_group_made_anew_is_not_mistaken_for_the_old_one(pipeline):
    """VeOmni caches meshes by shape; a mesh of a destroyed world fails or hangs in its first collective."""
    states = []
    for _ in range(2):
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{tiny.free_port()}", rank=0, world_size=1)
        engine = tiny.build(pipeline, model={"dtype": "bfloat16"})
        tiny.train(engine, steps=1)
        states.append(engine.state)
        dist.destroy_process_group()
    assert states[0] is not states[1]


@pytest.mark.usefixtures("group")
class TestBuild:
    def test_diffusers_and_transformers_stay_untouched(self, pipeline):
        before = diffusers.WanTransformer3DModel.forward, dict(LOSS_MAPPING), dict(ALL_ATTENTION_FUNCTIONS)
        engine = tiny.build(pipeline)
        assert diffusers.WanTransformer3DModel.forward is before[0]
        assert dict(LOSS_MAPPING) == before[1]
        assert dict(ALL_ATTENTION_FUNCTIONS) == before[2]
        out = tiny.plain_model(pipeline)(*tiny.inputs(2)[:2], tiny.inputs(2)[2]["encoder_hidden_states"])
        assert out.sample.shape == (2, 8, 3, 4, 4)
        assert torch.equal(engine.module.rope.freqs_cos, tiny.plain_model(pipeline).rope.freqs_cos)

    def test_building_is_quiet(self, pipeline):
        lines = []
        listener = logging.Handler()
        listener.emit = lines.append
        logger = logging.getLogger("veomni")
        logger.addHandler(listener)
        try:
            tiny.build(pipeline, model={"dtype": "bfloat16"})
        finally:
            logger.removeHandler(listener)
        assert lines == []
        assert logger.level < logging.ERROR

    def test_nothing_is_left_on_meta(self, pipeline):
        for dtype in ("float32", "bfloat16"):
            module = tiny.build(pipeline, model={"dtype": dtype, "lora": {"rank": 2}}).module
            assert not any(t.is_meta for t in (*module.parameters(), *module.buffers()))

    def test_unknown_condition_tensors_are_refused(self, pipeline):
        engine = tiny.build(pipeline)
        x, sigma, condition = tiny.inputs(2)
        with pytest.raises(TypeError, match="guidance_embedding"):
            engine.predict(x, sigma, {**condition, "guidance_embedding": sigma})
        with pytest.raises(TypeError, match="cu_seq_lens_q"):
            attention.attention(None, x, x, x, cu_seq_lens_q=sigma)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_an_error_in_a_slot_before_any_forward(self, pipeline, dtype):
        engine = tiny.build(pipeline, model={"dtype": dtype}, needs={"old": True})
        with pytest.raises(ArithmeticError), engine.slot("old"):
            raise ArithmeticError
        tiny.train(engine, steps=1)

    def test_slots_that_do_not_exist_or_nest(self, pipeline):
        engine = tiny.build(pipeline, needs={"old": True, "reference": True})
        with pytest.raises(WorkerError, match="'ema'.*'old', 'reference'"), engine.slot("ema"):
            pass
        with pytest.raises(WorkerError, match="inside of 'old'"), engine.slot("old"), engine.slot("policy"):
            pass
        with pytest.raises(WorkerError, match="blend"), engine.slot("old"):
            engine.blend_slot("old", 0.5)
        assert torch.equal(tiny.velocity(engine), tiny.velocity(engine, "old"))

    @pytest.mark.parametrize(
        "sections, words",
        [
            ({"model": {"family": "flux"}}, "model.family"),
            ({"model": {"layers": 4}}, "the model has 3"),
            ({"model": {"attention": "sdpa"}}, "unknown attention function 'sdpa'"),
            ({"model": {"attention": "flash_attention_2"}}, "bfloat16"),
            ({"parallel": {"ulysses": 2}}, "1 workers cannot be split"),
        ],
    )
    def test_configs_that_cannot_run(self, pipeline, sections, words):
        with pytest.raises(ConfigError, match=words):
            tiny.build(pipeline, **sections)

    def test_another_device_than_veomni_found_is_refused(self, pipeline):
        engine = backend.engine("diffusion")(tiny.run_config(), tiny.TinyFamily(pipeline), tiny.TinyAlgorithm(), "meta")
        with pytest.raises(ConfigError, match="'cpu'"):
            engine.build()

    def test_latents_that_are_no_multiple_of_the_patch(self, pipeline):
        with pytest.raises(ConfigError, match="patch"):
            tiny.build(pipeline, shape=(8, 3, 5, 4))


def test_attention_follows_device_dtype_and_ulysses(monkeypatch):
    wanted = {"device": "cpu", "dtype": "float32", "ulysses": 1, "heads": 4}
    assert attention.choose(None, **wanted) == attention.SDPA
    assert attention.choose("eager", **wanted) == "eager"
    monkeypatch.setitem(attention._FLASH_AVAILABLE, "cuda", lambda: True)
    assert attention.choose(None, **wanted | {"device": "cuda:1", "dtype": "bfloat16"}) == attention.FLASH
    assert attention.choose(None, **wanted | {"device": "cuda:1"}) == attention.SDPA
    monkeypatch.setitem(attention._FLASH_AVAILABLE, "cuda", lambda: False)
    assert attention.choose(None, **wanted | {"device": "cuda", "dtype": "bfloat16"}) == attention.SDPA
    assert attention.choose(None, **wanted | {"ulysses": 2}) == attention.SDPA
    with pytest.raises(ConfigError, match="silently wrong"):
        attention.choose("eager", **wanted | {"ulysses": 2})
    with pytest.raises(ConfigError, match="3 attention heads"):
        attention.choose(None, **wanted | {"ulysses": 2, "heads": 3})
