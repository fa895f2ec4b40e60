"""Which episodes: "TASK:FIRST-LAST" names a page and its seeds, both included."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from omegaconf import ListConfig

from crossrl.errors import ConfigError

_RANGE = re.compile(r"([\w.-]+):(\d+)-(\d+)")


def ranges_of(specs: Any, where: str) -> list[tuple[str, range]]:
    """(task, seeds) of one specification or of several; `ConfigError` for anything else."""
    found = []
    for spec in map(str, specs if isinstance(specs, list | tuple | ListConfig) else [specs]):
        match = _RANGE.fullmatch(spec)
        if not match or int(match[3]) < int(match[2]):
            raise ConfigError(
                f"{spec!r} does not name episodes", where=where, fix="e.g. click-test:0-1023 (task and seeds)"
            )
        found.append((match[1], range(int(match[2]), int(match[3]) + 1)))
    return found


def alternating(ranges: Iterable[tuple[str, range]]) -> list[tuple[str, int]]:
    """(task, seed) of every episode, tasks in turn."""
    ranges = list(ranges)
    longest = max(len(seeds) for _, seeds in ranges)
    return [(task, seeds[i]) for i in range(longest) for task, seeds in ranges if i < len(seeds)]
