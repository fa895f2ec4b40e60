"""A CPU platform for verl, which ships none: opt-in by VERL_PLATFORM=cpu, never auto-detected."""

from __future__ import annotations

import types
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


class _CpuModule(types.ModuleType):
    """`torch.cpu` with the memory functions that verl calls on every device module; they report nothing."""

    def __getattr__(self, name: str) -> Any:
        if name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"):
            return lambda *_, **__: 0
        if name in ("empty_cache", "reset_peak_memory_stats", "ipc_collect", "manual_seed", "manual_seed_all"):
            return lambda *_, **__: None
        if name == "mem_get_info":
            return _host_memory
        if name == "get_device_name":
            return lambda *_: "cpu"
        if name in ("get_rng_state", "set_rng_state"):
            return getattr(torch, name)
        return getattr(torch.cpu, name)


def _host_memory(*_: Any) -> tuple[int, int]:
    """(free, all) bytes of this machine."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """Gloo and host memory. A method without a body's worth of meaning on a CPU does nothing."""

    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: _CpuModule("crossrl_cpu"))

    def is_available(self) -> bool:
        """Always: a CPU is here."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Never detected by probing: it would win on the CPU-only head node of an accelerator cluster."""
        return False

    def current_device(self) -> str:
        """The only one. By name: to `tensor.to(...)`, which verl calls with it, 0 would mean an accelerator."""
        return "cpu"

    def device_count(self) -> int:
        """One."""
        return 1

    def set_device(self, device_index: int) -> None:
        """Nothing to select."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing runs asynchronously."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        """The host allocator has none."""

    def empty_cache(self) -> None:
        """The host allocator has none."""

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        """A CPU has no compute capability."""
        return (None, None)

    def communication_backend_name(self) -> str:
        """Gloo."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """A name that nothing else reads."""
        return "CROSSRL_VISIBLE_CPUS"

    @contextmanager
    def nvtx_range(self, msg: str):
        """No profiler ranges."""
        yield

    def profiler_start(self) -> None:
        """No device profiler."""

    def profiler_stop(self) -> None:
        """No device profiler."""

    def ray_resource_name(self) -> str:
        """Ray's name; CPU pools never ask for it (`use_gpu=False`)."""
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        """None."""
        return []

    def is_ipc_supported(self) -> bool:
        """No device memory to share."""
        return False

    def cudart(self) -> None:
        """No CUDA runtime."""
