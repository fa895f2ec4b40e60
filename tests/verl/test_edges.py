"""Tensors in what should be plain metadata are refused before anything is sent."""

import pytest
import torch

from crossrl.errors import DeviceLeakError
from crossrl.leaks import refuse_tensors
from crossrl.types import Prompt, RolloutRequest, SampleKey, Sampling


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tensor_in_a_prompts_metadata_is_named(device):
    prompt = Prompt("p", "text", {"style": {"embedding": [torch.zeros(2, device=device)]}})
    request = RolloutRequest((SampleKey(prompt, 0),), Sampling(8), seed=0, step=0)
    with pytest.raises(DeviceLeakError, match=r"keys.*meta.*style.*embedding"):
        refuse_tensors([request], "rollout request")
