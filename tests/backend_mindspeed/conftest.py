from pathlib import Path

import pytest
import torch.distributed as dist

from tests.backend_mindspeed import tiny

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in Path(item.path).parents and item.get_closest_marker("mindspeed") and tiny.ABSENT:
            item.add_marker(pytest.mark.skip(reason=tiny.ABSENT))


@pytest.fixture(scope="module")
def group():
    """A world of one, as an engine in this process needs it."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{tiny.free_port()}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory):
    """A tiny random Wan pipeline folder."""
    return tiny.write_pipeline(tmp_path_factory.mktemp("wan"))
