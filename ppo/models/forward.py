"""What a model's forward is here: log-probs of labels, or values, from one call of the module.

Owns the replaced forward, the choice of attention and what packing asks of an architecture. Must
not know how models are built, sharded or loaded.

Letters: N packed tokens of this rank, b x S padded tokens, D documents, K scored tokens, H hidden.
"""

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ppo.errors import InputError
from ppo.logprobs import LabelLogprobs, LogitTransform, Reference, token_logprobs
from ppo.models.packed.attention import ATTENTION_NAME, Kernel, make_documents, register
from ppo.models.packed.flash import Heads, use_fastest_flash
from ppo.models.packed.kernels import choose_kernel, varlen_kernel
from ppo.models.packed.states import see_documents_alone, stateful_parts
from sharding.heads import Heads as ModelHeads
from sharding.heads import text_value
from sharding.mesh import Mesh
from sharding.ulysses import ulysses_problems

logger = logging.getLogger(__name__)

PACKABLE_LAYERS = {"full_attention", "sliding_attention"}
_SAID: set[tuple[str, str]] = set()
"""of which class this process has said why it is padded"""
STATEFUL_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mlp", "moe"}
"""and what stands beside such layers"""


@dataclass(frozen=True)
class ForwardPlan:
    """How one model's forward runs; held by the model, so that nothing is global."""

    transform: LogitTransform
    kernel: Kernel | None
    """None: transformers' own attention, with padded rows and a mask"""
    sp_group: dist.ProcessGroup | None
    """ranks that hold one slice of the row each; None at sp = 1"""
    device: torch.device
    num_ids: int | None = None
    """ids that have a probability, from 0 on; None = all rows of the head"""


class Findings(NamedTuple):
    """What the forward of a model has to know of its family (ppo/models/verify.py finds it)."""

    transform: LogitTransform
    """how its logits follow from hidden states and head"""
    obstacle: str | None
    """why documents cannot be packed; None = they can"""


def can_pack(attn_implementation: str, device: torch.device) -> bool:
    """Whether this attention takes packed documents. Errors as `choose_kernel`."""
    return choose_kernel(attn_implementation, device) is not None


def plan_forward(
    module: Any,
    mesh: Mesh,
    findings: Findings,
    *,
    num_ids: int | None,
    attn_implementation: str,
    use_remove_padding: bool,
) -> ForwardPlan:
    """Choose attention for a transformers model on meta, and set it on the model. Collective.

    Warns when documents are to be packed and the model cannot take them.
    Raises ValueError when sp > 1 and heads do not divide, or the model cannot be packed.
    """
    config, sp = module.config.get_text_config(), mesh.dims.sp
    kernel, obstacle = choose_kernel(attn_implementation, mesh.device), findings.obstacle
    if kernel is None:
        obstacle = f"model.attn_implementation={attn_implementation} cannot pack"
    if sp > 1 and (problem := sp_problem(module, obstacle, sp)):
        raise InputError(f"actor.ulysses_sequence_parallel_size={sp}: {problem}")
    if obstacle is None:
        if kernel is varlen_kernel and getattr(config, "attn_logit_softcapping", None):
            logger.warning(
                "%s: its attention limits the scores, for which torch has no kernel: it is slow; "
                "model.attn_implementation=flash_attention_2 has one",
                type(module).__name__,
                extra={"every_rank": True},
            )
        pack(module)
        is_free = attn_implementation == "auto" and not torch.are_deterministic_algorithms_enabled()
        if kernel is varlen_kernel and is_free:
            use_fastest_flash(_heads_of(module, sp), mesh.device, mesh.host_group)
    else:
        if kernel is None:
            _set_attention(module, attn_implementation)
        if use_remove_padding:
            _say_padded(type(module).__name__, obstacle)
    return ForwardPlan(
        findings.transform,
        kernel if obstacle is None else None,
        mesh.sp_group if sp > 1 else None,
        mesh.device,
        num_ids,
    )


def _say_padded(name: str, obstacle: str) -> None:
    """Once: actor, reference and critic often are of one class."""
    if (name, obstacle) not in _SAID:
        _SAID.add((name, obstacle))
        text = "%s: sequences are padded, not packed: %s"
        logger.warning(text, name, obstacle, extra={"every_rank": True})


def _heads_of(module: Any, sp: int) -> Heads:
    """As a kernel sees them on one of `sp` ranks."""
    heads, window = ModelHeads.of(module.config), text_value(module.config, "sliding_window")
    sinks = any(name.endswith("sinks") for name, _ in module.named_parameters())
    return Heads(heads.query // sp, max(1, heads.kv // sp), heads.dim, window, sinks)


def sp_problem(module: Any, obstacle: str | None, sp: int) -> str | None:
    """Why rows of a model cannot be cut over `sp` > 1 ranks; obstacle: why they are not packed."""
    if obstacle is None and stateful_parts(module):
        return "its layers carry a state from token to token, for which a rank needs the whole row"
    heads = text_value(module.config, "num_attention_heads")
    if heads is None:
        return obstacle or "it has no attention heads"
    return next(iter(ulysses_problems(num_heads=heads, sp=sp)), obstacle)


def pack(module: Any) -> None:
    """Make a transformers model take packed documents."""
    register()
    module.set_attn_implementation(ATTENTION_NAME)
    see_documents_alone(module)


def _set_attention(module: Any, name: str) -> None:
    try:
        module.set_attn_implementation(name)
    except (ValueError, ImportError) as error:  # no such name; a package that is not installed
        raise InputError(f"model.attn_implementation = {name!r}: {error}") from error


def replace_forward(module: nn.Module, plan: ForwardPlan, forward: Callable[..., Any]) -> None:
    """Make `forward` (label_logprobs or values) the module's own.

    Before sharding, which makes another class of the module: what transformers' one is, the plan
    has read by then.
    """
    assert not isinstance(module, FSDPModule), "replace_forward after sharding"
    module.forward = partial(forward, module, plan)
    module.forward_plan = plan  # pyright: ignore


def install_input_hook(module: nn.Module) -> None:
    """Accept cu_seqlens or attention_mask.

    After sharding: the hook has to run before FSDP's own, which would copy cu_seqlens to the device
    and so make the host wait for the device to read it back.
    """
    assert isinstance(module, FSDPModule), "install_input_hook before sharding"
    plan: ForwardPlan = module.forward_plan  # pyright: ignore
    module.register_forward_pre_hook(partial(_prepare, plan), prepend=True, with_kwargs=True)


def is_packable(module: nn.Module) -> bool:
    """Whether a built model takes packed documents (cu_seqlens); otherwise padded rows only."""
    return module.forward_plan.kernel is not None  # pyright: ignore


def num_ids_of(module: Any) -> int:
    """Ids of a causal LM that may be sampled: those that have a probability in its forward."""
    plan: ForwardPlan | None = getattr(module, "forward_plan", None)
    rows = module.get_output_embeddings().weight.shape[0]
    return rows if plan is None or plan.num_ids is None else min(rows, plan.num_ids)


def packing_obstacle(module: nn.Module, *, compared: bool) -> str | None:
    """Why documents cannot share a row in this model, or None when they can.

    compared: whether the answer is put to the test afterwards. Without, a model is not packed whose
    layers carry a state, because which parts do is found by what they are made of (states.py), or
    whose class does not say that its attention can be replaced.
    """
    config = module.config.get_text_config()  # pyright: ignore
    alone = compared and bool(stateful_parts(module))
    known = PACKABLE_LAYERS | STATEFUL_LAYERS if alone else PACKABLE_LAYERS
    other = set(getattr(config, "layer_types", None) or ()) - known
    if other:
        return f"it has layers of type {', '.join(sorted(other))}"
    if not alone and (
        getattr(module, "_is_stateful", False)
        or any(isinstance(m, nn.Conv1d) for m in module.modules())
    ):
        return "its layers carry a state from token to token"
    if not compared and not getattr(module, "_supports_attention_backend", False):
        return "its attention does not go through transformers' AttentionInterface"
    if not getattr(config, "is_causal", True) or getattr(
        config, "use_bidirectional_attention", False
    ):
        return "its attention is not causal"
    if not _takes_positions(backbone_of(module)):
        return "its positions cannot be given"
    return None


def backbone_of(module: Any) -> Any:
    """What gives the hidden states that the head of a transformers model sees."""
    # The text part of a model of several kinds of input may take itself for its base (Llama 4).
    return module.model if module.base_model is module else module.base_model


def _takes_positions(backbone: Any) -> bool:
    return "position_ids" in inspect.signature(backbone.forward).parameters


def _prepare(
    plan: ForwardPlan, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Turn cu_seqlens or attention_mask into what the attention layers take."""
    cu_seqlens, mask = kwargs.pop("cu_seqlens", None), kwargs.pop("attention_mask", None)
    if plan.kernel is None:
        if cu_seqlens is not None:
            raise ValueError(f"{type(module).__name__} takes padded rows only")
        return args, kwargs | {"attention": {"attention_mask": mask}}
    if cu_seqlens is None:
        if plan.sp_group is not None:
            raise ValueError(
                "padded rows cannot be cut over sp ranks: set model.use_remove_padding"
            )
        rows, width = kwargs["input_ids"].shape
        cu_seqlens = torch.arange(rows + 1) * width
    documents = make_documents(cu_seqlens, plan.device, plan.kernel, plan.sp_group)
    return args, kwargs | {"attention": {"documents": documents}}


def _hidden_states(
    module: Any,
    input_ids: Tensor,
    position_ids: Tensor,
    positions: Tensor,
    attention: dict[str, Any],
) -> Tensor:
    """Last hidden states at the flat `positions`, [K, H]."""
    backbone = backbone_of(module)
    if _takes_positions(backbone):
        attention = {"position_ids": position_ids, **attention}
    output = backbone(input_ids=input_ids, use_cache=False, **attention)
    return output.last_hidden_state.flatten(0, 1).index_select(0, positions)


def label_logprobs(
    module: Any,
    plan: ForwardPlan,
    *,
    input_ids: Tensor,
    position_ids: Tensor,
    positions: Tensor,
    labels: Tensor,
    attention: dict[str, Any],
    temperature: float = 1.0,
    with_entropy: bool = False,
    reference: Reference | None = None,
    with_hidden: bool = False,
) -> LabelLogprobs:
    """A causal LM's forward; ppo.models.build_causal_lm documents the call."""
    hidden = _hidden_states(module, input_ids, position_ids, positions, attention)
    head = module.get_output_embeddings()
    weight = head.weight
    if getattr(head, "bias", None) is not None:
        hidden, weight = with_bias(hidden, weight, head.bias)
    found = token_logprobs(
        hidden,
        weight,
        labels,
        temperature=temperature,
        with_entropy=with_entropy,
        transform=plan.transform,
        num_ids=plan.num_ids,
        reference=reference,
    )
    return found._replace(hidden=hidden.to(weight.dtype)) if with_hidden else found


def with_bias(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states [K, H + 1] and head [V, H + 1] whose product has the bias [V] in it."""
    ones = hidden.new_ones(len(hidden), 1)
    return torch.cat([hidden, ones], 1), torch.cat([weight, bias[:, None]], 1)


def values(
    module: Any,
    plan: ForwardPlan,
    *,
    input_ids: Tensor,
    position_ids: Tensor,
    positions: Tensor,
    attention: dict[str, Any],
) -> Tensor:
    """A critic's forward; ppo.models.build_value_model documents the call."""
    hidden = _hidden_states(module, input_ids, position_ids, positions, attention)
    return torch.mv(hidden.float(), module.score.weight[0].float())  # [K]
