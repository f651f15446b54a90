"""How sequences are divided over ranks and micro-batches: budgets and balance."""

from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.partition import Budget, assign, count_micro_batches, largest_first, micro_batches


def test_the_largest_cost_that_is_left_goes_to_the_part_with_the_least():
    assert largest_first([3, 1, 2, 2], 2) == [[0, 1], [2, 3]]
    assert largest_first([5.0, 7.0], 3) == [[1], [0], []]
    assert largest_first([1, 1, 1], 2) == [[0, 2], [1]]


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), max_size=40),
    dp=st.integers(1, 5),
    tokens=st.one_of(st.none(), st.integers(10, 100)),
    count=st.one_of(st.none(), st.integers(1, 4)),
    padded=st.booleans(),
    balance=st.booleans(),
)
def test_micro_batches_cover_each_sequence_once_within_its_budget(
    lengths, dp, tokens, count, padded, balance
):
    budget = Budget(dp=dp, tokens=tokens, count=count, padded=padded, balance=balance)
    shares = assign(lengths, range(len(lengths)), budget)
    assert len(shares) == dp
    number = max([1, *(count_micro_batches(lengths, mine, budget) for mine in shares)])
    ranks = [micro_batches(lengths, mine, budget, number) for mine in shares]
    assert all(len(micros) == number for micros in ranks)
    assert sorted(i for micros in ranks for m in micros for i in m) == list(range(len(lengths)))
    for micro in (m for micros in ranks for m in micros if len(m) > 1):
        size = (
            len(micro) * max(lengths[i] for i in micro)
            if padded
            else sum(lengths[i] for i in micro)
        )
        assert tokens is None or size <= tokens
        assert count is None or len(micro) <= count


def test_balancing_by_cost_splits_one_long_against_many_short_sequences():
    lengths = [4000] + [1000] * 6
    budget = Budget(dp=2, hidden_size=64)  # the quadratic part rules
    ranks = assign(lengths, range(7), budget)
    assert sorted(map(len, ranks)) == [1, 6]
    in_order = assign(lengths, range(7), Budget(dp=2, balance=False))
    assert in_order == [[0, 2, 4, 6], [1, 3, 5]]
