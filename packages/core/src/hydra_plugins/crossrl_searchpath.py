"""Lets any Hydra app, `verl.trainer.main_ppo` first of all, find the configs of CrossRL and of its plug-ins.

Every Hydra app imports this file, so it holds a few stdlib lines and one Hydra name.
"""

from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from hydra.plugins.search_path_plugin import SearchPathPlugin


class CrossRLSearchPath(SearchPathPlugin):
    """Appends `crossrl.verl.conf` and the `conf` folder of every package that offers a CrossRL plug-in."""

    def manipulate_search_path(self, search_path):
        """Called by Hydra while it composes; never imports a plug-in."""
        search_path.append("crossrl", "pkg://crossrl.verl.conf")
        groups = ("crossrl.backends", "crossrl.algorithms")
        for package in sorted({ep.module.partition(".")[0] for group in groups for ep in entry_points(group=group)}):
            spec = find_spec(package)
            folders = spec.submodule_search_locations if spec else None
            if any((Path(folder) / "conf").is_dir() for folder in folders or ()):
                search_path.append("crossrl", f"pkg://{package}.conf")
