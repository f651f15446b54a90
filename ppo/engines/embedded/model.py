"""The embedded engine's model: a Hugging Face causal LM whose weights come and go.

Owns the module, its tensor-parallel placement (DTensor, from the model's own base_model_tp_plan),
the memory of its weights, which kind of cache serves it, and the forward that turns tokens into
logits. Must not know requests, sampling, or how a bucket of weights was exchanged.
"""

import copy
import fnmatch
import inspect
import re
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ppo.engines.embedded.cohorts import CohortCache, Part, Parts
from ppo.engines.embedded.kv_cache import KVCache, Step, cached_attention
from ppo.errors import InputError
from sharding.fsdp import local_shard
from sharding.layout import FAMILIES, view_2d
from sharding.names import (
    compute_buffers,
    non_persistent_buffers,
    parameter_names,
    set_parameter,
)
from sharding.reshard.plan import Entry
from sharding.reshard.resharder import Bucket

_ATTENTION = "ppo_kv_cache"  # HF makes no masks for a name it does not know
CacheKind = Literal["own", "transformers", "none"]
"""kv_cache.py; transformers' own, by cohorts (cohorts.py); none: every token reads all before it"""
_KINDS = {"full_attention", "sliding_attention"}  # of layers that kv_cache.py knows


class LocalModel:
    """This rank's slice of the model; parameters have storage between `allocate` and `free`."""

    def __init__(
        self,
        hf_config: PretrainedConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        tp_mesh: DeviceMesh | None,
        num_ids: int,
        buffers: Mapping[str, Tensor],
        cache: CacheKind = "own",
        trust_remote_code: bool = False,
    ):
        """
        Args:
            num_ids: ids that have a logit, from 0 on.
            tp_mesh: ranks of a rollout group, if any.
            buffers: the trainer's, by name; no gradient reaches them, so they stay.
            cache: what serves it.

        Raises InputError for a model that cannot be split, or that takes no cache.
        """
        self.device, self.num_ids, self._cache = device, num_ids, cache
        self.module = _build(hf_config, dtype, trust_remote_code, ours=cache == "own")
        self._cache_name = _cache_name(self.module, cache)
        self._names = parameter_names(self.module)
        _fill_buffers(self.module, device, buffers)
        if tp_mesh is not None and tp_mesh.size() > 1:
            _parallelize(self.module, tp_mesh)
        self._missing: dict[str, int] = {}
        self._last: Tensor | None = None
        _output_head(self.module).register_forward_pre_hook(self._select_last, prepend=True)

    def allocate(self) -> None:
        """Gives every parameter uninitialised storage on the device."""
        self._replace(self.device)
        self._missing = {name: local.numel() for name, local in self.parameters().items()}

    def free(self) -> None:
        """Drops the storage of all parameters; buffers stay."""
        self._replace(torch.device("meta"))
        self._missing = {}

    @torch.no_grad()
    def fill(self, bucket: Bucket) -> None:
        """Copies one bucket into the local slices; ValueError for a target that does not exist."""
        local = self.parameters()
        for entry, block in bucket.views():
            if entry.target not in local:
                raise ValueError(f"the engine's model has no parameter {entry.target}")
            _region(local[entry.target], entry).copy_(block)
            self._missing[entry.target] -= block.numel()

    def differences(self, bucket: Bucket) -> list[str]:
        """One sentence per block of a bucket that is not what the local slice holds."""
        local, found = self.parameters(), []
        for entry, block in bucket.views():
            held = _region(local[entry.target], entry)
            for row, col in (held != block).nonzero()[:1].tolist():
                found.append(
                    f"{entry.target}[{entry.dst_row + row}, {entry.dst_col + col}]: engine "
                    f"{held[row, col].item():g}, trainer {block[row, col].item():g}"
                )
        return found

    def check_filled(self) -> None:
        """RuntimeError that names parameters which were not written exactly once in full."""
        wrong = {name: missing for name, missing in self._missing.items() if missing}
        if wrong:
            listed = ", ".join(f"{name} ({missing} missing)" for name, missing in wrong.items())
            raise RuntimeError(f"weights not synchronised: {listed}")

    def make_cache(self, *, rows: int, columns: int) -> KVCache | CohortCache:
        """Room for at most `rows` rows of up to `columns` tokens, taken as it is used."""
        if self._cache == "own":
            return KVCache(rows=rows, columns=columns)
        config = self.module.config if self._cache == "transformers" else None
        return CohortCache(config, rows=rows, columns=columns)

    @torch.no_grad()
    def logits(
        self, input_ids: Tensor, step: Step | Parts, cache: Any, *, last: Tensor | None = None
    ) -> Tensor:
        """Logits [R, num_ids] that follow the tokens [R, q]: of index `last` [R] in each row, or of
        the only one. `step` is what `cache` has made for them. Identical on all ranks of the
        tensor-parallel group."""
        if isinstance(step, Parts):
            return torch.cat([self._part(input_ids[p.rows, : p.length], p) for p in step.parts])
        self._last = last
        output = self.module(
            input_ids=input_ids,
            position_ids=step.positions,
            use_cache=True,
            kv_step=step,
            **{self._cache_name: cache},
        )
        return output.logits[:, -1, : self.num_ids]

    def _part(self, input_ids: Tensor, part: Part) -> Tensor:
        """Logits [r, num_ids] behind tokens [r, q] of one cohort."""
        cohort = part.cohort
        if self._cache == "none":
            input_ids, cache = cohort.all_tokens(input_ids), {}
        else:
            cache = {self._cache_name: cohort.cache}
        rows, length = input_ids.shape
        self._last = torch.full((rows,), length - 1, device=input_ids.device)
        output = self.module(input_ids=input_ids, use_cache=bool(cache), **cache)
        return output.logits[:, -1, : self.num_ids]

    def _select_last(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Only the hidden states [R, 1, H] whose logits are wanted enter the head."""
        hidden, *rest = args
        if self._last is not None:
            rows = torch.arange(len(hidden), device=hidden.device)
            hidden = hidden[rows, self._last][:, None]
        return (hidden, *rest)

    def parameters(self) -> dict[str, Tensor]:
        """Local slice of every parameter, tied ones once."""
        named = self.module.named_parameters()
        return {name: local_shard(parameter) for name, parameter in named}

    def _replace(self, device: torch.device) -> None:
        for names in self._names:
            old = self.module.get_parameter(names[0])
            new = nn.Parameter(torch.empty_like(old, device=device), requires_grad=False)
            set_parameter(self.module, names, new)


def _region(parameter: Tensor, entry: Entry) -> Tensor:
    """The rectangle of an entry in a local slice, [rows, cols]."""
    return parameter.view(view_2d(parameter.shape))[
        entry.dst_row : entry.dst_row + entry.rows, entry.dst_col : entry.dst_col + entry.cols
    ]


def own_cache_problem(module: Any) -> str | None:
    """Why kv_cache.py cannot serve a model, as far as its class says; None = it says nothing."""
    config = module.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ()) - _KINDS
    if kinds:
        return f"it has layers of type {', '.join(sorted(kinds))}"
    if getattr(module, "_is_stateful", False):
        return "its layers carry a state from token to token"
    if not module._supports_attention_backend:
        return "its attention does not go through transformers' AttentionInterface"
    return None


def _build(
    hf_config: PretrainedConfig, dtype: torch.dtype, trust: bool, *, ours: bool
) -> PreTrainedModel:
    """The model on meta, with our attention or with transformers' own."""
    AttentionInterface.register(_ATTENTION, cached_attention)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(
            copy.deepcopy(hf_config),
            dtype=dtype,
            attn_implementation=_ATTENTION if ours else "eager",
            trust_remote_code=trust,
        )
    if not ours and module._supports_sdpa:
        module.set_attn_implementation("sdpa")
    return module.eval().requires_grad_(False)


def _cache_name(module: PreTrainedModel, cache: CacheKind) -> str:
    """The argument of the forward that takes a cache, by its newest name first."""
    taken = inspect.signature(module.forward).parameters
    names = [n for n in ("cache", "past_key_values", "cache_params") if n in taken]
    if cache == "transformers" and not names:
        raise InputError(
            f"rollout.engine=torch: {module.config.model_type} takes none of transformers' caches; "
            "use rollout.engine=sglang"
        )
    return names[0] if names else "past_key_values"


def _fill_buffers(
    module: PreTrainedModel, device: torch.device, trained: Mapping[str, Tensor]
) -> None:
    """Those of the checkpoint are copied; rotary tables and the like are what the model's own
    initialisation makes of them, or the trainer's where that knows nothing of them."""
    computed = non_persistent_buffers(module)
    for name in dict(module.named_buffers()):
        owner, leaf = _owner(module, name)
        buffer = torch.empty_like(owner.get_buffer(leaf), device=device)
        owner._buffers[leaf] = buffer.fill_(torch.nan) if buffer.is_floating_point() else buffer
    compute_buffers(module, computed)
    for name, buffer in dict(module.named_buffers()).items():
        if name in computed and buffer.is_floating_point() and not buffer.isnan().any():
            continue
        if name not in trained:
            raise InputError(
                f"rollout.engine=torch cannot make the buffer {name} of "
                f"{module.config.model_type}; use rollout.engine=sglang"
            )
        dtype = torch.float32 if _stays_float32(module, name) else buffer.dtype
        owner, leaf = _owner(module, name)
        owner._buffers[leaf] = trained[name].to(device, dtype, copy=True)


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    owner, _, leaf = name.rpartition(".")
    return module.get_submodule(owner), leaf


def _stays_float32(module: PreTrainedModel, name: str) -> bool:
    """Whether transformers keeps a tensor in float32 where the model is in half precision."""
    kept = module._keep_in_fp32_modules_strict or ()
    return any(re.search(pattern.replace("*", r"\w+"), name) for pattern in kept)


def _output_head(module: PreTrainedModel) -> nn.Module:
    head = module.get_output_embeddings()
    assert head is not None, type(module).__name__
    return head


def split_problem(config: Any, num_ranks: int) -> str | None:
    """Why a model cannot be split over T = num_ranks > 1 ranks."""
    if config.model_type not in FAMILIES:
        return (
            f"rollout.engine=torch splits {', '.join(FAMILIES)} over ranks, not "
            f"{config.model_type}: set rollout.tensor_model_parallel_size=1"
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, name) % num_ranks:
            return (
                f"rollout.tensor_model_parallel_size = {num_ranks} must divide the model's "
                f"{name} = {getattr(config, name)} with rollout.engine=torch"
            )
    return None


def _parallelize(module: PreTrainedModel, mesh: DeviceMesh) -> None:
    """DTensor placement of the base model's linear layers and of an untied head."""
    if problem := split_problem(module.config, mesh.size()):
        raise InputError(problem)
    config: Any = module.config
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    for name, part in module.base_model.named_modules():
        for pattern, kind in config.base_model_tp_plan.items():
            if kind in styles and fnmatch.fnmatch(name, pattern):
                parallelize_module(part, mesh, styles[kind]())
    head = _output_head(module)
    embedding = module.get_input_embeddings()
    if head.weight is not embedding.weight:
        parallelize_module(head, mesh, ColwiseParallel(output_layouts=Replicate()))
