"""mean@n, pass@k and maj@n: by enumeration and by hand, and what they are called."""

from itertools import combinations

import pytest

from ppo.errors import InputError
from ppo.rollout.figures import majority_score, metrics_of, pass_at_k, summarise
from ppo.rollout.prompts import check_metric_names
from tests.test_rollout import make_prompts


@pytest.mark.parametrize(("num_samples", "num_passed"), [(1, 0), (1, 1), (5, 2), (6, 5), (4, 0)])
def test_pass_at_k_is_the_share_of_subsets_with_a_passing_sample(num_samples, num_passed):
    passed = [index < num_passed for index in range(num_samples)]
    for k in range(1, num_samples + 1):
        subsets = list(combinations(passed, k))
        expected = sum(any(subset) for subset in subsets) / len(subsets)
        assert pass_at_k(num_samples, num_passed, k) == pytest.approx(expected)


def row(index: int, score: float | None, length: int = 4, **more) -> dict:
    return {
        "prompt_index": index,
        "score": score,
        "response_length": length,
        "finish_reason": "stop",
        "data_source": "b",
    } | more


def test_a_summary_leaves_failed_samples_out_of_scores_and_counts_them():
    rows = [row(0, 1.0), row(0, 0.0), row(0, 0.5), row(1, None), row(1, 0.0), row(1, 0.0)]
    rows += [row(2, 1.0, 10, data_source="a", finish_reason="length")]
    summaries = summarise(rows)
    assert list(summaries) == ["a", "b"]
    assert summaries["a"].clip_ratio == 1.0 and summaries["a"].max_length == 10
    b = summaries["b"]
    assert (b.num_prompts, b.num_samples, b.num_failed) == (2, 6, 1)
    assert b.mean_score == pytest.approx(1.5 / 5)
    # prompt 0: one of three passes; prompt 1: none of two
    assert b.pass_at == pytest.approx({1: (1 / 3 + 0) / 2, 2: (2 / 3 + 0) / 2})
    assert summarise(rows, pass_score=0.5)["b"].pass_at[1] == pytest.approx((2 / 3 + 0) / 2)


def test_validation_with_several_samples_logs_pass_at_k_too():
    rows = [row(0, 1.0, components={"extra/tries": 3.0, "function": 1.0})]
    rows += [row(0, 0.0, components={"extra/tries": 1.0}), row(0, 0.5), row(0, 0.0)]  # one of four
    rows += [row(1, None), row(1, 1.0), row(1, 2.0), row(1, 1.0)]  # three of three
    rows += [row(2, None, data_source="failed")] * 4
    assert metrics_of(summarise(rows), 4) == pytest.approx(
        {
            "val-aux/b/tries/mean": 2,  # of those that say it
            "val-aux/b/response_length/mean": 4,
            "val-aux/b/response_length/clip_ratio": 0,
            "val-aux/failed/response_length/mean": 4,
            "val-aux/failed/response_length/clip_ratio": 0,
            "val-core/b/reward/mean@4": 5.5 / 7,
            "val-core/b/pass@1": (1 / 4 + 1) / 2,
            "val-core/b/pass@2": (1 / 2 + 1) / 2,
            "val-core/b/pass@4": 1.0,  # of the one prompt that has four scores
        }
    )
    assert metrics_of(summarise([row(0, 0.5)]), 1) == {
        "val-core/b/reward/mean@1": 0.5,
        "val-aux/b/response_length/mean": 4,
        "val-aux/b/response_length/clip_ratio": 0,
    }


def answers(*pairs: tuple[str | None, float]) -> list[dict]:
    return [row(0, score, answer=answer) for answer, score in pairs]


def test_the_majority_is_scored_and_who_gives_no_answer_has_no_vote() -> None:
    assert majority_score(answers(("4", 1.0), ("5", 0.0), ("4", 1.0), ("6", 0.0))) == 1.0
    assert majority_score(answers(("5", 0.0), ("4", 1.0), ("5", 0.0))) == 0.0
    assert majority_score(answers((None, 0.0), (None, 0.0), ("4", 1.0))) == 1.0
    # as many votes for 4 as for 5: whoever draws one of them is right half of the time
    assert (
        majority_score(answers(("4", 1.0), ("5", 0.0), ("6", 0.0), ("5", 0.0), ("4", 1.0))) == 0.5
    )
    assert majority_score(answers((None, 0.25), (None, 0.75))) == 0.5


def test_votes_are_logged_where_answers_are_known_under_the_name_of_the_set() -> None:
    rows = answers(("a", 1.0), ("b", 0.0), ("a", 1.0), (None, 0.0))
    rows += [row(1, s, answer=a) for a, s in (("a", 0.0), ("a", 0.0), ("c", 1.0), ("d", 0.0))]
    assert metrics_of(summarise(rows), 4, "aime") == pytest.approx(
        {
            "val-aux/aime/b/response_length/mean": 4,
            "val-aux/aime/b/response_length/clip_ratio": 0,
            "val-core/aime/b/reward/mean@4": 3 / 8,
            "val-core/aime/b/reward/maj@4": (1 + 0) / 2,
            "val-core/aime/b/pass@1": (2 / 4 + 1 / 4) / 2,
            "val-core/aime/b/pass@2": ((1 - 1 / 6) + (1 - 3 / 6)) / 2,
            "val-core/aime/b/pass@4": 1.0,
        }
    )
    alone = metrics_of(summarise([row(0, 1.0, answer="a")]), 1)
    assert alone["val-core/b/reward/mean@1"] == 1.0 and not any("maj" in name for name in alone)


def test_two_sets_whose_metrics_would_have_one_name_are_refused() -> None:
    prompts = [p._replace(data_source="openai/gsm8k") for p in make_prompts([2])]
    other = [p._replace(data_source="gsm8k") for p in make_prompts([2])]
    check_metric_names({"": prompts, "hard": prompts, "openai2": other})
    with pytest.raises(InputError, match=r"data\.val_sets\.openai: .*val-core/openai/gsm8k/"):
        check_metric_names({"": prompts, "openai": other})
