"""A tiny Qwen3-VL, built once, and the browser's world."""

import pytest

from crossrl_gui_agent.envs.browser import missing_browser


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    from crossrl_gui_agent.tiny.build import build

    folder = tmp_path_factory.mktemp("tiny")
    build(folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def processor(tiny_folder):
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(tiny_folder)


@pytest.fixture(scope="session")
def browser():
    """Skips by name where there is none."""
    if reason := missing_browser():
        pytest.skip(reason)
