"""The built-in scorers, by hand-made answers."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal

import pytest

from ppo.data.tiny import LETTERS
from ppo.rewards.contract import RewardError
from ppo.rewards.scorers import builtin, math_answers, tiny
from ppo.rewards.scorers.builtin import compute_score, score_and_answer, scorer_of
from ppo.rewards.scorers.gsm8k import last_number


@pytest.mark.parametrize(
    ("text", "truth", "strict", "flexible"),
    [
        ("so it is\n#### 18", "18", 1, 1),
        ("#### 3 no, wait\n#### 18", "18", 1, 1),
        ("#### $1,234.50.", "1234.5", 1, 1),
        ("#### -7", -7, 1, 1),
        ("the answer is 18.", "18", 0, 1),
        ("18 or 19", "18", 0, 0),
        ("#### 18" + " " * 300, "18", 0, 0),  # not in the last 300 characters
        ("#### eighteen", "18", 0, 0),
        ("...,", "18", 0, 0),
        ("", "18", 0, 0),
    ],
)
def test_gsm8k(text, truth, strict, flexible):
    assert compute_score("openai/gsm8k", text, truth) == strict
    assert compute_score("gsm8k", text, truth, method="flexible") == flexible


@pytest.mark.parametrize(
    ("source", "text", "truth", "answer", "options"),
    [
        ("gsm8k", "#### 1,018.50", "1018.5", "1018.5", {}),
        ("gsm8k", "so 0018", "18", "18", {"method": "flexible"}),
        ("gsm8k", "none at all", "18", None, {}),
        ("gsm8k", "#### -0.0", "0", "0", {}),
        ("exact_match", " 58\n", "58", "58", {}),
        ("exact_match", "58.0 it is", "58", "58", {"method": "last_number"}),
        ("math", r"\boxed{\dfrac12}", r"\frac{1}{2}", r"\frac{1}{2}", {}),
        ("math", "no box", "5", None, {}),
        ("regex", "abc", "b", None, {}),
        ("tiny", "abc", "abd", "abc", {}),
    ],
)
def test_equal_answers_are_equal_texts(source, text, truth, answer, options):
    found = score_and_answer(source, text, truth, **options)
    assert found == {"score": compute_score(source, text, truth, **options), "pred": answer}


def test_a_ground_truth_that_is_no_number_is_said():
    with pytest.raises(ValueError, match="ground truth 'x' is not a number"):
        compute_score("gsm8k", "#### 1", "x")


def test_last_number_reads_what_people_write():
    assert last_number("3 + 4 = 7") == Decimal(7)
    assert last_number("costs $1,000,000.25!") == Decimal("1000000.25")
    assert last_number("from 5 to -2.") == Decimal(-2)
    assert last_number("10-3") == Decimal(-3)  # a sign that touches its number belongs to it
    assert last_number("none") is None


@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [
        (r"Thus $\boxed{\frac{1}{2}}$.", r"\frac12", 1),
        (r"\boxed{3} and then \boxed{x^{2}+1}", "x^2+1", 1),
        (r"\boxed{\dfrac{3}{4}}", r"\frac{3}{4}", 1),
        (r"\boxed{4}", "5", 0),
        (r"no box", "5", 0),
    ],
)
def test_math_with_and_without_math_verify(text, truth, expected, monkeypatch):
    pytest.importorskip("math_verify")
    assert compute_score("HuggingFaceH4/MATH-500", text, truth) == expected
    monkeypatch.setattr(math_answers, "find_spec", lambda name: None)
    truth = truth.replace("x^2", "x^{2}")  # texts are compared, not expressions
    assert compute_score("lighteval/MATH", text, truth) == expected


def test_math_verify_compares_values():
    pytest.importorskip("math_verify")
    assert compute_score("aime24", r"\boxed{0.5}", r"\frac{1}{2}") == 1
    assert compute_score("math", r"so $(x+1)^2$", "x^2+2x+1") == 1


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"\boxed{a{b}c} d", "a{b}c"),
        (r"\boxed{a} \boxed{b", "a"),
        (r"\boxed{a \boxed {b}}", "b"),
        (r"} \fboxed{}} \boxed{ {a}", ""),
        ("none", None),
    ],
)
def test_last_boxed_matches_braces(text, boxed):
    assert math_answers.last_boxed(text) == boxed


@pytest.mark.parametrize(
    ("source", "part"),
    [
        *(("gsm8k", part) for part in ("...,", "####", "-1")),
        *(("math", part) for part in (r"\boxed{", r"\boxed{\text{}", "{}", r"\boxed ")),
        ("reasoning_gym/chain_sum", "<answer>"),
    ],
)
def test_a_degenerate_response_costs_no_more_than_its_length(source, part, monkeypatch):
    """100,000 characters, in a second at most; with the square of them it would be a minute."""
    monkeypatch.setattr(math_answers, "find_spec", lambda name: None)  # which has a limit
    if source.startswith("reasoning_gym"):
        pytest.importorskip("reasoning_gym").get_score_answer_fn("chain_sum")  # import it
    text = part * (100_000 // len(part))
    start = time.process_time()
    for method in ("flexible", None) if source == "gsm8k" else (None,):
        score_and_answer(source, text, "7", method=method)
    last_number(text)
    assert time.process_time() - start < 1


def test_mathematics_is_scored_in_a_thread_too():
    """As an episode's code does. math-verify's time limit is a signal, which no thread can have."""
    pytest.importorskip("math_verify")
    said = "math", r"\boxed{0.5}", r"\frac{1}{2}"
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(score_and_answer, *said).result() == score_and_answer(*said)


def test_reasoning_gym_uses_the_scorer_of_the_task_or_the_last_number():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    source, entry = "reasoning_gym/chain_sum", {"question": "4 - 1 =", "metadata": "{}"}
    assert compute_score(source, "3", "3", entry) == 1
    assert compute_score(source, "so <answer> 3 </answer>", "3", entry) == 1
    assert compute_score(source, "it is 3", "3", entry) < 1
    last = entry | {"method": "last_number"}
    assert compute_score(source, "it is 3", "3", last) == 1
    assert compute_score(source, "3 or 4", "3", last) == 0
    # a task whose scorer needs the metadata of the entry
    made = reasoning_gym.create_dataset("countdown", size=1, seed=1)[0]
    extra = {"question": made["question"], "metadata": json.dumps(made["metadata"], default=str)}
    right = made["metadata"]["expression"]
    assert compute_score("reasoning_gym/countdown", right, made["answer"], extra) == 1


@pytest.mark.parametrize(
    ("source", "text", "truth", "expected"),
    [
        ("exact_match", " yes\n", "yes", 1),
        ("exact_match/mine", "no", ["yes", "no"], 1),
        ("exact_match", "yes.", "yes", 0),
        ("exact_match", "3", 3, 1),
        ("regex", "abc 42", r"\b4\d\b", 1),
        ("regex", "abc 52", r"\b4\d\b", 0),
        ("tiny", "ab", "ab", 1),
    ],
)
def test_texts(source, text, truth, expected):
    assert compute_score(source, text, truth) == expected


def test_each_data_source_has_the_scorer_that_is_expected():
    names = ["openai/gsm8k", "math_dapo", "aime_2025", "reasoning_gym/x", "regex", "tiny"]
    scorers = ["gsm8k", "math", "math", "reasoning_gym", "regex", "tiny"]
    assert [scorer_of(name) for name in names] == scorers
    with pytest.raises(RewardError, match="'gsm8k2'") as caught:
        scorer_of("gsm8k2")
    for _, names in sorted(builtin.SOURCES.items()):
        assert all(name in str(caught.value) for name in names)
    with pytest.raises(RewardError, match="gsm8k has no method 'own'; it has strict, flexible"):
        compute_score("gsm8k", "1", "1", method="own")


def test_the_letters_of_the_copy_task_are_those_that_its_scorer_knows():
    assert tiny.LETTERS == LETTERS


@pytest.mark.parametrize("source", ["gsm8k", "math", "exact_match", "regex", "tiny"])
def test_a_missing_ground_truth_is_said_instead_of_scored_0(source):
    with pytest.raises(RewardError, match=f"{source} needs a ground truth"):
        compute_score(source, "1", None)
