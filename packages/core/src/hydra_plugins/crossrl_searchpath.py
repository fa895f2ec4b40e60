"""Lets any Hydra app, `verl.trainer.main_ppo` first of all, find the configs of CrossRL and of its plug-ins.

Every Hydra app imports this file, so it holds one class and imports CrossRL only when a config is composed.
"""

from hydra.plugins.search_path_plugin import SearchPathPlugin


class CrossRLSearchPath(SearchPathPlugin):
    """Appends `crossrl.verl.conf` and the `conf` folder of every package that offers a CrossRL plug-in."""

    def manipulate_search_path(self, search_path):
        """Called by Hydra while it composes; never imports a plug-in."""
        from crossrl.registry import conf_folders

        for package in ("crossrl.verl", *conf_folders()):
            search_path.append("crossrl", f"pkg://{package}.conf")
