"""How ranks tell each other plain values, and how an error of one becomes an error of all.

Owns the exchange of Python objects over a host group. Must not know what the ranks were doing.
Everything here is collective: all ranks of the group call it in the same order, whatever happened
to them, because a rank that stays away leaves the others waiting.

Errors travel as text: an exception may not survive pickling, and a rank that fails to send its own
would be the one that stays away.
"""

import logging
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")
Error = BaseException | str | Sequence[str] | None
"""What is wrong on this rank: an exception, its text, several texts, or nothing."""
SMALL = 504
"""bytes of a pickled value that fit into the first exchange"""


def gather(value: T, group: ProcessGroup) -> list[T]:
    """The value of every rank of the group, in its order. `value` must survive pickling.

    One collective where all values are small: the time of one grows with the ranks. Large ones take
    a second, which sends the sum of their sizes twice or the largest once for each rank, whichever
    is less; torch's all_gather_object always does the latter, though often few ranks have much.
    """
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    head = torch.zeros(8 + SMALL, dtype=torch.uint8)
    head[:8].view(torch.int64)[0] = data.numel()
    head[8 : 8 + data.numel()] = data[:SMALL]
    heads = _gather_rows(head, group)
    sizes = heads[:, :8].clone().view(torch.int64)[:, 0].tolist()
    if max(sizes) <= SMALL:
        parts: Iterable[Tensor] = (row[8:][:size] for row, size in zip(heads, sizes, strict=True))
    else:
        parts = _gather_large(data, sizes, group)
    return [pickle.loads(part.numpy().tobytes()) for part in parts]


def _gather_rows(row: Tensor, group: ProcessGroup) -> Tensor:
    rows = row.new_empty(dist.get_world_size(group), row.numel())
    dist.all_gather(list(rows.unbind()), row, group=group)
    return rows


def _gather_large(data: Tensor, sizes: Sequence[int], group: ProcessGroup) -> Iterable[Tensor]:
    largest, ends = max(sizes), list(accumulate(sizes, initial=0))
    if 2 * ends[-1] >= len(sizes) * largest:
        padded = torch.zeros(largest, dtype=torch.uint8)
        padded[: data.numel()] = data
        return [row[:size] for row, size in zip(_gather_rows(padded, group), sizes, strict=True)]
    whole = torch.zeros(ends[-1], dtype=torch.uint8)
    start = ends[dist.get_rank(group)]
    whole[start : start + data.numel()] = data
    dist.all_reduce(whole, group=group)  # every byte is one rank's; the others add zero
    return whole.split(sizes)  # pyright: ignore[reportArgumentType]


def gather_to_first(value: T, group: ProcessGroup) -> list[T] | None:
    """The same on the first rank of the group alone; None on the others."""
    values = [value] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    dist.gather_object(value, values, group=group, group_dst=0)
    return values


def errors_by_rank(error: Error, group: ProcessGroup) -> dict[str, list[int]]:
    """Each different error of the group once, with the (global) ranks that have it."""
    return _by_rank(gather(_texts(error), group), group)


def raise_everywhere(
    error: Error,
    group: ProcessGroup,
    kind: Callable[[str], Exception] = RuntimeError,
    *,
    name_ranks: bool = True,
) -> None:
    """Raise `kind` on every rank of the group if any has an error, with the text of each.

    name_ranks: false where the same is wrong for all, such as a file that each of them reads.
    """
    if found := errors_by_rank(error, group):
        cause = error if isinstance(error, BaseException) else None
        raise kind(_message(found, name_ranks)) from cause


def together(
    step: Callable[[], T],
    group: ProcessGroup,
    kind: Callable[[str], Exception] = RuntimeError,
    *,
    expected: type[Exception] | tuple[type[Exception], ...] = RuntimeError,
    name_ranks: bool = True,
) -> list[T]:
    """What `step` returns on every rank, in the order of the group.

    Raises on all ranks what it raises on any: `kind` for an `expected` exception, RuntimeError with
    the name of the exception for another one. Its traceback is in the log of the rank that had it.
    """
    value, error, surprise = None, None, False
    try:
        value = step()
    except Exception as exception:  # raised again below, on every rank
        logger.debug("raised on every rank", exc_info=True)
        error, surprise = exception, not isinstance(exception, expected)
    texts = [f"{type(error).__name__}: {error}"] if surprise else _texts(error)
    told = gather((value, texts, surprise), group)
    if found := _by_rank([texts for _, texts, _ in told], group):
        is_surprise = any(surprise for _, _, surprise in told)
        message = _message(found, name_ranks or is_surprise)
        raise (RuntimeError if is_surprise else kind)(message) from error
    return [value for value, _, _ in told]  # pyright: ignore[reportReturnType]


def _texts(error: Error) -> list[str]:
    if error is None:
        return []
    if isinstance(error, BaseException):
        return [str(error) or repr(error)]
    return [error] if isinstance(error, str) else list(error)


def _by_rank(texts: Sequence[Sequence[str]], group: ProcessGroup) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, own in zip(dist.get_process_group_ranks(group), texts, strict=True):
        for text in own:
            ranks.setdefault(text, []).append(rank)
    return ranks


def _message(found: Mapping[str, Sequence[int]], name_ranks: bool) -> str:
    """One error a line; one that names its rank already is not given it twice."""
    if not name_ranks:
        return "\n".join(found)
    named = {
        text: f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: "
        for text, ranks in found.items()
    }
    return "\n".join(text if text.startswith(who) else who + text for text, who in named.items())
