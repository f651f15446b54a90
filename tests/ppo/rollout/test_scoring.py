"""Scores of a batch from reward functions: metrics, failures, what is kept when they end a run."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo.batch.conversations import Conversation
from ppo.batch.samples import Samples
from ppo.batch.shares import overview_of, share_out
from ppo.config import load_config
from ppo.data.dataset import Prompt
from ppo.data.prompts import PromptSets
from ppo.engines.contract import Completion
from ppo.metrics import Metrics
from ppo.models.tiny import build_tiny_tokenizer
from ppo.rewards.contract import RewardError
from ppo.rollout.logged_samples import log_samples
from ppo.rollout.reward_data import check_columns, check_truths, warn_of_null_truths
from ppo.rollout.samples import kept_on_failure, sample_rows
from ppo.rollout.scoring import RewardsFailed, Scorer, open_rewards
from ppo.run.run import Run
from ppo.tracking.tracker import Tracker
from sharding.mesh import build_mesh, init_distributed
from tests.ppo.batches import make_samples

TOKENIZER = build_tiny_tokenizer()
SOURCE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "raise": raise ValueError("half \\ud800")
    return {"score": len(solution_str), "failed": -1, "acc": solution_str == ground_truth}
def only_long(completions, **kwargs):
    return [None if len(completions[0]) < 3 else len(completions[0])]
"""


def make_prompt(index: int, source: str = "src", truth: Any = "abc", **extra) -> Prompt:
    return Prompt(index, [7], source, truth, extra, "p", f"data/a.jsonl, row {index}")


def samples_of(texts: Sequence[str], **more) -> Samples:
    prompts = [make_prompt(index, **more) for index in range(len(texts))]
    ids = [TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in texts]
    samples = make_samples(prompts, [Completion(i, [0.0] * len(i), "stop") for i in ids])
    return replace(samples, texts=list(texts))


@contextmanager
def scorer_of(folder: Path, *overrides: str) -> Iterator[Scorer]:
    (folder / "reward.py").write_text(SOURCE)
    config = load_config(
        "ppo_tiny.yaml",
        [
            f"reward.function.path={folder / 'reward.py'}",
            f"trainer.default_local_dir={folder / 'run'}",
            "reward.num_workers=1",
            *overrides,
        ],
    )
    prompts = PromptSets(TOKENIZER, [make_prompt(0, "exact_match")], {}, 512)
    with init_distributed(torch.device("cpu")):
        mesh = build_mesh(config.dims(1, 1), torch.device("cpu"))
        with Run(config, mesh, command=["test"]) as run, open_rewards(config, run, prompts) as pool:
            yield Scorer(config=config, run=run, pool=pool, reward_model=None)


def test_entries_of_a_dict_have_a_place_of_their_own_and_a_failed_sample_keeps_its_reason(
    tmp_path, caplog
):
    metrics, samples = Metrics(), samples_of(["ab", "raise", "abc"])
    with scorer_of(tmp_path, "reward.max_failed_fraction=0.4") as scorer:
        scorer.score(samples, metrics)
        rows = sample_rows(samples, scorer.run.mesh)
    assert rows is not None
    assert {"reward/failed", "reward/timeout"} <= metrics.known.keys()  # by guards, before updates
    values = metrics.reduce()
    assert (values["reward/failed"], values["reward/timeout"]) == (1, 0)
    assert (values["reward/extra/failed"], values["reward/extra/acc"]) == (-1, 0.5)
    assert samples.scores.tolist() == [2, 0, 3] and samples.failed.tolist() == [False, True, False]
    assert rows[2]["components"] == {"function": 3, "extra/failed": -1, "extra/acc": 1}
    assert (rows[1]["score"], rows[1]["components"]) == (None, {})
    assert rows[1]["failure"].startswith("error: Traceback") and rows[0]["failure"] is None
    (said,) = [message for message in caplog.messages if "masked out" in message]
    assert "1 of 3 samples failed" in said and "ValueError: half \\ud800" in said
    assert (
        "data/a.jsonl, row 1, data_source 'src'\n  response: 'raise'\n  ground truth: 'abc'" in said
    )


def test_a_score_that_an_episode_has_given_itself_is_the_reward_and_nothing_else_scores_it(
    tmp_path,
):
    texts = ["abcd", "raise", "ab", "raise"]
    metrics, samples = Metrics(), samples_of(texts)
    told = [
        Conversation([]),  # scored as a response is
        Conversation([], score=-0.5, extra={"found": 1.0}),
        Conversation([], failed="timeout", reason="no end after 600 s"),
        Conversation([]),
    ]
    samples = replace(samples, conversations=told)
    keys = ("reward.max_failed_fraction=1", "reward.weights.function=10")
    with scorer_of(tmp_path, *keys, "rollout.episode.path=game.py") as scorer:
        scorer.score(samples, metrics)
    values = metrics.reduce()
    assert samples.scores.tolist() == [40, -0.5, 0, 0]
    assert samples.failed.tolist() == [False, False, True, True]
    assert samples.components[1] == {"episode": -0.5, "extra/found": 1.0}
    assert samples.failures[2] == "timeout: no end after 600 s"
    assert (values["reward/failed"], values["reward/timeout"]) == (1, 1)
    assert values["reward/extra/found"] == 1


def test_a_failed_sample_is_shown_whole_once(tmp_path, caplog):
    with scorer_of(tmp_path, "reward.max_failed_fraction=1") as scorer:
        for _ in range(2):
            scorer.score(samples_of(["raise"]), Metrics())
    first, second = (message for message in caplog.messages if "masked out" in message)
    assert "response: 'raise'" in first
    assert second.endswith("the first: ValueError: half \\ud800")


def test_samples_of_a_step_whose_rewards_end_the_run_are_kept_with_their_failures(tmp_path):
    samples = samples_of(["ab", "raise", "abc", "raise", "raise"])
    with (
        scorer_of(tmp_path, "reward.max_failed_fraction=0.1") as scorer,
        Tracker(scorer.run.dir, enabled=True, loggers=["jsonl"]) as tracker,
    ):
        with (
            pytest.raises(RewardsFailed, match=r"(?s)failed for \d of 5 .*row 1, data_source"),
            kept_on_failure(tracker, scorer, samples, 4),
        ):
            scorer.score(samples, Metrics())
        (file,) = (scorer.run.dir / "samples").iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert file.name == "train_00000004.jsonl"
    assert [row["score"] for row in rows] == [2, None, 3, None, None]
    assert all("ValueError" in rows[index]["failure"] for index in (1, 3, 4))


def test_a_sample_to_which_no_function_applies_is_masked_out(tmp_path):
    metrics, samples = Metrics(), samples_of(["abcd", "ab"])
    trl = ("reward.function.name=only_long", "reward.function.style=trl")
    with scorer_of(tmp_path, *trl, "reward.max_failed_fraction=0.5") as scorer:
        scorer.score(samples, metrics)
    assert samples.failed.tolist() == [False, True]
    assert samples.failures[1] is not None and "no reward function applies" in samples.failures[1]
    assert metrics.reduce()["reward/failed"] == 1


def test_equal_scores_of_a_whole_step_are_said_when_they_begin(tmp_path, caplog):
    source = {"source": "exact_match", "truth": "58"}
    steps = [["58.", "No: 58"], ["5", "6"], ["58", "6"], ["1", "2"]]
    builtin = "reward.function.path=null"
    with scorer_of(tmp_path, builtin) as scorer:
        tracker = Tracker(tmp_path, enabled=False, loggers=[])
        said = []
        for step, texts in enumerate(steps, start=1):
            samples = samples_of(texts, **source)
            scorer.score(samples, Metrics())
            overview, holders = overview_of(samples, scorer.run.mesh)
            batch = share_out(samples, overview, holders, holders, scorer.run.mesh)
            log_samples(tracker, scorer, samples, batch, TOKENIZER, step)
            said.append([message for message in caplog.messages if "all scores" in message])
    assert [len(messages) for messages in said] == [1, 1, 1, 2]
    assert "are 0: nothing can be learned" in said[0][0]
    assert "response: '58.'\n  ground truth: '58'" in said[0][0]
    assert "jsonl --method last_number" in said[0][0]


def sets(train: Sequence[Prompt], val: Sequence[Prompt] = ()) -> PromptSets:
    return PromptSets(TOKENIZER, list(train), {"": list(val)}, 512)


@pytest.mark.parametrize(
    ("source", "good", "bad", "said"),
    [
        ("exact_match", "a", None, "exact_match needs a ground truth"),
        ("gsm8k", "7", "7/2", "ground truth '7/2' is not a number"),
        ("regex", "a+", "a(", "no pattern"),
        ("regex", "a+", 5, "no pattern"),
        ("tiny", "a", 5, "is no text"),
    ],
)
def test_ground_truths_that_a_scorer_cannot_use_are_found_in_every_row(source, good, bad, said):
    rows = [make_prompt(index, source, good) for index in range(200)]
    check_truths(sets(rows), {})
    rows[150] = make_prompt(150, source, bad)
    rows[170] = make_prompt(170, source, bad)
    with pytest.raises(
        RewardError, match=r"^data/a.jsonl, row 150: .*\(and 1 rows more\)$"
    ) as error:
        check_truths(sets(rows), {})
    assert said in str(error.value)


def test_null_ground_truths_among_others_are_said_to_the_users_of_functions(caplog):
    rows = [make_prompt(0), make_prompt(1, truth=None)]
    warn_of_null_truths(sets(rows))
    assert caplog.messages == ["data/a.jsonl, row 1: the ground truth is null, as in 1 of 2 rows"]
    warn_of_null_truths(sets(rows[:1]))
    warn_of_null_truths(sets(rows[1:]))
    assert len(caplog.messages) == 1


def test_columns_that_a_function_takes_and_no_row_gives_are_refused():
    rows = [make_prompt(0), make_prompt(1, solution="s")]
    check_columns(frozenset({"solution"}), sets(rows))
    said = "no column of the validation data gives 'solution'.*there are data_source, ground_truth"
    with pytest.raises(RewardError, match=said):
        check_columns(frozenset({"solution"}), sets(rows, rows[:1]))
