"""What a tensor-parallel engine holds, cut out of full tensors with torch operations.

The independent reference of the layout and reshard tests: it knows SGLang's fused parameters and
DTensor's chunks by torch.chunk and torch.cat, and nothing of sharding/.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

Tensors = dict[str, Tensor]


def hf_slices(full: Tensors, *, tp: int, tp_rank: int) -> Tensors:
    """DTensor's local tensors under base_model_tp_plan, with a column-parallel head."""
    out = {}
    for name, tensor in full.items():
        dim = _split_dim(name)
        if dim is not None:
            chunks = tensor.chunk(tp, dim)
            tensor = chunks[tp_rank] if tp_rank < len(chunks) else tensor.narrow(dim, 0, 0)
        out[name] = tensor
    return out


def _split_dim(name: str) -> int | None:
    if any(part in name for part in ("o_proj.weight", "down_proj.weight")):
        return 1
    column_parallel = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
    return 0 if any(part in name for part in column_parallel) else None


def sglang_slices(
    full: Tensors, *, heads: int, kv_heads: int, tp: int, tp_rank: int, split_embedding: bool = True
) -> Tensors:
    """SGLang's fused local parameters on a GPU engine."""
    out: Tensors = {}
    for name, tensor in full.items():
        if "q_proj" in name:
            kv = [full[name.replace("q_proj", other)] for other in ("k_proj", "v_proj")]
            parts = [_heads(tensor, heads, tp, tp_rank)]
            parts += [_heads(part, kv_heads, tp, tp_rank) for part in kv]
            out[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif "gate_proj" in name:
            both = (tensor, full[name.replace("gate_proj", "up_proj")])
            fused = torch.cat([part.chunk(tp)[tp_rank] for part in both])
            out[name.replace("gate_proj", "gate_up_proj")] = fused
        elif "o_proj.weight" in name or "down_proj.weight" in name:
            out[name] = tensor.chunk(tp, 1)[tp_rank]
        elif "lm_head" in name or ("embed_tokens" in name and split_embedding):
            out[name] = _vocabulary(tensor, tp, tp_rank)
        elif not any(part in name for part in ("k_proj", "v_proj", "up_proj")):
            out[name] = tensor
    return out


def _heads(tensor: Tensor, heads: int, tp: int, tp_rank: int) -> Tensor:
    """The rank's heads; with fewer heads than ranks, each is on several neighbours."""
    by_head = tensor.unflatten(0, (heads, -1))
    if heads < tp:
        by_head = by_head.repeat_interleave(tp // heads, 0)
    return by_head.chunk(tp)[tp_rank].flatten(0, 1)


def _vocabulary(tensor: Tensor, tp: int, tp_rank: int) -> Tensor:
    """Zeros until the rows are a multiple of 64 that tp divides, then equal parts."""
    padding = 64
    if (-(-len(tensor) // 64) * 64) % tp:
        padding = 64 * tp
    return pad(tensor, (0, 0, 0, -len(tensor) % padding)).chunk(tp)[tp_rank]
