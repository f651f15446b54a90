"""Actor, ref, critic and reward model from HF checkpoints: built on meta, then sharded.

Owns what a model's forward is here: hidden states by transformers' backbone, then log-probs of
given labels (causal LM) or values (critic, reward model), so that FSDP sees one module call per
micro-batch and full logits never exist. Must not know losses, batches or the training loop.

Letters: N packed tokens of this rank, b x S padded tokens, D documents, K scored tokens, H hidden.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ppo.config import FsdpConfig, Lora, ModelConfig
from ppo.errors import InputError
from ppo.models.forward import (
    Findings,
    can_pack,
    install_input_hook,
    is_packable,
    label_logprobs,
    plan_forward,
    replace_forward,
    values,
)
from ppo.models.hf_config import load_hf_config, load_whole_config
from ppo.models.liger import use_liger
from ppo.models.lora import attach, fill
from ppo.models.verify import examine
from ppo.models.weights import (
    HostCopy,
    WeightsError,
    check_finite,
    load_weights,
    materialize,
    raise_problems,
    remember_names,
)
from ppo.models.wrapped import Whole, check_language_model, open_whole
from sharding.activations import block_mlps, checkpoint_activations, offload_activations
from sharding.adapters import adapters_of, freeze_base
from sharding.agree import together
from sharding.checkpoint.classes import classifier_class
from sharding.compiled import compile_layers
from sharding.fsdp import shard_model
from sharding.mesh import Mesh
from sharding.names import tied_names

__all__ = ["build_causal_lm", "build_value_model", "is_packable"]


def build_causal_lm(
    path: Path,
    mesh: Mesh,
    *,
    model_config: ModelConfig,
    fsdp_config: FsdpConfig,
    checkpointing: bool,
    forward_only: bool,
    dtype: torch.dtype,
    num_ids: int | None = None,
    shard_dim1: Callable[[str, nn.Parameter], bool] | None = None,
    lora: Lora | None = None,
) -> nn.Module:
    """Actor or reference: a sharded causal LM whose call returns LabelLogprobs.

    module(input_ids=[1, N] or [b, S], position_ids=same, positions=[K], labels=[K],
           temperature=1.0, with_entropy=False, cu_seqlens=[D + 1] on the host or None,
           attention_mask=[b, S] or None, reference=None, with_hidden=False) -> LabelLogprobs
    positions index the flattened local input_ids whose hidden states score `labels`; K may be 0.
    With cu_seqlens the row holds packed documents (under sp > 1: this rank's slice of the row that
    cu_seqlens describes); without, rows are right-padded.

    dtype: of the stored parameters (float32 masters for training).
    num_ids: ids that have a probability, from 0 on; None = all rows of the head. A head often has
    more rows than the tokenizer has ids.
    lora: adapters that are trained in the place of the model.
    Raises InputError for a model that does not fit the mesh or weights that do not fit the model.
    Collective over all ranks.
    """
    hf_config, whole = load_hf_config(path, model_config), open_whole(path, model_config)
    module = _on_meta(path, hf_config, model_config, dtype)
    findings = _findings(module, hf_config, whole, mesh, model_config)
    if model_config.use_liger:
        use_liger(module, mesh.device)
    _replace(module, findings, mesh, model_config, label_logprobs, num_ids)
    remember_names(module, whole)
    attach(module, lora, path)
    _shard(module, mesh, model_config, fsdp_config, checkpointing, forward_only, shard_dim1)
    _fill(module, path, mesh, fsdp_config, source=(model_config, dtype, False))
    fill(module, lora, mesh)
    return module


def reload_weights(
    module: nn.Module,
    path: Path,
    mesh: Mesh,
    *,
    model_config: ModelConfig,
    dtype: torch.dtype,
) -> None:
    """Other weights of the same model into one of `build_causal_lm`, in place. Collective.

    Raises InputError for weights that do not fit it.
    """
    load_weights(
        module,
        path,
        source=_host_copy(path, mesh, model_config, dtype, False),
    )
    check_finite(module, path, mesh.host_group)


def build_value_model(
    path: Path,
    mesh: Mesh,
    *,
    model_config: ModelConfig,
    fsdp_config: FsdpConfig,
    checkpointing: bool,
    forward_only: bool,
    dtype: torch.dtype,
    needs_head: bool = False,
    lora: Lora | None = None,
) -> nn.Module:
    """Critic or reward model: the backbone with a bias-free linear head `score`.

    The head is zero unless `path` holds one, which a reward model needs (`needs_head`).

    module(input_ids, position_ids, positions, cu_seqlens=None, attention_mask=None) -> [K] float32
    Arguments and errors as build_causal_lm's.
    """
    hf_config, whole = load_hf_config(path, model_config), open_whole(path, model_config)
    module = _on_meta(path, hf_config, model_config, dtype)
    findings = _findings(module, hf_config, whole, mesh, model_config)
    aliases = tied_names(module)  # a file may hold the embedding as the head alone
    module.config.tie_word_embeddings = False
    head = module.get_output_embeddings()
    name = next(name for name, child in module.named_children() if child is head)
    delattr(module, name)
    trained = torch.float32 if lora else dtype
    module.score = nn.Linear(head.in_features, 1, bias=False, device="meta", dtype=trained)
    module.config.num_labels = 1  # so that an export loads as a sequence classifier
    if model_config.use_liger:
        use_liger(module, mesh.device)
    _replace(module, findings, mesh, model_config, values)
    remember_names(module, whole)
    attach(module, lora, path, value_head="score")
    _shard(module, mesh, model_config, fsdp_config, checkpointing, forward_only, None)
    _fill(
        module,
        path,
        mesh,
        fsdp_config,
        source=(model_config, dtype, needs_head),
        aliases=aliases,
        optional=() if needs_head else ("score.weight",),
        ignored=(rf"^{name}\.",),
    )
    fill(module, lora, mesh)
    return module


def _on_meta(path: Path, hf_config: Any, model_config: ModelConfig, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    kind = hf_config.model_type
    may_be_encoder = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not hf_config.is_encoder_decoder
    if may_be_encoder and not getattr(hf_config, "is_decoder", True):
        raise InputError(f"{path}: is no decoder: {kind} reads a text from both sides")
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                hf_config, dtype=dtype, trust_remote_code=model_config.trust_remote_code
            )
    except ValueError as error:  # an encoder, or an architecture that has code of its own
        reason = str(error).partition("\n")[0]  # what follows lists everything that it knows
        raise InputError(f"{path}: is no decoder that transformers knows: {reason}") from error
    except (ArithmeticError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise InputError(
            f"{path}: no model can be built by its config.json: {type(error).__name__}: {error}"
        ) from error


def _replace(
    module: nn.Module,
    findings: Findings,
    mesh: Mesh,
    model_config: ModelConfig,
    forward: Callable[..., Any],
    num_ids: int | None = None,
) -> None:
    plan = plan_forward(
        module,
        mesh,
        findings,
        num_ids=num_ids,
        attn_implementation=model_config.attn_implementation,
        use_remove_padding=model_config.use_remove_padding,
    )
    replace_forward(module, plan, forward)


def _findings(
    module: nn.Module, hf_config: Any, whole: Whole | None, mesh: Mesh, model_config: ModelConfig
) -> Findings:
    """Rank 0 examines the family, on its host, for all. Collective."""

    def ask() -> Findings | None:
        if mesh.rank != 0:
            return None
        if whole is not None and model_config.verify_forward:
            check_language_model(whole.config)
        return examine(
            hf_config,
            module,
            pack=can_pack(model_config.attn_implementation, mesh.device),
            compare=model_config.verify_forward,
            trust_remote_code=model_config.trust_remote_code,
        )

    findings = together(ask, mesh.host_group, InputError, expected=InputError, name_ranks=False)[0]
    assert findings is not None
    return findings


def _shard(
    module: nn.Module,
    mesh: Mesh,
    model_config: ModelConfig,
    fsdp_config: FsdpConfig,
    checkpointing: bool,
    forward_only: bool,
    shard_dim1: Callable[[str, nn.Parameter], bool] | None,
) -> None:
    module.eval()  # also to train: what is random in training would change the first ratio
    module.requires_grad_(not forward_only)
    freeze_base(module)
    if model_config.compile == "layers":
        compile_layers(module)
    _spare_activations(module, model_config, checkpointing)
    shard_model(
        module,
        mesh,
        param_dtype=getattr(torch, fsdp_config.mixed_precision.param_dtype),
        reduce_dtype=getattr(torch, fsdp_config.mixed_precision.reduce_dtype),
        reshard_after_forward=fsdp_config.reshards,
        forward_prefetch=fsdp_config.forward_prefetch,
        backward_prefetch=fsdp_config.backward_prefetch,
        offload_policy=fsdp_config.offload_policy,
        min_num_params=fsdp_config.wrap_policy.min_num_params,
        forward_only=forward_only,
        shard_dim1=shard_dim1,
    )


def _spare_activations(module: nn.Module, model_config: ModelConfig, checkpointing: bool) -> None:
    """Less memory of layers, as the configuration says. Before sharding."""
    adapters = adapters_of(module)
    draws = adapters is not None and adapters.dropout > 0
    if rows := model_config.mlp_block_rows:
        try:
            block_mlps(module, rows, draws=draws)
        except ValueError as error:
            raise InputError(f"model.mlp_block_rows = {rows}: {error}; set it to 0") from error
    if checkpointing:
        selective = model_config.checkpoint_policy == "selective"
        if adapters is not None:
            adapters.in_place = not selective
        checkpoint_activations(module, selective=selective, draws=draws)
        if model_config.enable_activation_offload:
            offload_activations(module)


def _fill(
    module: nn.Module,
    path: Path,
    mesh: Mesh,
    fsdp_config: FsdpConfig,
    *,
    source: tuple[ModelConfig, torch.dtype, bool],
    aliases: list[list[str]] | None = None,
    optional: tuple[str, ...] = (),
    ignored: tuple[str, ...] = (),
) -> None:
    """Memory and weights for a sharded model, and the hook that runs before FSDP's."""
    host = torch.device("cpu")
    materialize(
        module, param_device=host if fsdp_config.offload_policy else mesh.device, device=mesh.device
    )
    load_weights(
        module,
        path,
        source=_host_copy(path, mesh, *source),
        aliases=aliases,
        optional=optional,
        ignored=ignored,
    )
    check_finite(module, path, mesh.host_group)
    install_input_hook(module)


def _host_copy(
    path: Path, mesh: Mesh, model_config: ModelConfig, dtype: torch.dtype, classifier: bool
) -> HostCopy:
    """Where weights come from whose names in the files are not the model's."""
    whole = load_whole_config(path, model_config)
    build = partial(_whole_on_host, path, whole, model_config, dtype, classifier)
    return HostCopy(build, mesh.host_group, wrapped=whole is not None)


def _whole_on_host(
    path: Path, whole: Any, model_config: ModelConfig, dtype: torch.dtype, classifier: bool
) -> nn.Module:
    """By transformers' own loading; a multimodal model with all that it has."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    config = whole or load_hf_config(path, model_config)
    kind: Any = AutoModelForMultimodalLM if whole is not None else AutoModelForCausalLM
    if classifier:
        kind = classifier_class(config)
    try:
        loaded: Any = kind.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            trust_remote_code=model_config.trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path}: no weights that load: {error}") from error
    module, info = loaded
    raise_problems(
        [
            f"{path}: {name}: {kind.removesuffix('_keys')}"
            for kind in ("missing_keys", "mismatched_keys")
            for name in info[kind]
        ]
    )
    return module
