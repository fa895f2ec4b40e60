"""Tables in docs/ say what the code does."""

import json
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from crossrl.advantages import AdvantageOptions
from crossrl.registry import select
from crossrl_t2v.flow_grpo import FlowOptions
from crossrl_t2v.forward_process import ForwardOptions
from crossrl_t2v.policy_gradient import PolicyGradientOptions
from tests.bench.ablations import ABLATIONS, table

DOCS = Path(__file__).parents[2] / "docs"
SHARED = (FlowOptions, ForwardOptions, PolicyGradientOptions)
NAMES = [e.name for e in entry_points(group="crossrl.algorithms") if e.value.startswith("crossrl_t2v")]


def options_of(config):
    """`key: default`, ... of what a Config adds to the options it shares, or sets otherwise."""
    shared = next(base for base in (*SHARED, config) if issubclass(config, base))
    same = {} if shared is config else {k: f.default for k, f in shared.model_fields.items()}
    own = {k: f.default for k, f in config.model_fields.items() if k != "name" and (k, f.default) not in same.items()}
    return ", ".join(f"`{k}: {shown(v)}`" for k, v in own.items())


def shown(value):
    plain = getattr(value, "name", value)  # a density
    return plain if isinstance(plain, str) else f"{plain:g}" if isinstance(plain, float) else json.dumps(plain)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "flow_matching"])
def test_every_option_and_default_of_an_algorithm_is_documented(name):
    config = select("crossrl.algorithms", name).Config
    assert f"| `{name}` | {options_of(config)} |" in (DOCS / "algorithms.md").read_text()


def test_the_shared_options_are_documented_with_their_defaults():
    page = (DOCS / "algorithms.md").read_text()
    for group in (AdvantageOptions, *SHARED):
        for key, field in group.model_fields.items():
            assert f"`{key}: {shown(field.default)}`" in page


def test_the_tables_of_the_lessons_are_those_of_their_runs():
    page = (DOCS / "lessons/README.md").read_text()
    for name, variants in ABLATIONS.items():
        found = json.loads((DOCS / f"lessons/{name}.json").read_text())
        assert list(found) == list(variants) and all(len(runs) >= 3 for runs in found.values())
        assert table(found) in page and f"]({name}.png)" in page and (DOCS / f"lessons/{name}.png").exists()
