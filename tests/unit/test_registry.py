"""Plug-ins are found, named and refused: one that is broken never hides another."""

import importlib
import subprocess
import sys
import textwrap

import pytest

from crossrl import registry
from crossrl.errors import PluginError

GROUP = "crossrl.backends"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Makes a fake installed distribution with one module and its entry points."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(distribution, module, code, entry=None, version="1.0"):
        info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{entry or f'{module} = {module}:plugin'}\n")
        (tmp_path / f"{module}.py").write_text("from crossrl.protocols import Plugin\n" + textwrap.dedent(code))
        importlib.invalidate_caches()
        registry.refresh()

    yield make
    for name in [n for n in sys.modules if n.startswith("fake_")]:
        del sys.modules[name]
    registry.refresh()


def plugin(name, rest=""):
    return f"plugin = Plugin(name={name!r}, summary='a fake', target='{name}:thing'{rest})\nthing = object()"


def state(name):
    return [s.state for s in registry.status(GROUP) if s.name == name]


def refusal(name, group=GROUP):
    with pytest.raises(PluginError) as caught:
        registry.select(group, name)
    return caught.value


def test_a_plugin_of_another_distribution_is_listed_and_selected(install):
    install("fake-good", "fake_good", plugin("fake_good"))
    (found,) = [s for s in registry.status() if s.name == "fake_good"]
    assert found.ok and (found.distribution, found.version, found.summary) == ("fake-good", "1.0", "a fake")
    import fake_good

    assert registry.select(GROUP, "fake_good") is fake_good.thing
    assert registry.require(GROUP, "fake_good") is fake_good.plugin


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import not_there_at_all", ("broken: ModuleNotFoundError", "not_there_at_all")),
        ("raise SystemExit(3)", ("broken: SystemExit: 3",)),
        ("1 / 0", ("broken: ZeroDivisionError",)),
        ("plugin = 3", ("broken:", "int", "crossrl.protocols.Plugin")),
        (plugin("fake_bad", ", api=99"), ("broken:", "api 99", "supports 1")),
        (plugin("other"), ("broken:", "'other'")),
        (plugin("fake_bad", ", requires=('not-there>=2',)"), ("missing: not-there>=2", "not installed")),
        (plugin("fake_bad", ", requires=('numpy<1',)"), ("missing: numpy<1", "installed: ")),
        (plugin("fake_bad", ", requires=('no t,,,valid',)"), ("broken: InvalidRequirement",)),
        (plugin("fake_bad", ", available=lambda: 'no driver'"), ("unavailable: no driver",)),
        (plugin("fake_bad", ", available=lambda: 1 / 0"), ("broken: ZeroDivisionError",)),
    ],
)
def test_whatever_is_wrong_is_its_state_and_its_error_and_nobody_elses(install, code, words):
    install("fake-good", "fake_good", plugin("fake_good"))
    install("fake-bad", "fake_bad", code)
    assert state("fake_good") == ["ok"]
    (found,) = state("fake_bad")
    error = refusal("fake_bad")
    for word in words:
        assert word in found
        assert word.removeprefix("broken: ").removeprefix("missing: ").removeprefix("unavailable: ") in str(error)
    assert "fake-bad 1.0" in str(error)
    registry.select(GROUP, "fake_good")


def test_the_cause_of_a_broken_import_is_kept(install):
    install("fake-bad", "fake_bad", "import not_there_at_all")
    assert isinstance(refusal("fake_bad").__cause__, ModuleNotFoundError)


def test_a_target_that_fails_to_import_is_refused_with_its_cause(install):
    install("fake-good", "fake_good", "plugin = Plugin('fake_good', 'x', 'fake_good:absent')")
    assert state("fake_good") == ["ok"]
    error = refusal("fake_good")
    assert "fake_good:absent" in str(error) and isinstance(error.__cause__, AttributeError)


def test_a_missing_requirement_comes_with_the_command_and_is_still_described(install):
    install("fake-bad", "fake_bad", plugin("fake_bad", ", requires=('not-there>=2',)"))
    assert "pip install 'not-there>=2'" in str(refusal("fake_bad"))
    assert {f.name: f.summary for f in registry.status(GROUP)}["fake_bad"] == "a fake"


def test_two_distributions_with_one_name_are_both_named(install):
    install("fake-one", "fake_one", plugin("twin"), "twin = fake_one:plugin")
    install("fake-two", "fake_two", plugin("twin"), "twin = fake_two:plugin", version="2.0")
    assert len(state("twin")) == 2
    assert "fake-one 1.0 and fake-two 2.0" in str(refusal("twin"))


def test_a_malformed_distribution_hides_no_other(install, caplog):
    install("fake-good", "fake_good", plugin("fake_good"))
    install("fake-bad", "fake_bad", "", "this line has no equals sign")
    assert state("fake_good") == ["ok"]
    assert "fake_bad" in caplog.text


def test_an_unknown_name_is_answered_with_what_is_installed_and_a_guess(install):
    install("fake-good", "fake_good", plugin("fake_good"))
    error = refusal("fake_god")
    assert "unknown backend 'fake_god'" in str(error) and "fake_good" in error.what
    assert "did you mean 'fake_good'?" in error.fix


def test_a_known_name_that_is_not_installed_comes_with_the_command(install, monkeypatch):
    monkeypatch.setitem(registry.KNOWN, (GROUP, "elsewhere"), "crossrl-elsewhere")
    assert refusal("elsewhere").fix == "pip install -U crossrl-elsewhere"
    near = refusal("elsewere").fix
    assert "did you mean 'elsewhere'?" in near and "pip install -U crossrl-elsewhere" in near


def test_every_plugin_of_ours_is_known_to_the_advice():
    packages = set(registry.KNOWN.values())
    ours = {(s.group, s.name): s.distribution for s in registry.status() if s.distribution in packages}
    assert ours.items() <= registry.KNOWN.items()


def test_the_allow_list_keeps_others_from_being_imported(install, monkeypatch):
    install("fake-good", "fake_good", plugin("fake_good"))
    install("fake-bad", "fake_bad", plugin("fake_bad"))
    for value, allowed in (("fake_good", True), ("fake-good, other", True), ("none", False), ("fake_bad", False)):
        monkeypatch.setenv("CROSSRL_PLUGINS", value)
        sys.modules.pop("fake_good", None)
        registry.refresh()
        assert state("fake_good") == ["ok" if allowed else "unavailable: not in CROSSRL_PLUGINS"]
        assert ("fake_good" in sys.modules) == allowed
    assert "CROSSRL_PLUGINS" in str(refusal("fake_good"))


def test_versions_name_only_what_is_installed():
    found = registry.versions()
    assert found["python"].startswith("3.") and found["crossrl"] and None not in found.values()


def test_listing_loads_nothing_heavy():
    code = (
        "import sys, crossrl.registry, crossrl.report, crossrl.data, crossrl.media, crossrl.checkpoint, crossrl.leaks;"
        "crossrl.registry.status(); bad = {'torch', 'ray', 'verl', 'transformers', 'av', 'pyarrow'} & {*sys.modules};"
        "sys.exit(f'loaded {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
