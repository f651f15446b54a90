"""The weight loader: what happens to the engine's model in a weight update.

`follow` does it where the model is in this process. In SGLang's workers `load` calls it, which is
named in `custom_weight_loader`; SGLang calls it once for every payload, which is [(instruction as
JSON, flat tensor), ("result", uint8 tensor)]. An exception there would kill the engine: errors
travel back as text.
Owns: copying into the engine's parameters, zero padding, derived buffers, finding parameters that
nothing was written to, and comparing instead of copying.

Must not know: training, who sends.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sharding.reshard.checksums import checksum

# Bit patterns that no computation makes: signalling NaNs with this payload. A session fills the
# parameters with them, so that what nothing was written to can be told at its end.
UNWRITTEN = {2: (torch.int16, 0x7FA5), 4: (torch.int32, 0x7FA5A5A5)}
CUT = 1 << 24  # elements looked at once
EMPTY = torch.empty(0, dtype=torch.uint8)
MOST_NAMED = 5
MOST_OF_A_NAME = 500


class LoadError(ValueError):
    """A payload that does not fit the engine's model."""


def load(model: nn.Module, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Follow one instruction in a worker, and write the answer into the result tensor."""
    (text, flat), (_, result) = named_tensors
    answer = follow(model, text, flat)
    result.zero_()
    encoded = list(_within(answer, result.numel()))
    result[: len(encoded)] = torch.tensor(encoded, dtype=torch.uint8, device=result.device)
    if result.is_cuda:
        torch.cuda.synchronize(result.device)  # nothing else waits before the sender goes on


def follow(model: nn.Module, said: dict[str, Any] | str, flat: Tensor) -> dict[str, Any]:
    """Follow one instruction, given as it is or as JSON; never raises.

    The answer is {"error": text, "differing": parameters whose checksum is another}.

    An instruction is {"action": "load" | "verify", "stage": "begin" | "bucket" | "end", "style":
    "slices" | "full", "entries": [...], "zeros": [...], "checksums": {...}}. Entries of "slices"
    are [parameter, first row, first column, rows, columns, offset into the flat tensor], in the 2-D
    view of the parameter; zeros the same without offset; entries of "full" are [checkpoint name,
    shape, offset]. Checksums come with stage "end", by parameter.
    """
    answer: dict[str, Any] = {"error": "", "differing": []}
    try:
        instruction = json.loads(said) if isinstance(said, str) else said
        answer["error"] = _follow(model, instruction, flat)
        answer["differing"] = _differing(model, instruction["checksums"])
    except Exception as error:  # anything uncaught kills a scheduler, and with it the engine
        answer["error"] = f"{type(error).__name__}: {error}"
    return answer


def _within(answer: dict[str, Any], limit: int) -> bytes:
    while len(encoded := json.dumps(answer).encode()) > limit:
        error, names = answer["error"], answer["differing"]
        names = [name[:MOST_OF_A_NAME] for name in names[: max(1, len(names) // 2)]]
        answer = {"error": error[: len(error) // 2], "differing": names}
    return encoded


@torch.no_grad()
def _follow(model: nn.Module, instruction: dict[str, Any], flat: Tensor) -> str:
    """What went wrong, or nothing."""
    stage = instruction["stage"]
    if instruction["action"] == "verify":
        compare = _compare_full if instruction["style"] == "full" else _compare_slices
        return compare(model, stage, instruction, flat)
    if stage == "begin":
        _widen(model)
        _mark_unwritten(model)
    elif stage == "end":
        _refresh_derived_buffers(model)
        return _unwritten(model)
    elif instruction["style"] == "full":
        _load_weights(model, _tensors(instruction["entries"], flat))
    else:
        for _, target, values in _slices(model, instruction, flat):
            target.copy_(values)
    return ""


def _differing(model: nn.Module, checksums: dict[str, int]) -> list[str]:
    parameters = dict(model.named_parameters())
    return [
        name
        for name, expected in checksums.items()
        if name not in parameters or checksum(parameters[name]).item() != expected
    ]


def _load_weights(model: Any, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Every model class of SGLang's has this."""
    model.load_weights(tensors)


def _tensors(entries: list[list], flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    for name, shape, offset in entries:
        yield name, flat[offset : offset + math.prod(shape)].view(shape)


def _slices(
    model: nn.Module, instruction: dict[str, Any], flat: Tensor
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(where, the rectangle of the engine's parameter, what belongs there) of every entry."""
    parameters = dict(model.named_parameters())
    for name, row, column, rows, columns, offset in instruction["entries"]:
        target = _rectangle(parameters, name, row, column, rows, columns)
        if target.dtype != flat.dtype:
            raise LoadError(f"{name}: sent as {flat.dtype}, the engine holds {target.dtype}")
        values = flat[offset : offset + rows * columns].view(rows, columns)
        yield f"{name} from [{row}, {column}]", target, values
    for name, row, column, rows, columns in instruction["zeros"]:
        target = _rectangle(parameters, name, row, column, rows, columns)
        yield f"padding of {name} from [{row}, {column}]", target, torch.zeros_like(target)


def _rectangle(
    parameters: dict[str, nn.Parameter], name: str, row: int, column: int, rows: int, columns: int
) -> Tensor:
    if name not in parameters:
        raise LoadError(f"the engine has no parameter {name}")
    whole = parameters[name].data
    whole = whole.view(whole.shape[0], -1)
    if row + rows > whole.shape[0] or column + columns > whole.shape[1]:
        raise LoadError(
            f"{name}: rows {row}..{row + rows} and columns {column}..{column + columns} do not lie "
            f"inside the engine's {tuple(whole.shape)}"
        )
    return whole[row : row + rows, column : column + columns]


def _widen(model: nn.Module) -> None:
    """Make all of a float32 model float32, on a CPU: some layers are made in half precision
    whatever the engine computes in (xIELU of Apertus), which would round what is sent.

    On a GPU captured graphs hold the old memory.
    """
    floats = [t for t in model.state_dict().values() if t.is_floating_point() and not t.is_cuda]
    if max(floats, key=Tensor.numel, default=EMPTY).dtype != torch.float32:
        return
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and tensor.dtype in (torch.bfloat16, torch.float16):
                tensor.data = tensor.data.float()


def _mark_unwritten(model: nn.Module) -> None:
    for _, bits, pattern in _bit_views(model):
        bits.fill_(pattern)


def _unwritten(model: nn.Module) -> str:
    names = []
    for name, bits, pattern in _bit_views(model):
        missing = sum(int((cut == pattern).sum()) for cut in bits.view(-1).split(CUT))
        if missing:
            names.append(f"{name} ({missing} of {bits.numel()} elements)")
    return "never written in the engine: " + _few(names) if names else ""


def _bit_views(model: nn.Module) -> Iterator[tuple[str, Tensor, int]]:
    """Of all that a checkpoint holds, buffers too: SGLang has put random numbers into it."""
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and tensor.element_size() in UNWRITTEN:
            dtype, pattern = UNWRITTEN[tensor.element_size()]
            yield name, tensor.view(dtype), pattern


def _refresh_derived_buffers(model: nn.Module) -> None:
    """Gemma's norms keep 1 + weight beside weight; SGLang refreshes it only in its own loader."""
    for module in model.modules():
        refresh = getattr(module, "refresh_gemma_weight", None)
        if refresh is not None:
            refresh()


def _compare_slices(model: nn.Module, stage: str, instruction: dict[str, Any], flat: Tensor) -> str:
    if stage == "begin":
        return ""
    if stage == "bucket":
        pairs = _slices(model, instruction, flat)
        return _few([text for pair in pairs if (text := _difference(*pair))])
    found = []
    for name, module in model.named_modules():
        derived, weight = (getattr(module, key, None) for key in ("gemma_weight", "weight"))
        if isinstance(derived, Tensor) and isinstance(weight, Tensor):
            found.append(_difference(f"{name}.gemma_weight", derived, weight + 1.0))
    return _few([text for text in found if text])


# Between the "begin" and the "end" of one comparison: SGLang calls `load` by its name, with nothing
# in between but this process, which has one model and one update at a time.
_before: dict[str, Tensor] = {}


def _compare_full(model: nn.Module, stage: str, instruction: dict[str, Any], flat: Tensor) -> str:
    """What the model's own loader makes of the tensors is what it must hold already.

    By checksums: a copy of the weights to compare with would be memory that nobody has planned.
    """
    if stage == "begin":
        _before.clear()  # of a comparison that was given up
        _before.update(_checksums(model))
        return ""
    if stage == "bucket":
        _load_weights(model, _tensors(instruction["entries"], flat))
        return ""
    sums = _checksums(model)
    found = [name for name, held in _before.items() if not torch.equal(held, sums[name])]
    _before.clear()
    return f"it held something else than the trainer in {_few(found)}" if found else ""


def _checksums(model: nn.Module) -> dict[str, Tensor]:
    return {name: checksum(tensor) for name, tensor in model.state_dict().items()}


def _difference(where: str, held: Tensor, sent: Tensor) -> str:
    """Names the first element that is not the same and both values; empty when all are."""
    if torch.equal(held, sent):
        return ""
    differs = (held != sent).nonzero()  # a NaN differs from itself: that is worth a report too
    first = tuple(int(index) for index in differs[0])
    return (
        f"{where} at {list(first)}: engine {held[first].item():.9g}, trainer "
        f"{sent[first].item():.9g} ({len(differs)} of {held.numel()} elements differ)"
    )


def _few(texts: list[str]) -> str:
    more = f" and {len(texts) - MOST_NAMED} more" if len(texts) > MOST_NAMED else ""
    return "; ".join(texts[:MOST_NAMED]) + more
