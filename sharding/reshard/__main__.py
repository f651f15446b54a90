"""The table of bytes that the reshard moves, for models given by their shapes alone.

    python -m sharding.reshard                                      # Qwen2.5 of 7B, 32B and 72B
    python -m sharding.reshard models/mine/config.json --shard_ranks 16

Prints Markdown: for every rollout TP size, with FSDP's dim-0 shards and with
parallel.align_to_rollout, what a rank receives beside a full all-gather. Needs no weights, no
processes and no device.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sharding.dims import ParallelDims
from sharding.heads import Heads
from sharding.layout import FAMILIES, role_of, split_problems, tp_layouts, view_2d
from sharding.reshard.exchange import topology_of
from sharding.reshard.geometry import Source
from sharding.reshard.plan import MIB, ReshardPlan, make_plan

Config = Mapping[str, Any]
SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    "vocab_size",
)
"""keys of a config.json that the shapes are made of"""


def _qwen2_5(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> Config:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    }


QWEN2_5 = {
    "Qwen2.5-7B": _qwen2_5(3584, 28, 28, 4, 18944),
    "Qwen2.5-32B": _qwen2_5(5120, 64, 40, 8, 27648),
    "Qwen2.5-72B": _qwen2_5(8192, 80, 64, 8, 29568),
}


def decoder_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Parameter shapes of a model of the layout tables, in the order of the modules."""
    hidden, vocabulary = config["hidden_size"], (config["vocab_size"], config["hidden_size"])
    layer = dict(_layer_shapes(config))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": vocabulary}
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = vocabulary
    return shapes


def _layer_shapes(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = config["hidden_size"], Heads.of(config)
    q, kv = heads.query * heads.dim, heads.kv * heads.dim
    qwen2 = config["model_type"] == "qwen2"  # always a bias on q, k and v, never on o
    for name, rows in (("q", q), ("k", kv), ("v", kv)):
        yield f"self_attn.{name}_proj.weight", (rows, hidden)
        if qwen2 or config.get("attention_bias"):
            yield f"self_attn.{name}_proj.bias", (rows,)
    yield "self_attn.o_proj.weight", (hidden, q)
    if config.get("attention_bias") and not qwen2:
        yield "self_attn.o_proj.bias", (hidden,)
    for name in ("gate", "up"):
        yield f"mlp.{name}_proj.weight", (config["intermediate_size"], hidden)
    yield "mlp.down_proj.weight", (hidden, config["intermediate_size"])
    for name in FAMILIES[config["model_type"]].norms:
        yield f"{name}.weight", (heads.dim if name.startswith("self_attn.") else hidden,)


def model_plan(
    config: Config, dims: ParallelDims, *, aligned: bool, bucket_mib: float = 512
) -> ReshardPlan:
    """The plan in bfloat16 for SGLang; ``aligned`` as ``parallel.align_to_rollout``.

    Raises ValueError where the engine cannot split the model over ``dims.rollout_tp`` ranks.
    """
    shapes = decoder_shapes(config)
    layouts = tp_layouts(shapes, config, tp=dims.rollout_tp, style="sglang")
    assert layouts is not None, config["model_type"]
    family, num_shards = FAMILIES[config["model_type"]], dims.shard_size
    sources = []
    for name, shape in shapes.items():
        split = aligned and role_of(name, family) == "row_parallel" and not shape[1] % num_shards
        sources.append(Source(name, *view_2d(shape), int(split)))
    return make_plan(
        sources,
        layouts,
        topology_of(dims.shard_rows()[0], dims),
        itemsize=2,
        bucket_bytes=int(bucket_mib * MIB),
    )


def table(configs: Mapping[str, Config], *, shard_ranks: int, bucket_mib: float) -> Iterator[str]:
    """Lines of the Markdown table; the ranks of the shard group are those of one node."""
    yield (
        "| model (bf16) | F | T | FSDP shards | received per rank | of the model "
        "| full all-gather | fewer bytes | buckets |"
    )
    yield "|---|--:|--:|---|--:|--:|--:|--:|--:|"
    for name, config in configs.items():
        for tp in (t for t in (1, 2, 4, 8) if shard_ranks % t == 0):
            if split_problems(config, tp):
                continue
            dims = ParallelDims(world_size=shard_ranks, ranks_per_node=shard_ranks, rollout_tp=tp)
            for aligned in (False, True) if tp > 1 else (False,):
                plan = model_plan(config, dims, aligned=aligned, bucket_mib=bucket_mib)
                yield _row(name, plan, tp, "aligned" if aligned else "dim 0")


def _row(name: str, plan: ReshardPlan, tp: int, placement: str) -> str:
    received, full = int(plan.received_bytes().max()), plan.full_gather_bytes
    assert (plan.received_bytes() == plan.lower_bound_bytes()).all()
    return (
        f"| {name} ({plan.model_bytes / 2**30:.1f} GiB) | {plan.topology.size} | {tp} "
        f"| {placement} | {received / MIB:,.1f} MiB | {received / plan.model_bytes:.3%} "
        f"| {full / MIB:,.0f} MiB | {full / received:,.1f}x | {len(plan.buckets)} |"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command; a file that is no known model's config.json is one message and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m sharding.reshard",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("configs", nargs="*", type=Path, help="config.json files of known models")
    parser.add_argument("--shard_ranks", type=int, default=8, help="F, ranks of one node (8)")
    parser.add_argument("--bucket_mib", type=float, default=512, help="send and receive (512)")
    options = parser.parse_args(arguments)
    try:
        configs = {path.resolve().parent.name: _read(path) for path in options.configs}
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    for line in table(
        configs or QWEN2_5, shard_ranks=options.shard_ranks, bucket_mib=options.bucket_mib
    ):
        sys.stdout.write(line + "\n")


def _read(path: Path) -> Config:
    """A config.json of a family that has a layout. Raises ValueError."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: is not JSON: {error}") from error
    family = config.get("model_type") if isinstance(config, dict) else None
    if family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ValueError(f"{path}: model_type {family!r} has no layout; these have: {known}")
    missing = [name for name in SIZES if not isinstance(config.get(name), int)]
    if missing:
        raise ValueError(f"{path}: {', '.join(missing)} must be whole numbers")
    return config


if __name__ == "__main__":
    main()
