"""Whether a model's forward here is transformers' own: asked of a small copy, before sharding.

Owns the question, and what follows from the answer: how logits come from hidden states, whether
documents can be packed, or that the model is refused. A copy (ppo/models/small_copy.py) in float32
on one rank's host answers for models of any size, however they are sharded, in a second or less;
whatever differs between transformers' code and ours is in it: logits, positions, masks, windows,
packing. Kernels of a GPU are not: tests marked `gpu` hold those.
"""

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ppo.errors import InputError
from ppo.logprobs import LogitTransform
from ppo.models.forward import Findings, ForwardPlan, label_logprobs, pack, packing_obstacle
from ppo.models.packed.attention import make_documents
from ppo.models.packed.kernels import sdpa_kernel
from ppo.models.small_copy import VOCABULARY, NoSmallCopy, build_small_copy

logger = logging.getLogger(__name__)

DOCUMENTS = (12, 7)
"""tokens of the documents that are compared"""
TOLERANCE = 3e-3
"""largest difference of log-probs, in their standard deviations; rounding stays below 5e-4"""
HOST = torch.device("cpu")
_EXAMINED: dict[tuple[str, bool, bool], Findings] = {}
"""answers of this process: actor, reference and critic often are one family and configuration"""


def examine(
    config: Any, module: Any, *, pack: bool, compare: bool, trust_remote_code: bool = False
) -> Findings:
    """Findings for a Hugging Face configuration. Not collective; one core, no device.

    module: the model of this configuration, on meta.
    pack: whether the attention that is asked for can pack at all.
    compare: whether transformers' own forward decides (`model.verify_forward`). Without it the
    obstacles that are known are looked up, and the scale of the logits is measured all the same.
    Raises InputError, which names the family: log-probs differ, packed and padded; logits are no
    scaled and capped product of hidden states and head; no copy can be made.
    """
    if module.get_output_embeddings() is None:
        raise InputError(f"{type(module).__name__}: has no output head")
    question = (f"{type(config)} {config.to_json_string(use_diff=False)}", pack, compare)
    if question not in _EXAMINED:
        _EXAMINED[question] = _examine(
            config, module, pack=pack, compare=compare, trust_remote_code=trust_remote_code
        )
    return _EXAMINED[question]


def _examine(
    config: Any, module: Any, *, pack: bool, compare: bool, trust_remote_code: bool
) -> Findings:
    family, obstacle = config.model_type, packing_obstacle(module, compared=compare)
    try:
        small = build_small_copy(config, trust_remote_code=trust_remote_code)
        answers = _ask(small, module)
    except NoSmallCopy as error:
        if not compare:
            logger.warning("%s: its logits are taken to be hidden states x head: %s", family, error)
            return Findings(LogitTransform(), obstacle)
        raise InputError(
            f"{family}: it cannot be compared with transformers' own forward: {error}; "
            "model.verify_forward=false starts without the comparison"
        ) from error
    if not compare:
        return Findings(answers.transform, obstacle)
    if pack and obstacle is None:
        problem = _problem(_packed_logprobs, small, answers)
        if problem is None:
            return Findings(answers.transform, None)
        obstacle = packing_obstacle(module, compared=False) or f"packed, its forward {problem}"
    problem = _problem(_padded_logprobs, small, answers)
    if problem is not None:
        raise InputError(
            f"{family}: its forward here {problem}: this family is not supported; "
            "model.verify_forward=false starts all the same"
        )
    return Findings(answers.transform, obstacle)


class _Answers(NamedTuple):
    """What transformers' own code says."""

    transform: LogitTransform
    """of the model"""
    small_transform: LogitTransform
    """of its small copy: a scale may follow from a width"""
    documents: list[Tensor]
    want: Tensor
    """log-probs [K] of the documents' next tokens, by the small copy"""


def _ask(small: Any, module: Any) -> _Answers:
    try:
        small.set_attn_implementation("eager")
        documents = _documents(small)
        want = _own_logprobs(small, documents)
        if _difference(want[: DOCUMENTS[1] - 1], want[DOCUMENTS[0] - 1 :]) is not None:
            raise NoSmallCopy("its log-probs of a token change with the tokens that follow")
        backbone = _backbone(small, documents[0])
        small_own = _measured_transform(small, backbone)
        own = _on_meta(module, backbone)
    except NoSmallCopy:
        raise
    except Exception as error:  # whatever the code of a family raises
        raise NoSmallCopy(f"{type(error).__name__}: {error}") from error
    return _Answers(own, small_own, documents, want)


def _documents(module: Any) -> list[Tensor]:
    """The second document is the beginning of the first."""
    # The last id stands for images and the like in a small copy.
    number = module.get_input_embeddings().weight.shape[0] - 1
    ids = torch.randint(number, (max(DOCUMENTS),), generator=torch.Generator().manual_seed(1))
    return [ids[:length] for length in DOCUMENTS]


class _Backbone(NamedTuple):
    """What a causal LM calls for its hidden states: the name of the part, and what it returns."""

    name: str
    output: Callable[..., Any]


@torch.no_grad()
def _backbone(module: Any, ids: Tensor) -> _Backbone:
    """The first part that is called when a small copy runs."""
    called: list[Any] = []
    hook = register_module_forward_pre_hook(lambda part, _: called.append(part))
    try:
        module(input_ids=ids[None], use_cache=False)
    finally:
        hook.remove()
    part = next(part for part in called if part is not module)
    name = next(name for name, other in module.named_modules() if other is part)
    return _Backbone(name, type(part(input_ids=ids[None], use_cache=False)))


@torch.no_grad()
def _measured_transform(module: Any, backbone: _Backbone) -> LogitTransform:
    """Scale and cap of a model's logits, also of one on meta: what its own code makes of hidden
    states and a head whose products are powers of two.

    Raises NoSmallCopy where a scale and a cap do not describe it.
    """
    head, part = module.get_output_embeddings(), module.get_submodule(backbone.name)
    weight, forward = head.weight, part.forward
    rows, width = min(len(weight), VOCABULARY), weight.shape[1]
    signs = 1 - 2 * (torch.arange(rows) % 2)
    product = torch.exp2(torch.linspace(-20, 20, rows).round()) * signs  # [rows]
    hidden = torch.zeros(1, 2, width)
    hidden[..., 0] = 1
    own = nn.Parameter(torch.zeros(rows, width), requires_grad=False)
    own[:, 0] = product
    part.forward = lambda *_, **__: backbone.output(last_hidden_state=hidden)
    head.weight, bias = own, getattr(head, "bias", None)
    if bias is not None:
        head.bias = nn.Parameter(torch.zeros(rows), requires_grad=False)
    try:
        ids = torch.zeros(1, 2, dtype=torch.long)
        logits = module(input_ids=ids, use_cache=False).logits[0, -1].float()  # [rows]
    finally:
        part.forward, head.weight = forward, weight
        if bias is not None:
            head.bias = bias
    scale, most = (logits[0] / product[0]).item(), logits.abs().max().item()
    is_capped = most < 0.5 * abs(scale) * product.abs().max().item()
    transform = LogitTransform(scale, most if is_capped else None)
    if not torch.allclose(logits, transform(product), rtol=1e-4, atol=0):
        raise NoSmallCopy("its logits are no scaled and capped product of hidden states and head")
    return transform


def _on_meta(module: Any, backbone: _Backbone) -> LogitTransform:
    try:
        return _measured_transform(module, backbone)
    except RuntimeError as error:  # what has no memory takes part
        raise NoSmallCopy("its head has layers of its own before the last one") from error


@torch.no_grad()
def _own_logprobs(module: Any, documents: Sequence[Tensor]) -> Tensor:
    """Log-probs of every next token by transformers' forward, one document at a time."""
    logits = [module(input_ids=ids[None], use_cache=False).logits[0, :-1] for ids in documents]
    table = torch.cat(logits).float().log_softmax(-1)  # [K, V]
    return table.gather(1, _labels(documents)[:, None])[:, 0]


def _labels(documents: Sequence[Tensor]) -> Tensor:
    return torch.cat([ids[1:] for ids in documents])


@torch.enable_grad()
def _problem(run: Callable[..., Tensor], small: Any, answers: _Answers) -> str | None:
    """What is wrong with the log-probs that `run` gives, or their backward pass; None = no more
    than rounding."""
    try:
        small.get_input_embeddings().weight.requires_grad_()  # reached through every layer
        got = run(small, answers.small_transform, answers.documents)
        got.sum().backward()
    except Exception as error:  # whatever the code of a family does with what it is not made for
        return f"fails ({type(error).__name__}: {error})"
    difference = _difference(got.detach(), answers.want)
    return difference and f"gives log-probs that differ from those of transformers by {difference}"


def _difference(got: Tensor, want: Tensor) -> str | None:
    """The largest difference of log-probs [K] in words; None where it is no more than rounding."""
    difference = (got - want).abs().max()
    if difference <= TOLERANCE * want.std():  # NaN is no rounding
        return None
    return f"{difference:.3g} nats"


def _packed_logprobs(module: Any, transform: LogitTransform, documents: Sequence[Tensor]) -> Tensor:
    """The documents one after the other in a row, with our attention."""
    module = copy.deepcopy(module)  # its layers are told of documents for good
    pack(module)
    lengths = torch.tensor([len(ids) for ids in documents])
    bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    rows = [torch.arange(len(ids)) for ids in documents]
    return _logprobs(
        module,
        transform,
        documents,
        input_ids=torch.cat(list(documents))[None],
        position_ids=torch.cat(rows)[None],
        positions=torch.cat([r[:-1] + start for r, start in zip(rows, bounds, strict=False)]),
        attention={"documents": make_documents(bounds, HOST, sdpa_kernel)},
    )


def _padded_logprobs(module: Any, transform: LogitTransform, documents: Sequence[Tensor]) -> Tensor:
    """The documents as right-padded rows, with transformers' own attention."""
    module.set_attn_implementation("eager")
    lengths = torch.tensor([len(ids) for ids in documents])
    columns = torch.arange(int(lengths.max()))
    mask = columns < lengths[:, None]  # [D, S]
    input_ids = torch.zeros(mask.shape, dtype=torch.long)
    input_ids[mask] = torch.cat(list(documents))
    return _logprobs(
        module,
        transform,
        documents,
        input_ids=input_ids,
        position_ids=columns.expand(mask.shape) * mask,
        positions=(columns < lengths[:, None] - 1).flatten().nonzero()[:, 0],
        attention={"attention_mask": mask.long()},
    )


def _logprobs(
    module: Any, transform: LogitTransform, documents: Sequence[Tensor], **inputs: Any
) -> Tensor:
    plan = ForwardPlan(transform, kernel=None, sp_group=None, device=HOST)
    return label_logprobs(module, plan, labels=_labels(documents), **inputs).logprobs
