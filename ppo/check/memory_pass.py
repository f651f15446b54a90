"""Predicted memory of one forward or forward-and-backward pass of a sharded model, item by item.

Owns the arithmetic of FSDP2's gathered parameters and unsharded gradients, of the activations of
decoder layers and of the scored log-probs. Pure numbers: it must not know phases or engines.

The coefficients were fitted to peaks of live tensors, which tests/ppo/check/test_memory_pass.py
measures again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ppo.config import CheckpointPolicy, FsdpConfig
from ppo.model_shapes import LoraSize, ModelShape

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# The largest block of logits that ppo/logprobs/ makes (a test compares): elements on CUDA and on
# a CPU.
LOGITS_BLOCK = {True: 1 << 26, False: 1 << 21}
# The pieces of a step in sharding/adamw/ (a test compares), elements.
STEP_ELEMENTS = 1 << 22
# Of gradients on their way to an optimizer on the host (sharding/adamw/host.py; a test compares).
PENDING_BYTES = 1 << 30
MOMENT_BYTES = {**ITEM_BYTES, "8bit": 1 + 4 / 256}
"""of each of Adam's moments of a weight, scales included"""


Kind = Literal[
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "buckets",
    "engine",
    "KV cache",
    "fixed",
]
"""What an item of memory is, in the order of `--check`'s columns. `parameters` are also those that
FSDP has gathered; `engine` its weights and what it costs besides the cache; `fixed` what a process
costs without any work."""


class Item(NamedTuple):
    """One thing that takes device memory."""

    name: str
    bytes: float
    kind: Kind = "activations"


@dataclass(frozen=True, kw_only=True)
class ShardedModel:
    """One model in numbers. Bytes are of one rank unless a name says else."""

    name: str
    """actor, critic, ref or reward model"""
    shape: ModelShape
    has_logits: bool
    """a causal LM; else one number per token"""
    fsdp: FsdpConfig
    shard_size: int
    """ranks that share the parameters"""
    master: int
    """bytes of a stored weight"""
    moment: float = 0
    """bytes of each of Adam's two moments of a weight; 0 = not trained"""
    lora: LoraSize | None = None
    """the adapters of a layer, in float32, which are trained in its place"""

    @property
    def root_params(self) -> int:
        """Of FSDP's root group: embedding, last norm, head."""
        return self.shape.root_params if self.has_logits else self.shape.value_root_params

    @property
    def compute(self) -> int:
        """Bytes of a gathered parameter and of an activation."""
        return ITEM_BYTES[self.fsdp.mixed_precision.param_dtype]

    @property
    def shard_params(self) -> float:
        """Parameters of the model itself that this rank stores."""
        layers = self.shape.num_layers * self.shape.layer_params
        return (layers + self.root_params) / self.shard_size

    @property
    def trained_layer_params(self) -> int:
        """Of one whole layer: those that get gradients."""
        return self.shape.layer_params if self.lora is None else sum(self.lora)

    @property
    def trained_root_params(self) -> int:
        """Of the root group; beside adapters a value head alone."""
        if self.lora is None:
            return self.root_params
        return 0 if self.has_logits else self.shape.hidden_size

    @property
    def trained_params(self) -> float:
        """Of this rank: those that have gradients and moments."""
        layers = self.shape.num_layers * self.trained_layer_params
        return (layers + self.trained_root_params) / self.shard_size

    @property
    def trained_bytes(self) -> int:
        """Bytes of a trained weight, and of its gradient."""
        return self.master if self.lora is None else ITEM_BYTES["float32"]

    @property
    def stored_bytes(self) -> float:
        """Bytes of this rank's parameters."""
        adapters = 0.0 if self.lora is None else self.trained_params * self.trained_bytes
        return self.shard_params * self.master + adapters


@dataclass(frozen=True, kw_only=True)
class Pass:
    """How a micro-batch runs through a model."""

    tokens: int
    """tokens on this rank"""
    sp: int = 1
    policy: CheckpointPolicy = "full"
    """what layers keep for the backward pass"""
    mlp_rows: int = 0
    """tokens that an MLP sees at once; 0 = all"""
    activation_offload: bool = False
    with_entropy: bool = False
    accumulates: bool = False
    """gradients of earlier micro-batches are there already"""
    replicas: bool = False
    """other groups of ranks hold the same shards"""
    steps_on_host: bool = False
    """gradients leave the device as they come"""
    cuda: bool = True
    keeps_hidden: bool = False
    """forward only: the last hidden states of an sp group's row go to the host"""
    reference: ShardedModel | None = None
    """whose distributions the loss compares with, over the whole vocabulary"""

    @property
    def mlp_tokens(self) -> int:
        """Tokens for which the inside of an MLP exists at once."""
        return min(self.tokens, self.mlp_rows or self.tokens)

    @property
    def has_blocks(self) -> bool:
        """Whether MLPs run in blocks, and keep nothing of their inside."""
        return self.mlp_tokens < self.tokens


def training_pass(model: ShardedModel, run: Pass) -> list[Item]:
    """What forward and backward add to parameters and optimizer, at the worst of five moments."""
    moments = [_in_a_layer(model, run), _after_a_layer(model, run), _at_the_end(model, run)]
    moments.append(_in_the_step(model, run))
    if model.has_logits:
        moments.append(_in_the_head(model, run))
    return [*_of_reference(run), *max(moments, key=total)]


def forward_pass(model: ShardedModel, run: Pass) -> list[Item]:
    """What a pass without gradients adds to the parameters."""
    shape, item = model.shape, model.compute
    mlp = run.mlp_tokens * 3 * item * shape.intermediate_size
    attention = item * 2 * (shape.num_heads + _kv_heads(shape, run.sp)) * shape.head_dim
    rows = shape.hidden_size * (2 * item + 8 + (2 * item if run.has_blocks else 0))
    layer = max(mlp, run.tokens * attention) + run.tokens * rows
    found = [*_gathered(model), Item(f"one layer forward ({run.tokens} tokens)", layer)]
    if model.has_logits:
        found.append(Item("log-probs in blocks", _head_forward(model, run), "logits"))
    if run.keeps_hidden:
        states = run.tokens * run.sp * shape.hidden_size * item
        found.append(Item("last hidden states, on their way to the host", states))
    return found


def total(items: Iterable[Item]) -> float:
    """Bytes of all items."""
    return sum(item.bytes for item in items)


def _of_reference(run: Pass) -> list[Item]:
    """The reference's head, whole, and its hidden states of the tokens."""
    if run.reference is None:
        return []
    shape, item = run.reference.shape, run.reference.compute
    return [
        Item("head of the reference", shape.embedding_params * item, "parameters"),
        Item("hidden states of the reference", run.tokens * shape.hidden_size * item),
    ]


def _in_a_layer(model: ShardedModel, run: Pass) -> list[Item]:
    """Early in the backward pass: nothing is freed yet, the last layer computes."""
    again = _layer_again(model, run)
    return [
        *_gradients(model, run, whole=False, head=True),
        *_gathered(model),
        _kept_activations(model, run),
        Item("one layer forward and backward", again + _layer_backward(model, run)),
    ]


def _in_the_head(model: ShardedModel, run: Pass) -> list[Item]:
    return [
        *_gradients(model, run, whole=False, head=True),
        *_gathered(model, most=1),
        _kept_activations(model, run),
        Item("log-probs in blocks", _head_backward(model, run), "logits"),
    ]


def _after_a_layer(model: ShardedModel, run: Pass) -> list[Item]:
    """A layer's gradients are whole, and on their way in reduce_dtype (two layers' at a time)."""
    reduce = ITEM_BYTES[model.fsdp.mixed_precision.reduce_dtype]
    layer = model.trained_layer_params * (model.compute + 2 * reduce)
    return [
        *_gradients(model, run, whole=True, head=True),
        *_gathered(model),
        _kept_activations(model, run),
        Item("unsharded gradients of a layer", layer, "gradients"),
    ]


def _at_the_end(model: ShardedModel, run: Pass) -> list[Item]:
    """The root group's gradients are reduced last, when all else is freed."""
    reduce = ITEM_BYTES[model.fsdp.mixed_precision.reduce_dtype]
    root = model.trained_root_params * (model.compute + reduce)
    return [
        *_gradients(model, run, whole=True, head=False),
        Item("gathered embedding and head", model.root_params * model.compute, "parameters"),
        Item("unsharded gradients of the root", root, "gradients"),
    ]


def _in_the_step(model: ShardedModel, run: Pass) -> list[Item]:
    """Moments that are not float32 are copied to it piece by piece, and codes of 8 bits made of
    the largest part of a piece."""
    if run.steps_on_host:
        return []
    found = [_own_gradients(model)]
    if model.moment in (0, 4, model.trained_bytes):
        return found
    piece = min(model.trained_params, STEP_ELEMENTS)
    size = 2 * 4 * piece
    if model.moment < 2:
        shape = model.shape
        largest = max(shape.embedding_params, shape.hidden_size * shape.intermediate_size)
        size += 4 * 4 * min(largest / model.shard_size, piece)
    return [*found, Item("float32 copies of moments in a step", size, "optimizer")]


def _own_gradients(model: ShardedModel) -> Item:
    return Item("gradients", model.trained_params * model.trained_bytes, "gradients")


def _gradients(model: ShardedModel, run: Pass, *, whole: bool, head: bool) -> list[Item]:
    """Those of earlier micro-batches, or all; and of the head while it computes.

    What replicas will sum stays in reduce_dtype until FSDP has ended the last backward pass of a
    mini-batch (partial_reduce_output, then all_reduce_input): the gradient itself, or beside it.
    """
    reduce = ITEM_BYTES[model.fsdp.mixed_precision.reduce_dtype]
    found: list[Item] = []
    are_others = run.replicas and (run.steps_on_host or reduce != model.trained_bytes)
    if are_others and (whole or run.accumulates):
        sums = Item("gradients that replicas sum", model.trained_params * reduce, "gradients")
        found.append(sums)
    if not run.steps_on_host and (whole or (run.accumulates and not are_others)):
        found.append(_own_gradients(model))
    if head and model.has_logits and model.lora is None:
        size = model.shape.embedding_params * model.compute
        found.append(Item("unsharded gradient of the head", size, "gradients"))
    return found


def _gathered(model: ShardedModel, *, most: int = 2) -> list[Item]:
    """Parameters in param_dtype: the root group, and layers (one computes, one is prefetched; in
    the head the last one is); what one rank has whole in that dtype is used as it is."""
    if model.shard_size == 1 and model.compute == model.master:
        return []
    adapters = 0 if model.lora is None else sum(model.lora)
    layer, fsdp = (model.shape.layer_params + adapters) * model.compute, model.fsdp
    layers = min(
        most if fsdp.backward_prefetch or fsdp.forward_prefetch else 1, model.shape.num_layers
    )
    if not fsdp.reshards:
        layers = model.shape.num_layers
    return [
        Item("gathered layers", layers * layer, "parameters"),
        Item("gathered embedding and head", model.root_params * model.compute, "parameters"),
    ]


def _kept_activations(model: ShardedModel, run: Pass) -> Item:
    """What the backward pass finds: the inputs of layers, with or without what products give, or
    everything inside of them."""
    layers, tokens = model.shape.num_layers, f"({run.tokens} tokens)"
    if run.policy == "none":
        size = layers * (_norms_and_heads(model, run) + _mlp_saved(model, run))
        return Item(f"activations of all layers {tokens}", size)
    inputs = model.shape.hidden_size * model.compute * run.tokens
    if run.policy == "selective":
        size = layers * (inputs + _products(model, run))
        return Item(f"inputs and matrix products of all layers {tokens}", size)
    if run.activation_offload and run.cuda:
        return Item(f"inputs of two layers {tokens}", 2 * inputs)
    return Item(f"inputs of all layers {tokens}", layers * inputs)


def _layer_again(model: ShardedModel, run: Pass) -> float:
    """Bytes that one layer's forward makes a second time, in the backward pass."""
    if run.policy == "none":
        return 0.0
    again = _norms_and_heads(model, run) + _mlp_saved(model, run)
    if run.policy == "selective":  # values, the attention's output, gate and up are there
        shape = model.shape
        kept = (shape.num_heads + _kv_heads(shape, run.sp)) * shape.head_dim
        kept += 0 if run.has_blocks else 2 * shape.intermediate_size
        again -= run.tokens * model.compute * kept
    return again


def _norms_and_heads(model: ShardedModel, run: Pass) -> float:
    """Bytes that the backward pass of one decoder layer keeps, but for its MLP.

    Per token: of both norms the float32 input, the normalised value (where its weight is trained)
    and the output; query, key and value after rotation and the attention's output (under sp > 1 as
    each side of the exchange lays it out).
    """
    shape, item = model.shape, model.compute
    norms = shape.hidden_size * 2 * (4 + (2 if model.lora is None else 1) * item)
    heads = (2 if run.sp == 1 else 3) * shape.num_heads + 2 * _kv_heads(shape, run.sp)
    return run.tokens * (norms + item * heads * shape.head_dim)


def _mlp_saved(model: ShardedModel, run: Pass) -> float:
    """Bytes that the backward pass of one MLP keeps: gate, up, activation and product."""
    if run.has_blocks:
        return 0.0
    return run.tokens * model.compute * 4 * model.shape.intermediate_size


def _products(model: ShardedModel, run: Pass) -> float:
    """Bytes of what matrix products and attention of one layer give and its backward pass needs:
    query, key, value, output and its float32 sums; the layer's attention; gate and up."""
    shape = model.shape
    width = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim + shape.hidden_size
    width += 0 if run.has_blocks else 2 * shape.intermediate_size
    return run.tokens * (width * model.compute + 4 * shape.num_heads)


def _layer_backward(model: ShardedModel, run: Pass) -> float:
    """Bytes of gradients in the MLP of one layer, where its backward pass holds most; of blocks
    also what one has made again."""
    shape, item = model.shape, model.compute
    inside = shape.intermediate_size * (5 if run.has_blocks else 1)
    return item * (run.mlp_tokens * inside + run.tokens * 2 * shape.hidden_size)


def _kv_heads(shape: ModelShape, sp: int) -> int:
    """Key-value heads per token: repeated where sp exceeds them."""
    return max(shape.num_kv_heads, sp)


def _head_forward(model: ShardedModel, run: Pass) -> float:
    """One block of logits in float32, turned in place, and the scored hidden states; with entropy
    its exponentials and their products too."""
    hidden = run.tokens * model.shape.hidden_size * model.compute
    return _logits_block(model, run) * (12 if run.with_entropy else 4) + hidden


def _head_backward(model: ShardedModel, run: Pass) -> float:
    """A block becomes its gradient while the last one's is there; both also in param_dtype."""
    each = 4 + model.compute + (model.compute if model.compute < 4 else 0)
    more = 8 if run.reference is not None else 0  # its block, and the difference
    block = _logits_block(model, run) * (each + more + (4 if run.with_entropy else 0))
    return block + run.tokens * model.shape.hidden_size * (4 + 2 * model.compute)


def _logits_block(model: ShardedModel, run: Pass) -> int:
    """Elements of the block of logits that exists at a time."""
    most = LOGITS_BLOCK[run.cuda] // (1 if run.reference is None else 2)
    return min(most, run.tokens * model.shape.vocab_size)
