"""Three ranks, and two of them in a group of their own: what one has, all have; nobody waits."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sharding.agree import errors_by_rank, gather, raise_everywhere, together
from sharding.groups import new_group
from tests.distributed import run_distributed


class Unpicklable(ValueError):
    """Holds what cannot be sent, and cannot be built again from its text."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.lock = threading.Lock()


class OurError(ValueError):
    """What the callers ask for."""


def outcome(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:
        return f"{type(error).__name__}: {error}", type(error.__cause__).__name__


def fails(error: Exception | None) -> str:
    if error is not None:
        raise error
    return "fine"


def _scenarios(rank: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """All of one group, in one order on every rank; what this rank saw of each."""
    first, last = dist.get_process_group_ranks(group)[:: dist.get_world_size(group) - 1]
    own = {first: OSError("no"), last: Unpicklable("a.json", "cut")}.get(rank)
    one = Unpicklable("a.json", "cut") if rank == last else None

    def step(error: Exception | None, **options: Any) -> Any:
        return outcome(lambda: together(lambda: fails(error), group, OurError, **options))

    def tell(error: Any, **options: Any) -> Any:
        return outcome(lambda: raise_everywhere(error, group, OurError, **options))

    return {
        "values": gather({rank: [rank]}, group),
        "nothing": tell(None),
        "no texts": tell([]),
        "one": tell(one),
        "all the same": tell(ValueError("disk full")),
        "different": tell(own),
        "different, unnamed": tell(own, name_ranks=False),
        "the same, unnamed": tell("no such file", name_ranks=False),
        "several texts": tell(["a", "b"] if rank == first else ["b"] if rank == last else []),
        "named already": tell(f"rank {rank}: gone" if rank == last else None),
        "no message": tell(ValueError() if rank == first else None),
        "counted": errors_by_rank(own, group),
        "no error": step(None),
        "one step": step(one, expected=ValueError),
        "all steps": step(ValueError("disk full"), expected=ValueError),
        "different steps": step(own, expected=(OSError, ValueError)),
        "unnamed step": step(one, expected=ValueError, name_ranks=False),
        "surprise": step(KeyError("x") if rank == last else None, expected=ValueError),
        "surprise and error": step(
            KeyError("x") if rank == last else ValueError("y") if rank == first else None,
            expected=ValueError,
            name_ranks=False,
        ),
        "still together": gather(rank, group),
    }


def _gathered(rank: int, sizes: list[int]) -> tuple[list[int], list[int]]:
    """Lengths of what arrived if rank r sends sizes[r] letters; bytes that each exchange held."""
    held, originals = [], (dist.all_gather, dist.all_reduce)

    def all_gather(out: list[torch.Tensor], *args: Any, **options: Any) -> Any:
        held.append(sum(tensor.numel() for tensor in out))
        return originals[0](out, *args, **options)

    def all_reduce(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        held.append(tensor.numel())
        return originals[1](tensor, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather", all_gather)
        patch.setattr(dist, "all_reduce", all_reduce)
        values = gather(str(rank) * sizes[rank], dist.group.WORLD)  # pyright: ignore
    assert all(set(value) <= {str(r)} for r, value in enumerate(values))
    return [len(value) for value in values], held


def _groups(rank: int, world_size: int) -> list[Any]:
    pair = new_group([2, 0])
    sizes = ([0, 9, 400], [0, 100_000, 0], [90_000, 100_000, 80_000])
    gathered = [_gathered(rank, each) for each in sizes]
    world = _scenarios(rank, dist.group.WORLD)  # pyright: ignore[reportArgumentType]
    return [world, _scenarios(rank, pair) if rank in (0, 2) else None, gathered]


@pytest.fixture(scope="module")
def seen() -> list[list[Any]]:
    return run_distributed(_groups, 3, timeout_s=20)


def messages(seen: dict[str, Any]) -> dict[str, Any]:
    """Without the causes: an error has one on the ranks that raised it."""
    return {name: what[0] if isinstance(what, tuple) else what for name, what in seen.items()}


@pytest.mark.distributed
def test_every_rank_of_a_group_sees_the_same(seen) -> None:
    world, pair, _ = zip(*seen, strict=True)
    assert messages(world[0]) == messages(world[1]) == messages(world[2])
    assert messages(pair[0]) == messages(pair[2])
    assert pair[1] is None


@pytest.mark.distributed
def test_values_come_in_the_order_of_the_group(seen) -> None:
    world, pair, _ = seen[0]
    assert world["values"] == [{0: [0]}, {1: [1]}, {2: [2]}]
    assert pair["values"] == [{2: [2]}, {0: [0]}]
    assert world["no error"] == ["fine"] * 3 and pair["no error"] == ["fine"] * 2
    assert world["still together"] == [0, 1, 2] and pair["still together"] == [2, 0]


@pytest.mark.distributed
def test_an_error_on_one_rank_is_raised_on_all_and_names_it(seen) -> None:
    world, pair, _ = seen[0]
    for name in ("one", "one step"):
        assert world[name][0] == "OurError: rank 2: a.json: cut"
        assert pair[name][0] == "OurError: rank 0: a.json: cut"
        assert [row[0][name][1] for row in seen] == ["NoneType", "NoneType", "Unpicklable"]
    assert world["unnamed step"][0] == "OurError: a.json: cut"
    assert world["named already"][0] == "OurError: rank 2: gone"
    assert world["no message"][0] == "OurError: rank 0: ValueError()"
    assert world["nothing"] is None and world["no texts"] is None


@pytest.mark.distributed
def test_the_same_error_on_all_ranks_is_said_once(seen) -> None:
    world, pair, _ = seen[0]
    for name in ("all the same", "all steps"):
        assert world[name][0] == "OurError: ranks 0, 1, 2: disk full"
        assert pair[name][0] == "OurError: ranks 2, 0: disk full"
    assert world["the same, unnamed"][0] == "OurError: no such file"
    assert world["several texts"][0] == "OurError: rank 0: a\nranks 0, 2: b"


@pytest.mark.distributed
def test_different_errors_are_all_said(seen) -> None:
    world, pair, _ = seen[0]
    for name in ("different", "different steps"):
        assert world[name][0] == "OurError: rank 0: no\nrank 2: a.json: cut"
        assert pair[name][0] == "OurError: rank 2: no\nrank 0: a.json: cut"
    assert world["different, unnamed"][0] == "OurError: no\na.json: cut"
    assert world["counted"] == {"no": [0], "a.json: cut": [2]}


@pytest.mark.distributed
def test_an_exception_that_nobody_expected_ends_all_ranks_too_and_is_no_input_error(seen) -> None:
    world, _, _ = seen[0]
    assert world["surprise"][0] == "RuntimeError: rank 2: KeyError: 'x'"
    assert world["surprise and error"][0] == "RuntimeError: rank 0: y\nrank 2: KeyError: 'x'"


@pytest.mark.distributed
def test_small_values_take_one_exchange_and_large_ones_no_more_bytes_than_they_have(seen) -> None:
    for _, _, (small, one_large, all_large) in seen:
        assert small[0] == [0, 9, 400] and len(small[1]) == 1
        assert one_large[0] == [0, 100_000, 0]
        assert one_large[1][1] < 101_000  # not 3 x 100,000
        assert all_large[0] == [90_000, 100_000, 80_000]
        assert 300_000 <= all_large[1][1] < 301_000
