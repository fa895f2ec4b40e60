"""The `verl.plugins` entry: verl imports it in the driver and in every Ray process, so it stays tiny.

Verl swallows errors of this import, hence nothing here may fail: the CPU platform is registered at once, our trainer
and engines right after verl's own modules have been imported, and if that fails a stand-in under the same name raises
the real cause when it is selected.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import logging
import sys

from crossrl.verl import platform as _platform  # noqa: F401  (registers on import)

log = logging.getLogger(__name__)

_AFTER: dict[str, dict[str, str | None]] = {}  # verl's module -> our modules, each with the trainer it registers


def load_after(theirs: str, ours: str, trainer: str | None = None) -> None:
    """Have our module imported right after verl's; `trainer` is the name that it registers one under.

    Also for the `verl.plugins` entries of other packages.
    """
    _AFTER.setdefault(theirs, {})[ours] = trainer
    if theirs in sys.modules:  # imported before the plug-in was
        importlib.import_module(ours)


class _ImportAfter(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one of our modules as soon as the verl module that it extends has been executed."""

    def __init__(self) -> None:
        self.inner: dict[str, importlib.abc.Loader] = {}

    def find_spec(self, fullname, path=None, target=None):
        """Wrap the loader of the verl modules named in `_AFTER`, once each."""
        if fullname not in _AFTER or fullname in self.inner:
            return None
        self.inner[fullname] = None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        self.inner[fullname], spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        """As the wrapped loader would."""
        return self.inner[spec.name].create_module(spec)

    def exec_module(self, module):
        """Run verl's module, then ours."""
        name = module.__spec__.name
        module.__spec__.loader = module.__loader__ = self.inner[name]
        self.inner[name].exec_module(module)
        for ours, trainer in _AFTER[name].items():
            try:
                importlib.import_module(ours)
            except Exception as error:  # whatever broke must surface where trainer or engine is selected, not here
                log.exception("CrossRL's %s failed to load", ours)
                if trainer:
                    _register_broken_trainer(module, trainer, error)


def _register_broken_trainer(trainers, name: str, cause: Exception) -> None:
    class Broken(trainers.PPOTrainer):
        """Stands where CrossRL's trainer should be."""

        def __init__(self, config):
            raise ImportError(f"CrossRL is installed but its trainer failed to load: {cause!r}") from cause

        on_step_end = on_sample_end = None

    trainers.register_trainer(name)(Broken)


if not any(isinstance(finder, _ImportAfter) for finder in sys.meta_path):
    sys.meta_path.insert(0, _ImportAfter())
load_after("verl.trainer.ppo.v1", "crossrl.verl.trainer", trainer="crossrl")
load_after("verl.workers.engine", "crossrl.verl.engine")
