"""What train_ppo.py says before torch is imported."""

import pytest

from ppo.check.commands import before_evaluation, before_torch

TINY = ["--config", "ppo_tiny.yaml"]
ANNOUNCED = "importing torch"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([*TINY, "rollout.n=0", "model.path=no/such/folder"], 2, ("rollout.n", "model.path")),
        (["--config", "nope.yaml"], 2, ("no such file",)),
        (["ppo_tiny.yaml"], 2, ("--config",)),
        ([*TINY, "actor.ppo_mini_batch_size=7"], 2, ("actor.ppo_mini_batch_size",)),
        ([*TINY, "--check"], 0, ()),
        (TINY, None, (ANNOUNCED,)),
    ],
)
def test_a_plan_or_what_is_wrong_ends_it_and_a_run_is_announced(capsys, words, code, said):
    assert before_torch(words, {}) == code
    err = capsys.readouterr().err
    assert all(word in err for word in said) and (ANNOUNCED in err) == (code is None)


def test_the_options_of_an_evaluation_are_looked_at_too(capsys):
    given = ["--data", "tiny", "--out", "x.jsonl"]
    assert before_evaluation(TINY, {}) == 2
    assert before_evaluation(["--config", "nope.yaml", *given], {}) == 2
    assert before_evaluation([*TINY, *given, "--steps", "a"], {}) == 2
    err = capsys.readouterr().err
    assert "--data, --out" in err and "no such file" in err and "--steps" in err
    assert before_evaluation([*TINY, *given], {}) is None


def test_under_torchrun_the_first_rank_announces_and_nobody_looks(capsys):
    for rank in range(2):
        env = {"TORCHELASTIC_RUN_ID": "none", "RANK": str(rank), "WORLD_SIZE": "2"}
        assert before_torch(["--config", "nope.yaml"], env) is None
    env |= {"RANK": "0", "WORLD_SIZE": "1"}
    assert before_torch(["--config", "nope.yaml"], env) is None
    assert capsys.readouterr().err.count(ANNOUNCED) == 2
