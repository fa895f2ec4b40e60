"""Backends with one fault each: the kit catches every one, by the name of the test that fails."""

from contextlib import contextmanager
from inspect import signature

import pytest

from crossrl.testing import BackendSuite
from crossrl.testing.backend import Engines
from crossrl_veomni.engine import VeOmniEngine


class Truncates(VeOmniEngine):
    """Casts timesteps to integers on the way to the network."""

    def predict(self, x, sigma, condition):
        return super().predict(x, (1000 * sigma).floor() / 1000, condition)


class SumsMicroBatches(VeOmniEngine):
    """Takes the mean over each micro-batch, and adds the gradients up."""

    def accumulate(self, rows, keys, weights, backward=True):
        return super().accumulate(rows, keys, weights * -(-len(rows) // self.config.batch.update_micro), backward)


class SumsRanks(VeOmniEngine):
    """Adds gradients up over ranks instead of averaging them."""

    def backward(self, loss, last):
        super().backward(loss * self.data_parallel.size, last)


class OneAdapter(VeOmniEngine):
    """Predicts with the policy's adapter whatever slot is asked for."""

    @contextmanager
    def slot(self, name):
        yield


class Stale(VeOmniEngine):
    """Loads moments and counters, and goes on with the weights that it had."""

    def load(self, folder):
        live = {name: p.detach().clone() for name, p in self.module.named_parameters()}
        super().load(folder)
        for name, parameter in self.module.named_parameters():
            parameter.data.copy_(live[name])


class Wrong(BackendSuite):
    backend = "veomni"
    engine = VeOmniEngine

    @classmethod
    def engine_class(cls):
        return cls.engine


class WrongSumsRanks(Wrong):  # by name, for its second process
    engine = SumsRanks


FP32 = {"dtype": "float32"}
FAULTS = [
    (Truncates, "test_timesteps_are_not_truncated", FP32),
    (Truncates, "test_timesteps_are_not_truncated", {"dtype": "bfloat16"}),
    (Truncates, "test_velocity_equals_diffusers", {}),
    (SumsMicroBatches, "test_micro_batches_accumulate_to_the_whole_batch", FP32),
    (OneAdapter, "test_adapters_train_alone_and_are_switched", FP32),
    (OneAdapter, "test_a_slot_is_exact_and_the_policy_comes_back_bit_for_bit", FP32),
    (Stale, "test_save_perturb_load_goes_on_bit_for_bit", {**FP32, "lora": None}),
    (Stale, "test_save_perturb_load_goes_on_bit_for_bit", {**FP32, "lora": {"rank": 4}}),
]


class TestTheKit(Engines):
    backend = "veomni"

    @pytest.mark.parametrize(("engine", "test", "how"), FAULTS, ids=lambda v: getattr(v, "__name__", None))
    def test_catches(self, engine, test, how, pipeline, tmp_path):
        suite = type("Suite", (Wrong,), {"engine": engine})()
        how = how | ({"tmp_path": tmp_path} if "tmp_path" in signature(getattr(suite, test)).parameters else {})
        with pytest.raises(AssertionError):
            getattr(suite, test)(pipeline, **how)

    def test_catches_gradients_summed_over_ranks(self, pipeline, tmp_path):
        with pytest.raises(AssertionError):
            WrongSumsRanks().test_two_workers_make_the_step_of_one(pipeline, tmp_path)
        assert len(list(tmp_path.glob("rank-*.json"))) == 2  # both ran to the end: it was the numbers
