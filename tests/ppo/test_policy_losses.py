"""Policy losses by the keys of section actor, against numbers worked out by hand."""

import pytest
import torch

from ppo.config import ActorConfig
from ppo.policy_losses import POLICY_LOSSES, PolicyInputs


def test_vanilla_clips_by_the_keys_of_the_actor_and_says_how_often():
    keys = ActorConfig(clip_ratio_low=0.1, clip_ratio_high=0.3, clip_ratio_c=2.0)
    ratios = torch.tensor([1.5, 0.5, 0.5, 3.0])
    inputs = PolicyInputs(
        logprobs=ratios.log() - 1.0,
        old_logprobs=torch.full((4,), -1.0),
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        keys=keys,
    )
    loss, metrics = POLICY_LOSSES["vanilla"](inputs)
    # held at 1 + 0.3; free; held at 1 - 0.1; the dual clip holds it at 2
    assert loss.tolist() == pytest.approx([-1.3, -0.5, 0.9, 2.0])
    assert metrics["pg_clipfrac"].tolist() == [True, False, True, False]
    assert metrics["pg_clipfrac_lower"].tolist() == [False, False, False, True]
