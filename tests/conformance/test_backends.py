"""Our own backends pass the kit that anyone may run."""

import pytest

from crossrl.testing import BackendSuite
from tests.backend_mindspeed.tiny import ABSENT


class TestVeOmni(BackendSuite):
    backend = "veomni"


@pytest.mark.mindspeed
@pytest.mark.skipif(bool(ABSENT), reason=str(ABSENT))
class TestMindSpeed(BackendSuite):
    backend = "mindspeed"
