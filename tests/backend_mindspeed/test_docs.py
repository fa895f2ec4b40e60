"""docs/backends.md says what the descriptors say."""

import re
from pathlib import Path

import crossrl_mindspeed
import crossrl_veomni

PAGE = (Path(__file__).parents[2] / "docs/backends.md").read_text()


def test_the_table_of_backends_is_the_descriptors_own_data():
    for plugin in (crossrl_mindspeed.plugin, crossrl_veomni.plugin):
        can = plugin.capabilities
        cells = (can.families, can.kinds, can.devices, can.parallelism, ("yes" if can.lora else "no",), can.export)
        row = " | ".join([f"`{plugin.name}`", *(", ".join(cell) for cell in cells)])
        assert f"| {row} |" in PAGE


def test_the_page_names_every_variable_and_address():
    from crossrl_mindspeed import source

    for words in (*source.VARIABLES.values(), *source.URLS.values()):
        assert re.search(rf"{words}\b", PAGE)
