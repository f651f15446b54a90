"""Layers that carry a state from token to token, over packed documents: each document alone.

Mamba, linear attention and short convolutions run along the row, where no mask keeps one document
from the next. Owns which parts of a layer those are, and how they are called: once for all
documents of one length, stacked, with whatever kernel transformers has for them. All other parts
(attention, MLP, experts, norms) see the packed row. Must not know what such a part computes.

Letters: N tokens of the row, D documents.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ppo.models.packed.attention import Documents, make_documents
from sharding.fsdp import transformer_layers

# Linear attention without a convolution (MiniMax).
_CLASSES = ("LightningAttention",)


@dataclass
class _Row:
    """What the parts of one layer are told of the row that the layer sees."""

    documents: Documents | None = None


def stateful_parts(module: Any) -> list[tuple[nn.Module, list[nn.Module]]]:
    """Layers of a transformer with their parts that carry a state; layers without one left out."""
    try:
        layers = transformer_layers(module)
    except ValueError:
        return []
    found = [(layer, [part for part in layer.children() if _carries(part)]) for layer in layers]
    return [(layer, parts) for layer, parts in found if parts]


def _carries(part: nn.Module) -> bool:
    return any(
        isinstance(inner, nn.Conv1d) or type(inner).__name__.endswith(_CLASSES)
        for inner in part.modules()
    )


def see_documents_alone(module: Any) -> None:
    """Make the stateful parts of a model take packed rows. Before its layers are checkpointed, so
    that a forward that is run again is told of its row again."""
    for layer, parts in stateful_parts(module):
        row = _Row()
        for part in parts:
            part.forward = partial(_each_alone, part.forward, row)
        layer.forward = partial(_tell, layer.forward, row)


def _tell(
    forward: Callable[..., Any],
    row: _Row,
    *args: Any,
    documents: Documents | None = None,
    **kwargs: Any,
) -> Any:
    row.documents = documents
    return forward(*args, documents=documents, **kwargs)


@torch.compiler.disable  # which documents there are is new in every micro-batch
def _each_alone(forward: Callable[..., Any], row: _Row, *args: Any, **kwargs: Any) -> Any:
    """`forward` of a part: tensors [1, N, ...] among its arguments are cut into documents, and what
    it returns is put together again."""
    documents = row.documents
    if documents is None or len(documents.lengths) < 2 or not _is_packed(args, kwargs, documents):
        return forward(*args, **kwargs)
    outputs: list[Any] = [None] * len(documents.lengths)
    for length in dict.fromkeys(documents.lengths):
        chosen = [i for i, other in enumerate(documents.lengths) if other == length]
        cut = partial(_cut, documents=documents, chosen=chosen)
        output = forward(*map(cut, args), **{name: cut(value) for name, value in kwargs.items()})
        for place, index in enumerate(chosen):
            outputs[index] = _row_of(output, place)
    return _joined(outputs)


def _is_packed(args: Sequence[Any], kwargs: dict[str, Any], documents: Documents) -> bool:
    """Whether the row is one (right-padded rows are alone already)."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    return bool(tensors) and tensors[0].shape[:2] == (1, sum(documents.lengths))


def _cut(value: Any, documents: Documents, chosen: Sequence[int]) -> Any:
    """The chosen documents of an argument, stacked: [1, N, ...] -> [D, length, ...]."""
    if isinstance(value, tuple):  # tables of rotary embeddings
        return tuple(_cut(member, documents, chosen) for member in value)
    if isinstance(value, Documents):
        lengths = torch.tensor([0] + [documents.lengths[i] for i in chosen])
        return make_documents(lengths.cumsum(0), documents.bounds.device, documents.kernel)
    if not isinstance(value, Tensor) or value.shape[:2] != (1, sum(documents.lengths)):
        return value
    parts = value.split(documents.lengths, 1)
    return torch.cat([parts[i] for i in chosen])


def _row_of(output: Any, place: int) -> Any:
    if isinstance(output, tuple):
        return tuple(_row_of(member, place) for member in output)
    return output[place : place + 1] if isinstance(output, Tensor) else output


def _joined(outputs: Sequence[Any]) -> Any:
    first = outputs[0]
    if isinstance(first, tuple):
        return tuple(_joined(members) for members in zip(*outputs, strict=True))
    return torch.cat(list(outputs), 1) if isinstance(first, Tensor) else first
