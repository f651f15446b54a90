"""What a rank without memory leaves, and what the next start makes of it."""

import json
from pathlib import Path

import pytest
import torch

from ppo.config import Config, load_config
from ppo.errors import InputError
from ppo.run import oom
from ppo.run.folder import set_aside

ACTOR = oom.ACTOR


def tiny(*overrides: str) -> Config:
    """Budgets 128 of the actor, 256 of critic and ref; the longest sequence has 64 tokens."""
    return load_config("ppo_tiny.yaml", list(overrides))


def strike(run: Path, config: Config, phase: str, dp: int = 2) -> Config:
    """A start of the run that is out of memory in a phase, and the configuration of the next."""
    before = oom.read_oom(run)
    halvings = before["halvings"] if before else {}
    oom.write_oom(run, config, halvings, dp=dp, rank=1, phase=phase, tokens=77)
    found = oom.read_oom(run)
    assert found is not None
    return oom.with_smaller_budgets(config, found, dp=dp)


def test_the_budget_of_the_phase_is_halved_down_to_the_longest_sequence(tmp_path):
    config = tiny("actor.ppo_max_token_len_per_gpu=200")
    assert strike(tmp_path, config, "update_actor").actor.ppo_max_token_len_per_gpu == 100
    written = json.loads((tmp_path / "oom.json").read_text())
    assert written == {
        "rank": 1, "phase": "update_actor", "budget": 200, "tokens": 77, "halvings": {ACTOR: 1},
    }  # fmt: skip
    smaller = strike(tmp_path, config, "old_log_prob")
    assert smaller.actor.ppo_max_token_len_per_gpu == 64
    assert smaller.critic.ppo_max_token_len_per_gpu == config.critic.ppo_max_token_len_per_gpu
    assert json.loads((tmp_path / "oom.json").read_text())["budget"] == 100
    assert strike(tmp_path, config, "values").critic.ppo_max_token_len_per_gpu == 200
    with pytest.raises(InputError, match="rank 1 in update_actor with the smallest micro-batches"):
        strike(tmp_path, config, "update_actor")


def test_with_sp_a_rank_has_its_share_of_the_longest_sequence(tmp_path):
    config = tiny("actor.ulysses_sequence_parallel_size=2", "actor.ppo_max_token_len_per_gpu=40")
    assert strike(tmp_path, config, "update_actor").actor.ppo_max_token_len_per_gpu == 32


def test_micro_batches_of_sequences_are_halved_too(tmp_path):
    config = tiny("actor.use_dynamic_bsz=false", "rollout.n=2")
    sizes = [
        strike(tmp_path, config, "update_actor").actor.ppo_micro_batch_size_per_gpu
        for _ in range(3)
    ]
    assert sizes == [4, 2, 1]  # of 8 prompts x 2 on 2 ranks
    with pytest.raises(InputError):
        strike(tmp_path, config, "update_actor")


def test_where_no_budget_is_to_blame_all_are_halved(tmp_path):
    smaller = strike(tmp_path, tiny(), "gen")
    assert smaller.actor.ppo_max_token_len_per_gpu == 64
    assert smaller.critic.ppo_max_token_len_per_gpu == 128
    assert smaller.ref.log_prob_max_token_len_per_gpu == 128


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"halvings": {"a": 1}}', f'{{"halvings": {{"{ACTOR}": -1}}}}']
)
def test_what_is_no_record_of_ours_is_left_alone(tmp_path, content):
    (tmp_path / "oom.json").write_text(content)
    assert oom.read_oom(tmp_path) is None


def test_a_run_that_starts_over_takes_it_away_and_one_without_a_checkpoint_keeps_it(tmp_path):
    for also in ((), (oom.OOM_FILE,)):
        strike(tmp_path, tiny("actor.ppo_max_token_len_per_gpu=1000"), "update_actor")
        (tmp_path / "metrics.jsonl").write_text("")
        set_aside(tmp_path, also=also)
        assert (tmp_path / "oom.json").exists() == (also == ())
    assert (tmp_path / "old2" / "oom.json").exists()


def test_a_run_that_starts_over_takes_it_away_also_where_the_earlier_left_nothing_else(tmp_path):
    strike(tmp_path, tiny("actor.ppo_max_token_len_per_gpu=1000"), "update_actor")
    (tmp_path / "config.yaml").write_text("seed: 1")
    set_aside(tmp_path)
    assert (tmp_path / "oom.json").exists()
    set_aside(tmp_path, also=(oom.OOM_FILE,))
    assert {path.name for path in tmp_path.iterdir()} == {"old1"}
    assert {path.name for path in (tmp_path / "old1").iterdir()} == {"config.yaml", "oom.json"}


def caused_by(cause: BaseException) -> RuntimeError:
    try:
        raise RuntimeError("rank 0: OutOfMemoryError: CUDA out of memory") from cause
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (torch.cuda.OutOfMemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (caused_by(torch.OutOfMemoryError("x")), True),
        (caused_by(ValueError("of another rank")), False),
        (ValueError("out of memory"), False),
        (None, False),
    ],
)
def test_what_is_out_of_memory_on_this_rank(error, is_one):
    assert oom.is_out_of_memory(error) == is_one
