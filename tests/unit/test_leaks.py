"""A tensor that must not travel is found and named, wherever it hides. `meta` stands in for an accelerator."""

import dataclasses
import subprocess
import sys
import time
from collections import OrderedDict, deque, namedtuple

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, tensorclass

from crossrl.errors import DeviceLeakError
from crossrl.leaks import device_leaks, refuse_tensors
from crossrl.types import Prompt, RolloutRequest, SampleKey, Sampling

CPU, FAR = torch.zeros(1), torch.zeros(1, device="meta")


@dataclasses.dataclass
class Batch:
    meta_info: dict


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    inner: object


@tensorclass
class Boxed:
    x: torch.Tensor
    note: str


Pair = namedtuple("Pair", "first second")


def objects(*items, shape=None):
    out = np.empty(len(items), dtype=object)
    for i, item in enumerate(items):
        out[i] = item
    return out.reshape(shape or out.shape)


@pytest.mark.parametrize(
    ("obj", "path"),
    [
        (FAR, "$"),
        ({"a": [CPU, FAR]}, "$['a'][1]"),
        (Batch({"a": [FAR]}), "$.meta_info['a'][0]"),
        (Slotted(Slotted((1, FAR))), "$.inner.inner[1]"),
        (Pair(1, FAR), "$[1]"),
        (OrderedDict(a=deque([FAR])), "$['a'][0]"),
        ({3: {FAR}}, "$[3][0]"),
        (objects("x", FAR), "$[1]"),
        (objects(1, 2, 3, {"k": FAR}, shape=(2, 2)), "$[1, 1]['k']"),
        (torch.nn.Parameter(FAR), "$"),
        (TensorDict({"a": CPU, "n": {"b": FAR}}, [1]), "$['n']['b']"),
        (TensorDict({"a": NonTensorData({"x": FAR}, [1])}, [1]), "$['a'].data['x']"),
        (NonTensorStack("x", {"y": FAR}), "$[1].data['y']"),
        (LazyStackedTensorDict(TensorDict({"a": CPU}, []), TensorDict({"a": FAR}, [])), "$[1]['a']"),
        (Boxed(x=FAR, note="n", batch_size=[1]), "$.x"),
    ],
)
def test_the_path_of_the_tensor_is_given(obj, path):
    assert device_leaks(obj) == [path]
    with pytest.raises(DeviceLeakError, match=r"^rollout request: a tensor \(1,\) .* at \$"):
        refuse_tensors(obj, "rollout request")


def test_all_of_several_are_found_in_order_and_cpu_tensors_are_no_leak():
    assert device_leaks({"a": FAR, "b": [CPU, {"c": FAR}], "d": CPU}) == ["$['a']", "$['b'][1]['c']"]
    assert device_leaks(TensorDict({"a": CPU}, [1])) == []


def test_any_tensor_is_refused_in_metadata():
    with pytest.raises(DeviceLeakError, match=r"cpu at \$\['seed'\]"):
        refuse_tensors({"n": 1, "seed": CPU}, "meta")


def test_what_the_loop_really_sends_passes():
    key = SampleKey(Prompt("toy/1", "a red circle", {"colour": "red"}), 0)
    refuse_tensors([RolloutRequest((key,), Sampling(8), 0, 0)], "rollout request")
    refuse_tensors({"a": [1, 2.0, None, "x", b"y", np.zeros(3), np.float64(1), range(3), Batch]}, "meta")


def test_cycles_and_depth_end():
    loop = {"a": [FAR]}
    loop["self"] = loop
    assert device_leaks(loop) == ["$['a'][0]"]
    deep = FAR
    for _ in range(5000):
        deep = [deep]
    assert len(device_leaks(deep)) == 1


def test_it_is_cheap_enough_for_every_edge():
    batch = {
        "tensors": TensorDict({f"t{i}": torch.zeros(4, 8) for i in range(64)}, [4]),
        "meta": {f"k{i}": f"v{i}" for i in range(2500)} | {"ids": objects(*range(2500))},
    }
    best = min(_seconds(batch) for _ in range(10))
    assert best < 2.8e-3, f"{best * 1e3:.1f} ms"


def _seconds(batch):
    start = time.perf_counter()
    device_leaks(batch)
    return time.perf_counter() - start


def test_torch_is_not_loaded_by_looking():
    code = (
        "import sys, numpy; from crossrl.leaks import device_leaks, refuse_tensors;"
        "refuse_tensors({'a': [numpy.zeros(2)]}, 'x'); assert device_leaks([1]) == [];"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
