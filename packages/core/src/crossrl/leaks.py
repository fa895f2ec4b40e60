"""Finds tensors where they must not travel: on a device at a process boundary, or anywhere in metadata.

A tensor hidden in batch metadata initialises the sender's device in every receiver. Both checks walk tensors,
TensorDicts, tensorclasses (NonTensorData and stacks too), mappings, sequences, sets, numpy object arrays and
dataclasses; plain objects of other classes are not entered. Nothing is imported: no torch loaded, no tensor.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from crossrl.errors import DeviceLeakError

Children = Iterable[tuple[Any, Any]]


def device_leaks(obj: Any) -> list[str]:
    """Paths such as `$.meta_info['a'][0]` of all tensors in `obj` that are not on the CPU."""
    return [_path(place) for place, tensor in _tensors(obj) if tensor.device.type != "cpu"]


def refuse_tensors(obj: Any, where: str) -> None:
    """Raise `DeviceLeakError` for the first tensor in `obj`, on whatever device. `where` names the boundary."""
    for place, tensor in _tensors(obj):
        raise DeviceLeakError(
            f"a tensor {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device} at {_path(place)}",
            where=where,
            fix="metadata holds numbers, strings and paths only; send tensors as named entries of the batch",
        )


def _tensors(root: Any) -> Iterator[tuple[Any, Any]]:
    """(place, tensor) for each tensor; a place is a chain (parent place, container, key), made text only on demand."""
    if "torch" not in sys.modules:
        return
    seen: dict[int, Any] = {}  # holds what it has seen, so that no id is used twice
    todo = [(None, root)]
    while todo:
        place, obj = todo.pop()
        open_ = _opener(type(obj))
        if open_ is _tensors:
            yield place, obj
        elif open_ is not None and id(obj) not in seen:
            seen[id(obj)] = obj
            todo += [((place, obj, key), child) for key, child in open_(obj) if _opener(type(child)) is not None][::-1]


@functools.lru_cache(maxsize=4096)
def _opener(kind: type) -> Callable[[Any], Children] | None:
    """Lists the (key, child) pairs of an object of this type; None: it holds no tensor; `_tensors`: it is one."""
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(kind, torch.Tensor):
        return _tensors
    if issubclass(kind, str | bytes | bytearray | memoryview | range):
        return None
    if issubclass(kind, np.ndarray):
        return lambda array: enumerate(array.ravel().tolist() if array.dtype.hasobject else ())
    if any(base.__name__ == "LazyStackedTensorDict" for base in kind.__mro__):  # its items() copies every tensor
        return lambda stack: enumerate(stack.tensordicts)
    if issubclass(kind, Mapping):
        return kind.items
    if dataclasses.is_dataclass(kind):
        names = [f.name for f in dataclasses.fields(kind)]
        return lambda obj: ((name, getattr(obj, name, None)) for name in names)
    return enumerate if issubclass(kind, Sequence | Set | deque) else None


def _path(place: Any) -> str:
    labels = []
    while place is not None:
        place, container, key = place
        if isinstance(container, np.ndarray):
            key = tuple(map(int, np.unravel_index(key, container.shape)))
            labels.append(f"[{', '.join(map(str, key))}]")
        elif dataclasses.is_dataclass(container) and not isinstance(container, Mapping | Sequence):
            labels.append(f".{key}")
        else:
            labels.append(f"[{key!r}]")
    return "$" + "".join(reversed(labels))
