"""The trainer's side of a weight update: buckets of the reshard become payloads for SGLang.

A payload is one flat tensor with the table of what lies where; ppo/engines/sglang/loader.py reads
it. Every rank of a rollout group sends its own tensor-parallel slice. Must not know generation, nor
in which process the engine is.

Communication: the buckets are collective over the shard group. A rank that has failed takes part to
the end, so that nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ppo.engines.sglang.executor import Update
from sharding.layout import tp_layout
from sharding.mesh import Mesh
from sharding.reshard.checksums import Checksums
from sharding.reshard.full_tensors import FullTensors
from sharding.reshard.resharder import Resharder
from sharding.reshard.shards import named_shards, sent_shapes

MOST_PROBLEMS = 5
T = TypeVar("T")


class Parcel(NamedTuple):
    """What a worker gets at once: ``flat`` with a table of what lies where."""

    entries: list[list]
    zeros: list[list]
    flat: Tensor


class WeightSync:
    """Streams an FSDP2 module into the engine of this rank's rollout group, and checks it.

    Architectures that sharding/layout.py does not know are sent whole under their checkpoint names,
    for the engine's own loader to slice. Construction is collective over all ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        *,
        num_ids: int,
        dtype: torch.dtype,
        bucket_mib: float,
    ):
        """num_ids: rows of embedding and head that the engine has."""
        self.mesh = mesh
        self.differing: list[str] = []
        """what the last checked run found to differ in this rank's slice"""
        options: dict[str, Any] = {
            "dtype": dtype,
            "bucket_mib": bucket_mib,
            "rows": vocabulary_rows(module, num_ids),
        }
        hf_config: Any = module.config
        shapes = sent_shapes(module, options["rows"])
        tp, config = mesh.dims.rollout_tp, hf_config.to_dict()
        known = tp_layout(config["model_type"], shapes, config, tp=tp, tp_rank=0, style="sglang")
        self.source: Resharder | FullTensors
        self.style = "full" if known is None else "slices"
        if known is not None:
            self.source = Resharder(module, mesh, style="sglang", hf_config=config, **options)
        else:
            self.source = FullTensors(module, mesh, **options)

    def run(
        self,
        update: AbstractContextManager[Update],
        *,
        action: Literal["load", "verify"],
        checked: bool = False,
    ) -> list[str]:
        """Send all weights to be loaded, or compared.

        ``checked`` compares checksums after loading and fills ``differing``; there are none on the
        generic path. Returns what went wrong on this rank.
        """
        problems: list[str] = []
        slices = self.source if isinstance(self.source, Resharder) else None
        sums = Checksums(slices.layout) if checked and slices else None
        with update as engine:
            _try(engine.begin, problems)
            nothing = Parcel([], [], torch.zeros(1, dtype=torch.uint8, device=self.mesh.device))
            for stage, parcel in self._stages(nothing, sums):
                instruction = {
                    "action": action,
                    "stage": stage,
                    "style": self.style,
                    "entries": parcel.entries,
                    "zeros": parcel.zeros,
                    "checksums": sums.expected() if sums is not None and stage == "end" else {},
                }
                answer = _try(partial(engine.send, instruction, parcel.flat), problems)
                answer = answer or {"error": "", "differing": []}
                if (text := answer["error"]) and len(problems) < MOST_PROBLEMS:
                    problems.append(f"SGLang cannot {action} weights: {text}")
                self.differing = answer["differing"]
                del parcel  # before the next one is made
            _try(engine.end, problems)
        return problems

    def _stages(self, nothing: Parcel, sums: Checksums | None) -> Iterator[tuple[str, Parcel]]:
        yield "begin", nothing
        source = self.source
        parcels = _sliced(source, sums) if isinstance(source, Resharder) else _whole(source)
        for parcel in parcels:
            yield "bucket", parcel
            del parcel  # before the next one is made, here as where it was sent
        yield "end", nothing

    def stats(self) -> dict[str, float]:
        """reshard/* of the last run on this rank."""
        return self.source.stats.metrics()


def _sliced(source: Resharder, sums: Checksums | None) -> Iterator[Parcel]:
    for bucket in source.buckets():
        if sums is not None:
            sums.add(bucket)
        entries = [list(entry) for entry in bucket.entries]
        yield Parcel(entries, [list(zero) for zero in bucket.zeros], bucket.flat)


def _whole(source: FullTensors) -> Iterator[Parcel]:
    for named in source.batches():
        flat = torch.cat([tensor.reshape(-1) for _, tensor in named])
        entries, offset = [], 0
        for name, tensor in named:
            entries.append([name, list(tensor.shape), offset])
            offset += tensor.numel()
        del named, tensor  # the next batch is assembled while these names stand
        yield Parcel(entries, [], flat)
        del flat


def _try(step: Callable[[], T], problems: list[str]) -> T | None:
    """What a step returns; its error joins the problems."""
    try:
        return step()
    except RuntimeError as error:
        problems.append(str(error))
        return None


def vocabulary_rows(module: Any, num_ids: int) -> dict[str, int]:
    """Names of embedding and head with the rows that are sent, where they have more."""
    parts = (module.get_input_embeddings(), module.get_output_embeddings())
    tensors = [t for part in parts for t in (part.weight, getattr(part, "bias", None))]
    whole = {id(tensor) for tensor in tensors if tensor is not None and len(tensor) > num_ids}
    return {name: num_ids for name, p in named_shards(module) if id(p) in whole}
