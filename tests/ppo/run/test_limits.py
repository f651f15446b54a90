"""How long each phase may take before the run is said to hang."""

from ppo.config import load_config
from ppo.run.limits import limits


def limits_of(*overrides: str, on_nccl: bool) -> dict[str, float]:
    required = ["model.path=tiny", "data.train_files=tiny"]
    return limits(load_config(None, [*required, *overrides]), on_nccl=on_nccl)


def test_a_sample_may_take_its_time_and_nccl_never_ends_a_process_without_a_word():
    assert limits_of(on_nccl=False) == {"reward": 1800, "testing": 1800}
    slow = limits_of("reward.timeout_s=3600", on_nccl=False)
    assert slow == {"reward": 3660, "testing": 3660}
    found = limits_of(on_nccl=True)
    device = ("old_log_prob", "ref", "values", "reward_model", "update_critic", "update_actor")
    assert found == {**dict.fromkeys(device, 540), "reward": 1800, "testing": 1800}
    short = limits_of("trainer.hang_timeout_s=100", on_nccl=True)
    assert (short["update_actor"], short["reward"]) == (100, 120)
