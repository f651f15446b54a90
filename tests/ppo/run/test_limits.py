"""How long each phase may take before the run is said to hang."""

from ppo.config import TrainerConfig
from ppo.run.limits import limits

DEVICE = ("old_log_prob", "ref", "values", "reward_model", "update_critic", "update_actor")


def test_nccl_which_ends_a_process_without_a_word_comes_second():
    assert limits(TrainerConfig(), on_nccl=False) == {}
    assert limits(TrainerConfig(), on_nccl=True) == dict.fromkeys(DEVICE, 540)
    short = TrainerConfig(hang_timeout_s=100)
    assert limits(short, on_nccl=True) == dict.fromkeys(DEVICE, 100)
