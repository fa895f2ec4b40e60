"""The conformance kit: subclass a suite in a test file, name your plug-in, and pytest proves it. Needs pytest.

from crossrl.testing import BackendSuite

class TestMine(BackendSuite):
    backend = "mine"
"""

from crossrl.testing.algorithm import AlgorithmSuite
from crossrl.testing.backend import BackendSuite

__all__ = ["AlgorithmSuite", "BackendSuite"]
