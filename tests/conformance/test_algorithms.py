"""Our own algorithms, and one that lives out of tree, pass the kit that anyone may run."""

import sys
from pathlib import Path

import pytest

from crossrl.testing import AlgorithmSuite, algorithm

EXAMPLE = Path(__file__).parents[1] / "packaging/reward_weighted/src"


class TestDanceGRPO(AlgorithmSuite):
    algorithm = "dance_grpo"
    options = ({}, {"same_noise": False, "best_of_n": 4}, {"std": "global", "aggregate": "gdpo"})


class TestFlowGRPO(AlgorithmSuite):
    algorithm = "flow_grpo"
    options = ({}, {"kl": 0.0}, {"kl_form": "paper"}, {"window": 2}, {"window": 2, "window_range": (1, 4)})


class TestFlowCPS(AlgorithmSuite):
    algorithm = "flow_cps"
    options = ({}, {"window": 2, "kl": 0.1})


class TestMixGRPO(AlgorithmSuite):
    algorithm = "mix_grpo"
    options = (
        {},
        {"window": 2, "schedule": "random", "std": "max_group"},
        {"window": 2, "schedule": "decay", "tau": 4, "least_tau": 2},
        {"window": 2, "schedule": "exp_decay"},
    )


class TestGRPOGuard(AlgorithmSuite):
    algorithm = "grpo_guard"
    options = ({}, {"kl": 0.1, "window": 2})


class TestFlowDPPO(AlgorithmSuite):
    algorithm = "flow_dppo"
    options = ({}, {"kl": 0.1, "window": 2})


class TestTempFlow(AlgorithmSuite):
    algorithm = "temp_flow"
    options = ({}, {"kl": 0.0})


class TestDiffusionNFT(AlgorithmSuite):
    algorithm = "diffusion_nft"
    options = (
        {},
        {"kl": 0.0, "density": "uniform", "adv_mode": "positive_only"},
        {"eta": 0.5, "inverse_t": True, "rows_per_sample": 2, "decay": "on_policy"},
    )


class TestAWM(AlgorithmSuite):
    algorithm = "awm"
    options = ({}, {"kl": 0.0, "clip_range": 0.2}, {"weighting": "t2", "density": "logit_normal"})


class TestDPO(AlgorithmSuite):
    algorithm = "dpo"
    options = ({}, {"best_of_n": None, "rows_per_sample": 3})
    rows_together = 2


class TestFlowMatching(AlgorithmSuite):
    algorithm = "flow_matching"


class TestRewardWeighted(AlgorithmSuite):
    """The example of docs/new-algorithm.md, from its own distribution's folder."""

    algorithm = "reward_weighted"

    @pytest.fixture(scope="class", autouse=True)
    def unpacked(self):
        """The example on the path, and found as if installed."""
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(EXAMPLE)
            from reward_weighted.algorithm import RewardWeighted

            patch.setattr(algorithm, "select", lambda group, name: RewardWeighted)
            yield
        for name in [n for n in sys.modules if n.startswith("reward_weighted")]:
            del sys.modules[name]
