"""Which samples of a step are logged, and what is known of their tokens."""

import json

import pytest
import torch

from ppo.data.dataset import Prompt
from ppo.data.tokenizer import token_texts
from ppo.engines.contract import Completion
from ppo.models.tiny import build_tiny_tokenizer
from ppo.rollout.logged_samples import MOST_TOKENS, _token_details, chosen_rows
from ppo.tracking.tracker import Tracker
from tests.ppo.batches import make_batch, rows_here

TOKENIZER = build_tiny_tokenizer()


def prompts(number: int) -> list[Prompt]:
    return [Prompt(i, [1] * (i + 1), "src", None, {}, "p") for i in range(number)]


def batch_of(texts: list[list[int]], **more):
    """One response to each prompt; prompt i has i + 1 tokens."""
    done = [Completion(ids, [0.0] * len(ids), "stop") for ids in texts]
    return make_batch(prompts(len(texts)), done, **more)


def test_the_best_and_the_worst_sample_are_logged_and_a_failed_one_is_neither() -> None:
    scores = [0.5, 0.9, -1.0, 0.0, 0.3, 0.2, 0.1, 0.4]
    batch = batch_of([[97]] * 8, scores=scores, failed=[3])
    for step in range(20):
        chosen = chosen_rows(batch.all, step)
        assert {1, 2} <= chosen and len(chosen) <= 4
        assert chosen == chosen_rows(batch.all, step)
    all_failed = batch_of([[97]] * 2, failed=[0, 1])
    assert len(chosen_rows(all_failed.all, 1)) == 2


def test_of_equal_samples_others_are_logged_in_other_steps() -> None:
    batch = batch_of([[97]] * 64, scores=[1.0] * 64)
    assert len({number for step in range(30) for number in chosen_rows(batch.all, step)}) > 20


def test_each_rank_gives_the_values_of_its_own_rows() -> None:
    batch = batch_of([[97, 98, 99], [100], list(b"ef")], scores=[0.0, 1.0, 2.0])
    batch.advantages = torch.tensor([[0.1, 0.2, 0.3], [1.0, 0.0, 0.0], [-2.0, -3.0, 0.0]])
    batch.old_logprobs = torch.full((3, 3), -1.0)
    batch.ref_logprobs = torch.tensor([[-1.5, -1.0, -0.5], [-3.0, 0.0, 0.0], [-1.0, -1.0, 0.0]])
    parts = [_token_details(rows_here(batch, 2, rank), {0, 1, 2}, TOKENIZER) for rank in (0, 1)]
    assert sorted(parts[0]) == [0, 2] and sorted(parts[1]) == [1]
    found = parts[0] | parts[1]
    assert found[0] == {"text": ["a", "b", "c"], "advantage": [0.1, 0.2, 0.3], "kl": [0.5, 0, -0.5]}
    assert found[1] == {"text": ["d"], "advantage": [1.0], "kl": [2.0]}
    assert found[2] == {"text": ["e", "f"], "advantage": [-2.0, -3.0], "kl": [0.0, 0.0]}
    assert _token_details(batch, set(), TOKENIZER) == {}


def test_of_a_long_response_the_first_tokens_are_kept() -> None:
    batch = batch_of([[97] * (MOST_TOKENS + 5)])
    batch.advantages = torch.ones(1, MOST_TOKENS + 5)
    detail = _token_details(batch, {0}, TOKENIZER)[0]
    assert len(detail["text"]) == len(detail["advantage"]) == MOST_TOKENS and "kl" not in detail


@pytest.mark.parametrize("text", ["plain", "naïve 你好 🙂!", "<|user|>x<|im_end|>", "🙂"])
def test_the_texts_of_tokens_are_the_text(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    pieces = token_texts(TOKENIZER, ids)
    assert len(pieces) == len(ids) and "".join(pieces) == text
    half = token_texts(TOKENIZER, TOKENIZER.encode("🙂")[:2])
    assert half == ["", "\ufffd"]


def test_distributions_are_kept_as_counts_beside_the_metrics(tmp_path) -> None:
    with Tracker(tmp_path, enabled=True, loggers=["jsonl"]) as tracker:
        for step in (1, 2, 3):
            tracker.histogram(step, "score", [0.0, 1.0, 1.0, float("nan"), 0.5])
        tracker.histogram(3, "same", [2.0, 2.0])
    with Tracker(tmp_path, enabled=True, loggers=["jsonl"]) as tracker:
        tracker.truncate(2)
        tracker.histogram(3, "same", [2.0, 2.0])
    rows = [json.loads(line) for line in (tmp_path / "histograms.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert (rows[0]["low"], rows[0]["high"], sum(rows[0]["counts"])) == (0.0, 1.0, 4)
    assert [rows[0]["counts"][i] for i in (0, 16, 31)] == [1, 1, 2]
    assert rows[2]["name"] == "same" and rows[2]["counts"][0] == 2
