"""Signs of degeneration, against loops in plain Python and numbers by hand."""

import random

import pytest
import torch

from ppo.batch.degeneration import (
    ANSWER_TOKENS,
    LEAST_LOOP,
    LONGEST_PERIOD,
    REPEATS,
    answer_keys,
    component_sums,
    distinct_share,
    flat_share,
    looping,
    variance_parts,
)


def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([len(row) for row in rows])
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows]), lengths


def has_loop(row: list[int]) -> bool:
    """Some block, repeated often enough, stands somewhere in the row."""
    for period in range(1, LONGEST_PERIOD + 1):
        size = max(REPEATS * period, LEAST_LOOP)
        for start in range(len(row) - size + 1):
            part = row[start : start + size]
            if all(part[i] == part[i - period] for i in range(period, size)):
                return True
    return False


def test_loops_are_found_as_by_a_search_of_every_place():
    g = random.Random(0)
    rows = [[g.randrange(3) for _ in range(g.randrange(90))] for _ in range(40)]
    for period in (1, 2, 5, 17, LONGEST_PERIOD):
        block = [g.randrange(50) for _ in range(period)]
        size = max(REPEATS * period, LEAST_LOOP)
        for length in (size - 1, size, size + 3):
            tail = [g.randrange(50, 99) for _ in range(7)]
            rows.append(tail + (block * length)[:length] + tail)
    rows += [[], [7], [0] * 15, [0] * 16, [9] * 5 + list(range(40))]
    found = looping(*padded(rows)).tolist()
    assert found == [has_loop(row) for row in rows]
    assert 5 < sum(found) < len(rows) - 5


def test_padding_is_no_loop():
    ids, lengths = padded([list(range(1, 9)), list(range(100, 200))])
    assert looping(ids, lengths).tolist() == [False, False]
    assert looping(torch.zeros(2, 0, dtype=torch.long), torch.zeros(2, dtype=torch.long)).sum() == 0


def test_answers_are_told_apart_by_their_last_tokens():
    tail = list(range(ANSWER_TOKENS))
    keys = answer_keys(
        *padded([[5, *tail], [6, 7, *tail], [*tail, 9], tail[1:], [0, *tail[1:]], []])
    )
    assert keys[0] == keys[1] == keys[4] and len(keys.unique()) == 4
    groups = torch.tensor([0, 0, 1, 1, 2, 3])
    # group 0: one answer of two samples; group 1: two of two; 2 and 3 have nothing to compare
    assert distinct_share(keys, groups) == pytest.approx((0.5 + 1.0) / 2)
    assert distinct_share(keys[4:], groups[4:]) is None


def test_groups_without_spread_are_those_of_several_equal_scores():
    scores = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.5])
    assert flat_share(scores, torch.tensor([0, 0, 1, 1, 3, 4])) == 0.5
    assert flat_share(scores[:2], torch.tensor([0, 1])) is None
    assert flat_share(scores[:0], torch.tensor([], dtype=torch.long)) is None


def test_a_components_part_of_the_variance_is_its_squared_correlation():
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 50, generator=g, dtype=torch.float64)
    scores = 2 * x + y
    components = [{"a": a, "b": b, "c": 1.0} for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    parts = [  # two ranks, and one without samples
        component_sums(scores[:20].tolist(), components[:20]),
        component_sums([], []),
        component_sums(scores[20:].tolist(), components[20:]),
    ]
    found = variance_parts(parts)
    wanted = {
        name: torch.corrcoef(torch.stack([part, scores]))[0, 1].item() ** 2
        for name, part in (("a", x), ("b", y))
    }
    assert found == pytest.approx(wanted)  # c is constant
    alone = component_sums(scores.tolist(), [{"function": s} for s in scores.tolist()])
    assert variance_parts([alone]) == {}  # it is the score
