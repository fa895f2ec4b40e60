"""A config file of the user's own, as in the README, and what is refused before anything starts."""

import re
from pathlib import Path

import pytest

from crossrl.build import check_parts
from crossrl.errors import ConfigError, CrossRLError
from crossrl.launch import prepare

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture
def readme_job(tmp_path):
    """The README's job, with what only its reader has replaced by what is shipped."""
    text = re.search(r"```yaml\n(# my_job.yaml.*?)```", README.read_text(), re.S)[1]
    text = re.sub(r"path: [^,}]+", "path: toy", text)
    text = text.replace("prompts.jsonl", "toy:train").replace("heldout.txt", "toy:heldout").replace("my_reward", "toy")
    text = text.replace("prompts: 64", "prompts: 16")
    path = tmp_path / "my_job.yaml"
    path.write_text(text)
    return path


def test_the_readmes_job_is_valid(readme_job, monkeypatch):
    job = prepare(str(readme_job), ["workers=8", "seed=3"])
    assert job.workers == 8 and job.run.seed == 3 and job.run.sampling.shift == 3.0
    assert f"--config-dir={readme_job.parent}" in job.command and "--config-name=my_job" in job.command
    monkeypatch.chdir(readme_job.parent)
    assert prepare("my_job.yaml", []).run.batch.prompts == 16


def test_it_may_build_on_a_shipped_config(tmp_path):
    path = tmp_path / "longer.yaml"
    path.write_text("defaults: [demo, _self_]\ncrossrl: {steps: 300}\n")
    run = prepare(str(path), []).run
    assert run.steps == 300 and run.algorithm["clip_range"] == 3e-3


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("crossrl: [", "while parsing"),
        ("defaults: [crosrl, _self_]", "crosrl"),
        ("defaults: [demo, _self_]\ncrossrl: {stepz: 3}", "stepz"),
    ],
)
def test_a_broken_file_is_one_error_that_names_it(tmp_path, text, match):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=match) as caught:
        prepare(str(path), [])
    assert "broken.yaml" in str(caught.value)


def test_a_file_must_not_hide_a_shipped_config(tmp_path):
    (tmp_path / "demo.yaml").write_text("defaults: [crossrl, _self_]\n")
    with pytest.raises(ConfigError, match="'demo' is the name of a config of CrossRL"):
        prepare(str(tmp_path / "demo.yaml"), [])


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("workers=abc", "'abc' is not a number of 1 or more"),
        ("workers=0", "0 is not a number of 1 or more"),
        ("workers=1.5", r"1\.5 is not a number"),
        ("algorithm=null", "algorithm.name is missing"),
        ("guard=false", "guard.enabled=false"),
        ("optimizer.lr=inf", "optimizer.lr: .* finite"),
        ("algorithm.eta=inf", "eta: .* finite"),
        ("rewards=[{name:toy,weight:nan}]", r"rewards\.0\.weight: .* finite"),
        ("optimizer.betas=[2,3]", "less than 1"),
    ],
)
def test_nonsense_is_refused(override, match):
    with pytest.raises(ConfigError, match=match):
        prepare("demo", [override])


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("model.path=tyo", "'tyo' is no pipeline folder"),
        ("model.layers=99", "model.layers: 99 of .* layers"),
        ("video.frames=8", "video.frames: frames=8 is not 1 more than a multiple of 4"),
    ],
)
def test_what_the_model_cannot_do_is_refused_before_a_worker_starts(override, match):
    with pytest.raises(CrossRLError, match=match):
        check_parts(prepare("demo", [override]).run)
