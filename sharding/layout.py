"""Which slice of which parameter a tensor-parallel rank holds, per architecture, as data.

Owns the tables that map Hugging Face parameters onto the parameters of a rollout engine. Every
parameter is seen as a rectangle of its 2-D view [shape[0], prod(shape[1:])] (a vector is [n, 1]).
Must not know processes, devices, FSDP, or the engines that use it: names and integers only.

The "sglang" style follows SGLang 0.5.23: fused ``qkv_proj`` [q | k | v] and ``gate_up_proj``, kv
heads repeated when there are more ranks than kv heads (layers/linear.py), the vocabulary padded
(layers/vocab_parallel_embedding.py). The "hf" style keeps Hugging Face names and cuts as DTensor
does (``torch.chunk``), following ``base_model_tp_plan``.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, NamedTuple

from sharding.heads import Heads

Style = Literal["sglang", "hf"]
Shapes = Mapping[str, Sequence[int]]

VOCAB_PADDING = 64
"""Rows to whose multiple SGLang pads the vocabulary (DEFAULT_VOCAB_PADDING_SIZE)."""


class Region(NamedTuple):
    """A rectangle of parameter ``source`` and its place in the engine parameter ``target``."""

    source: str
    src_row: int
    src_col: int
    rows: int
    cols: int
    target: str
    dst_row: int
    dst_col: int


class Zero(NamedTuple):
    """A rectangle of ``target`` that no source fills and that the engine expects to be zero."""

    target: str
    row: int
    col: int
    rows: int
    cols: int


@dataclass(kw_only=True)
class Layout:
    """What one tensor-parallel rank holds; ``targets`` gives [rows, cols] of each parameter."""

    regions: list[Region] = field(default_factory=list)
    zeros: list[Zero] = field(default_factory=list)
    targets: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture: its norms inside a layer, and whether SGLang splits its input embedding."""

    norms: tuple[str, ...]
    vocab_parallel_embedding: bool = True


_PRE_NORM = ("input_layernorm", "post_attention_layernorm")
_QK_NORM = ("self_attn.q_norm", "self_attn.k_norm")
_GEMMA_NORM = (*_PRE_NORM, "pre_feedforward_layernorm", "post_feedforward_layernorm")

FAMILIES: dict[str, Family] = {
    "llama": Family(norms=_PRE_NORM),
    "mistral": Family(norms=_PRE_NORM),
    "qwen2": Family(norms=_PRE_NORM),
    "qwen3": Family(norms=_PRE_NORM + _QK_NORM),
    "gemma2": Family(norms=_GEMMA_NORM),
    # SGLang's Gemma 3 keeps a plain nn.Embedding on every rank (models/gemma3_causal.py).
    "gemma3_text": Family(norms=_GEMMA_NORM + _QK_NORM, vocab_parallel_embedding=False),
}

# Role of each linear layer: which slice of its weight a rank holds.
_LINEARS = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "row_parallel",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "row_parallel",
}
_FUSED = {
    "q": "qkv_proj",
    "k": "qkv_proj",
    "v": "qkv_proj",
    "gate": "gate_up_proj",
    "up": "gate_up_proj",
}
_LAYER = re.compile(r"model\.layers\.\d+\.(?P<module>.+)\.(?P<kind>weight|bias)")


def role_of(name: str, family: Family) -> str | None:
    """The role of a parameter in ``family``: a key of the slice rules, or None if it is unknown."""
    match = _LAYER.fullmatch(name)
    if match is None:
        outside = {"model.embed_tokens.weight": "embedding", "lm_head.weight": "head"}
        return "whole" if name == "model.norm.weight" else outside.get(name)
    if match["module"] in family.norms:
        return "whole"
    role = _LINEARS.get(match["module"])
    # The bias of a row-parallel layer is whole on every rank; rank 0 adds it.
    return "whole" if role == "row_parallel" and match["kind"] == "bias" else role


def tp_layout(
    model_type: str,
    shapes: Shapes,
    config: Mapping[str, Any],
    *,
    tp: int,
    tp_rank: int,
    style: Style,
) -> Layout | None:
    """Slices of rank ``tp_rank`` of ``tp`` for the parameters ``shapes`` of one model.

    ``config`` is the Hugging Face config as a dict. Returns None where the architecture, or one of
    its parameters, is not in the tables: such a model travels as full tensors. With one rank in the
    "hf" style every model is known. Raises ValueError where the engine cannot split the model.
    """
    if style == "hf" and tp == 1:
        return whole_layout(shapes)
    family = FAMILIES.get(model_type)
    if family is None or any(role_of(name, family) is None for name in shapes):
        return None
    layout = Layout()
    split = _Split.of(config, tp, tp_rank) if style == "sglang" else None
    for name, shape in shapes.items():
        role = role_of(name, family)
        assert role is not None
        if role == "embedding" and (style == "hf" or not family.vocab_parallel_embedding):
            role = "whole"
        if split is None:
            _add_hf(layout, name, role, view_2d(shape), tp, tp_rank)
        else:
            _add_sglang(layout, name, role, view_2d(shape), split)
    return layout


def tp_layouts(
    shapes: Shapes, config: Mapping[str, Any], *, tp: int, style: Style
) -> list[Layout] | None:
    """The layouts of all ranks; None where the architecture is unknown. Errors as tp_layout."""
    ranks = range(tp)
    kind = config["model_type"]
    layouts = [tp_layout(kind, shapes, config, tp=tp, tp_rank=t, style=style) for t in ranks]
    known = [layout for layout in layouts if layout is not None]
    return known if len(known) == tp else None


def whole_layout(shapes: Shapes) -> Layout:
    """Every parameter whole, under its own name."""
    layout = Layout()
    for name, shape in shapes.items():
        _add(layout, name, view_2d(shape), (0, 0), view_2d(shape), name)
    return layout


def view_2d(shape: Sequence[int]) -> tuple[int, int]:
    """[rows, cols] of the 2-D view of a shape; a scalar is [1, 1]."""
    return (shape[0], prod(shape[1:])) if len(shape) else (1, 1)


def row_parallel_weight(model_type: str) -> Callable[[str, Any], bool]:
    """Predicate (name, parameter) for ``parallel.align_to_rollout``: weights split by columns."""
    family = FAMILIES.get(model_type)
    return lambda name, parameter: (
        family is not None and parameter.ndim == 2 and role_of(name, family) == "row_parallel"
    )


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """(start, length) of one part as ``torch.chunk`` cuts: ceil-sized, the last ones shorter."""
    step = -(-size // parts)
    start = min(index * step, size)
    return start, min(step, size - start)


def _add(
    layout: Layout,
    source: str,
    size: tuple[int, int],
    at: tuple[int, int],
    target_size: tuple[int, int],
    target: str,
    dst_row: int = 0,
) -> None:
    layout.targets[target] = target_size
    if size[0] and size[1]:
        layout.regions.append(Region(source, *at, *size, target, dst_row, 0))


def _add_hf(
    layout: Layout, name: str, role: str, size: tuple[int, int], tp: int, tp_rank: int
) -> None:
    """One region by DTensor's chunks; the target is the local tensor of the same name."""
    at = (0, 0)
    if role == "row_parallel":
        start, length = chunk(size[1], tp, tp_rank)
        size, at = (size[0], length), (0, start)
    elif role != "whole":
        start, length = chunk(size[0], tp, tp_rank)
        size, at = (length, size[1]), (start, 0)
    _add(layout, name, size, at, size, name)


class _Split(NamedTuple):
    """How SGLang splits one model: row counts of the fused parameters on this rank."""

    tp: int
    tp_rank: int
    q_rows: int
    kv_rows: int
    kv_start: int
    intermediate: int

    @classmethod
    def of(cls, config: Mapping[str, Any], tp: int, tp_rank: int) -> "_Split":
        problems = split_problems(config, tp)
        if problems:
            raise ValueError("; ".join(problems))
        heads = Heads.of(config)
        copies = max(1, tp // heads.kv)  # ranks that hold the same kv head
        kv_rows = max(1, heads.kv // tp) * heads.dim
        return cls(
            tp=tp,
            tp_rank=tp_rank,
            q_rows=heads.query // tp * heads.dim,
            kv_rows=kv_rows,
            kv_start=tp_rank // copies * kv_rows,
            intermediate=config["intermediate_size"] // tp,
        )

    def fused_rows(self, role: str) -> tuple[int, int, int, int]:
        """(first row of the source, rows, first row in the fused parameter, its rows)."""
        q, kv, half = self.q_rows, self.kv_rows, self.intermediate
        return {
            "q": (self.tp_rank * q, q, 0, q + 2 * kv),
            "k": (self.kv_start, kv, q, q + 2 * kv),
            "v": (self.kv_start, kv, q + kv, q + 2 * kv),
            "gate": (self.tp_rank * half, half, 0, 2 * half),
            "up": (self.tp_rank * half, half, half, 2 * half),
        }[role]


def split_problems(config: Mapping[str, Any], tp: int) -> list[str]:
    """What keeps SGLang from splitting a model over ``tp`` ranks, one sentence per reason."""
    query, kv, _ = Heads.of(config)
    size, problems = config["intermediate_size"], []
    if query % tp:
        problems.append(f"tensor_model_parallel_size {tp} does not divide {query} attention heads")
    if kv % tp and tp % kv:
        problems.append(
            f"tensor_model_parallel_size {tp} neither divides nor is a multiple of {kv} kv heads"
        )
    if size % tp:
        problems.append(f"tensor_model_parallel_size {tp} does not divide intermediate_size {size}")
    return problems


def _add_sglang(layout: Layout, name: str, role: str, size: tuple[int, int], split: _Split) -> None:
    rows, cols = size
    if role in ("embedding", "head"):
        _add_vocabulary(layout, name, size, split)
    elif role == "whole":
        _add(layout, name, size, (0, 0), size, name)
    elif role == "row_parallel":
        width = cols // split.tp
        _add(layout, name, (rows, width), (0, split.tp_rank * width), (rows, width), name)
    else:
        start, length, dst_row, total = split.fused_rows(role)
        module, kind = name.rsplit(".", 1)
        target = f"{module.rsplit('.', 1)[0]}.{_FUSED[role]}.{kind}"
        _add(layout, name, (length, cols), (start, 0), (total, cols), target, dst_row)


def _add_vocabulary(layout: Layout, name: str, size: tuple[int, int], split: _Split) -> None:
    """Equal slices of the padded vocabulary; rows that no token has are zero."""
    rows, cols = size
    per_rank = padded_vocabulary(rows, split.tp) // split.tp
    start = min(split.tp_rank * per_rank, rows)
    length = min(per_rank, rows - start)
    _add(layout, name, (length, cols), (start, 0), (per_rank, cols), name)
    if length < per_rank:
        layout.zeros.append(Zero(name, length, 0, per_rank - length, cols))


def padded_vocabulary(rows: int, tp: int) -> int:
    """Rows of the padded vocabulary: a multiple of 64, or of 64 * tp if tp does not divide it."""
    padded = -(-rows // VOCAB_PADDING) * VOCAB_PADDING
    multiple = VOCAB_PADDING if padded % tp == 0 else VOCAB_PADDING * tp
    return -(-rows // multiple) * multiple
