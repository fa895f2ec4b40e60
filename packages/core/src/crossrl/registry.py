"""Finds plug-ins through entry points. Listing imports only their light descriptors; selecting imports the target.

One broken plug-in never hides another: whatever is wrong with it becomes its `state`, and the error of who selects it.
"""

from __future__ import annotations

import difflib
import functools
import logging
import pkgutil
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from crossrl import env
from crossrl.errors import PluginError
from crossrl.protocols import API_VERSION, Plugin

log = logging.getLogger(__name__)

SUPPORTED_API = frozenset({API_VERSION})

NOUNS = {
    "crossrl.backends": "backend",
    "crossrl.algorithms": "algorithm",
    "crossrl.models": "model family",
    "crossrl.rewards": "reward",
    "crossrl.data": "data source",
    "crossrl.envs": "environment",
    "crossrl.jobs": "kind of job",
    "crossrl.layouts": "layout of weights",
}
GROUPS = tuple(NOUNS)

KNOWN = {
    ("crossrl.backends", "veomni"): "crossrl-veomni",
    ("crossrl.backends", "mindspeed"): "crossrl-mindspeed",
    ("crossrl.algorithms", "dance_grpo"): "crossrl-t2v",
    ("crossrl.algorithms", "diffusion_nft"): "crossrl-t2v",
    ("crossrl.algorithms", "flow_grpo"): "crossrl-t2v",
    ("crossrl.algorithms", "flow_cps"): "crossrl-t2v",
    ("crossrl.algorithms", "mix_grpo"): "crossrl-t2v",
    ("crossrl.algorithms", "grpo_guard"): "crossrl-t2v",
    ("crossrl.algorithms", "flow_dppo"): "crossrl-t2v",
    ("crossrl.algorithms", "temp_flow"): "crossrl-t2v",
    ("crossrl.algorithms", "awm"): "crossrl-t2v",
    ("crossrl.algorithms", "dpo"): "crossrl-t2v",
    ("crossrl.algorithms", "flow_matching"): "crossrl-t2v",
    ("crossrl.algorithms", "gui_grpo"): "crossrl-gui-agent",
    ("crossrl.algorithms", "gigpo"): "crossrl-gui-agent",
    ("crossrl.envs", "miniwob"): "crossrl-gui-agent",
    ("crossrl.envs", "pages"): "crossrl-gui-agent",
    ("crossrl.jobs", "gui"): "crossrl-gui-agent",
    ("crossrl.layouts", "mindspeed"): "crossrl-mindspeed",
    ("crossrl.layouts", "veomni"): "crossrl-veomni",
    ("crossrl.models", "wan"): "crossrl-t2v",
    ("crossrl.rewards", "toy"): "crossrl-t2v",
    ("crossrl.data", "toy"): "crossrl-t2v",
}
"""(group, name) -> distribution, for the advice given when a plug-in of ours is not installed."""


@dataclass(frozen=True, slots=True)
class PluginStatus:
    """One offered plug-in. `state` is "ok", or "missing: ", "unavailable: " or "broken: " and the reason."""

    group: str
    name: str
    distribution: str
    version: str
    summary: str
    state: str
    plugin: Plugin | None = field(default=None, repr=False)
    cause: BaseException | None = field(default=None, repr=False, compare=False)

    @property
    def ok(self) -> bool:
        """Whether it can be selected."""
        return self.state == "ok"


def status(group: str | None = None) -> list[PluginStatus]:
    """Every installed plug-in of `group` (or of all groups), by name. Never raises for what a plug-in does."""
    return [found for g in ([group] if group else GROUPS) for found in _examined(g)]


def require(group: str, name: str) -> Plugin:
    """The descriptor of a plug-in that can be selected, without importing its target; `PluginError` as `select`."""
    found = _find(group, name)
    if not found.ok:
        raise _refusal(found) from found.cause
    return found.plugin


@functools.cache
def select(group: str, name: str) -> Any:
    """What the plug-in `name` offers, imported now; `PluginError` says what is wrong and what to do."""
    found = _find(group, name)
    if not found.ok:
        raise _refusal(found) from found.cause
    try:
        return pkgutil.resolve_name(found.plugin.target)
    except (Exception, SystemExit) as error:  # a plug-in's module may raise anything
        log.debug("%s cannot be loaded", found.plugin.target, exc_info=True)
        raise _refusal(found, f"broken: {found.plugin.target}: {_reason(error)}") from error


def conf_folders() -> dict[str, Path]:
    """Package -> its folder of Hydra configs, for every package that offers a plug-in and has a folder `conf`."""
    packages = sorted({entry.module.partition(".")[0] for entries in _offers().values() for entry in entries})
    specs = {package: find_spec(package) for package in packages}
    found = [(p, Path(f) / "conf") for p, s in specs.items() for f in (s and s.submodule_search_locations) or ()]
    return {package: folder for package, folder in found if folder.is_dir()}


def refresh() -> None:
    """Forget what was found, e.g. after installing something into the running process."""
    for cached in (_offers, _examined, select, versions):
        cached.cache_clear()


@functools.cache
def versions() -> Mapping[str, str]:
    """Versions that decide what a run computes, of those packages that are installed; not to be changed."""
    names = {"crossrl": "crossrl-core"} | {n: n for n in ("verl", "torch", "veomni", "diffusers", "transformers")}
    found = {"python": platform.python_version()}
    for name, distribution in names.items():
        try:
            found[name] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def _offers() -> dict[str, list[metadata.EntryPoint]]:
    """Entry points by group. `metadata.entry_points()` would fail as a whole on one malformed file."""
    found: dict[str, list[metadata.EntryPoint]] = {group: [] for group in GROUPS}
    seen: set[str] = set()
    for distribution in metadata.distributions():
        try:
            entries = [e for e in distribution.entry_points if e.group in found]
            name = str(distribution.metadata["Name"]) if entries else ""
        except Exception as error:  # the metadata of a foreign distribution may be broken in any way
            log.warning("skipped the entry points of %s: %r", getattr(distribution, "_path", "?"), error)
            continue
        if entries and name not in seen:  # the first on sys.path hides older installs
            seen.add(name)
            for entry in entries:
                found[entry.group].append(entry)
    return found


@functools.cache
def _examined(group: str) -> tuple[PluginStatus, ...]:
    entries = sorted(_offers().get(group, ()), key=lambda e: (e.name, e.dist.name))
    return tuple(_examine(group, entry, [e for e in entries if e.name == entry.name]) for entry in entries)


def _examine(group: str, entry: metadata.EntryPoint, rivals: list[metadata.EntryPoint]) -> PluginStatus:
    about = (group, entry.name, entry.dist.name or "?", entry.dist.version or "?")
    allowed = env.allowed_plugins()
    if allowed is not None and not allowed & {entry.name, entry.dist.name}:
        return PluginStatus(*about, "", "unavailable: not in CROSSRL_PLUGINS")
    if len(rivals) > 1:
        both = " and ".join(f"{e.dist.name} {e.dist.version}" for e in rivals)
        return PluginStatus(*about, "", f"broken: offered by {both}; uninstall one")
    plugin, cause = None, None
    try:
        found = entry.load()
        problem = _misfit(entry.name, found)
        if problem is None:
            plugin = found
            problem = next(_obstacles(plugin), None)
    except (Exception, SystemExit) as error:  # a plug-in may raise anything at import or in its own check
        log.debug("plug-in %s of %s is broken", entry.value, entry.dist.name, exc_info=True)
        problem, cause = f"broken: {_reason(error)}", error
    return PluginStatus(*about, getattr(plugin, "summary", ""), problem or "ok", plugin, cause)


def _misfit(name: str, found: Any) -> str | None:
    if not isinstance(found, Plugin):
        return f"broken: its entry point names a {type(found).__name__}, not a crossrl.protocols.Plugin"
    if found.api not in SUPPORTED_API:
        ours = ", ".join(map(str, sorted(SUPPORTED_API)))
        return f"broken: written for plug-in api {found.api}, this crossrl-core supports {ours}"
    return None if found.name == name else f"broken: it describes itself as {found.name!r}"


def _obstacles(plugin: Plugin) -> Iterator[str]:
    for text in plugin.requires:
        need = Requirement(text)
        if need.marker and not need.marker.evaluate():
            continue
        try:
            version = metadata.version(need.name)
        except metadata.PackageNotFoundError:
            yield f"missing: {text} (not installed)"
            continue
        if not need.specifier.contains(version, prereleases=True):
            yield f"missing: {text} (installed: {version})"
    reason = plugin.available() if plugin.available else None
    if reason:
        yield f"unavailable: {reason}"


def _find(group: str, name: str) -> PluginStatus:
    offered = {found.name: found for found in _examined(group)}
    if name in offered:
        return offered[name]
    noun, absent = NOUNS.get(group, "plug-in"), KNOWN.get((group, name))
    installed = f"installed: {', '.join(sorted(offered)) or 'none'}"
    if absent:
        raise PluginError(f"{noun} {name!r} is not installed; {installed}", where=group, fix=f"pip install -U {absent}")
    known = {n: package for (g, n), package in KNOWN.items() if g == group and n not in offered}
    near = difflib.get_close_matches(name, [*offered, *known], n=1)
    advice = [f"did you mean {near[0]!r}?"] if near else []
    advice += [f"pip install -U {package} for {n!r}" for n, package in known.items()]
    raise PluginError(f"unknown {noun} {name!r}; {installed}", where=group, fix="; ".join(advice) or None)


def _refusal(found: PluginStatus, state: str | None = None) -> PluginError:
    kind, _, reason = (state or found.state).partition(": ")
    fix = f"pip install '{reason.partition(' (')[0]}'" if kind == "missing" else None
    what = f"{NOUNS[found.group]} {found.name!r} ({found.distribution} {found.version}) is {kind}: {reason}"
    what = what.replace("is missing:", "needs")
    return PluginError(what, where=found.group, fix=fix or "`crossrl list` shows all plug-ins and their state")


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
