"""Predicted peak memory of one rank in each phase of an iteration, item by item.

Owns the arithmetic: what FSDP2, AdamW, the activations of a decoder layer, the scored log-probs,
the reshard and the engine hold at the same time. Pure numbers: no torch, no process, no file.

What it is good for: it counts tensors that exist by design. Allocator fragmentation and kernels'
workspaces are one assumed item. `tests/ppo/test_preflight.py` compares it with measured peaks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ppo.config import ActorConfig, Config, CriticConfig, FsdpConfig
from ppo.model_shapes import ModelShape
from sharding.dims import ParallelDims

GIB = 1 << 30
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# The largest block of logits that ppo/logprobs.py makes: elements on CUDA and on a CPU.
LOGITS_BLOCK = {True: 1 << 26, False: 1 << 21}
# Assumed, bytes: CUDA context, NCCL and cuBLAS workspaces of a trainer, and of an engine process
# (with CUDA graphs). Replace them by what nvidia-smi shows on the machine at hand.
TRAINER_CONTEXT = 2.0 * GIB
ENGINE_CONTEXT = 3.0 * GIB


class Item(NamedTuple):
    """One thing that takes device memory."""

    name: str
    bytes: float


class Phase(NamedTuple):
    """A phase of the iteration and what a rank holds at its peak."""

    name: str
    items: list[Item]

    @property
    def bytes(self) -> float:
        """The predicted peak."""
        return sum(item.bytes for item in self.items)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the prediction is made from."""

    config: Config
    dims: ParallelDims
    actor: ModelShape
    critic: ModelShape
    cuda: bool
    sglang: bool
    device_bytes: float


@dataclass(frozen=True, kw_only=True)
class _Model:
    """One sharded model in numbers. Bytes are of one rank unless a name says else."""

    name: str
    shape: ModelShape
    root_params: int
    fsdp: FsdpConfig
    shard_size: int
    master: int
    """bytes of a master weight"""

    @property
    def compute(self) -> int:
        return ITEM_BYTES[self.fsdp.mixed_precision.param_dtype]

    @property
    def shard_params(self) -> float:
        layers = self.shape.num_layers * self.shape.layer_params
        return (layers + self.root_params) / self.shard_size


def phases(plan: Plan) -> list[Phase]:
    """Every phase of an iteration in order, for the rank that holds most."""
    found = [Phase("reshard", _drop(_reshard(plan))), Phase("generate", _drop(_generate(plan)))]
    found.append(Phase("log-probs", _drop(_log_probs(plan))))
    if plan.config.critic_enabled:
        found.append(Phase("train critic", _drop(_train(plan, _critic(plan), plan.config.critic))))
    found.append(Phase("train actor", _drop(_train(plan, _actor(plan), plan.config.actor))))
    return found


def micro_tokens(plan: Plan, section: ActorConfig | CriticConfig) -> int:
    """Most tokens that a rank computes at once in an update (its slice of the sp group's row)."""
    longest = plan.config.data.max_prompt_length + plan.config.data.max_response_length
    sequences = section.ppo_mini_batch_size * plan.config.rollout.n
    of_a_rank = max(1, -(-sequences // plan.dims.dp)) * longest
    if section.use_dynamic_bsz:
        row = min(max(section.ppo_max_token_len_per_gpu * plan.dims.sp, longest), of_a_rank)
    else:
        row = min((section.ppo_micro_batch_size_per_gpu or sequences) * longest, of_a_rank)
    return -(-row // plan.dims.sp)


def host_bytes(plan: Plan) -> list[Item]:
    """Host memory of one node: every rank holds the whole rollout batch."""
    config, ranks = plan.config, plan.dims.ranks_per_node
    samples = config.data.train_batch_size * config.rollout.n
    response = config.data.max_response_length
    # eight float32 tensors and a mask of [B, T]; token ids as Python integers (36 bytes each)
    batch = samples * response * (8 * 4 + 1)
    ids = samples * (config.data.max_prompt_length + response) * 36
    items = [Item("rollout batch on every rank", ranks * batch), Item("token ids", ranks * ids)]
    for model in _trained(plan):
        fsdp, params = model.fsdp, model.shard_params
        if fsdp.param_offload or fsdp.offload_policy:
            items.append(Item(f"{model.name} parameters", ranks * params * model.master))
        if fsdp.optimizer_offload or fsdp.offload_policy:
            items.append(Item(f"{model.name} Adam moments", ranks * params * 2 * model.master))
        if fsdp.offload_policy:
            items.append(Item(f"{model.name} gradients", ranks * params * model.master))
    if config.ref_enabled and plan.cuda:
        ref = _ref(plan)
        items.append(Item("ref parameters", ranks * ref.shard_params * ref.compute))
    return _drop(items)


def kv_cache(plan: Plan) -> tuple[int, float]:
    """(tokens, bytes) of an engine's KV cache on one rank."""
    rollout, tp = plan.config.rollout, plan.dims.rollout_tp
    shape, item = plan.actor, ITEM_BYTES[rollout.dtype]
    heads_share = max(shape.num_kv_heads, tp) / shape.num_kv_heads / tp
    per_token = shape.kv_values_per_token * heads_share * item
    if plan.sglang and plan.cuda:
        free = rollout.gpu_memory_utilization * plan.device_bytes - _engine_weights(plan)
        tokens = max(0, int(free // per_token))
    else:
        sequences = plan.config.data.train_batch_size * rollout.n
        rows = min(rollout.max_num_seqs, -(-sequences // plan.dims.rollout_dp))
        longest = plan.config.data.max_prompt_length + plan.config.data.max_response_length
        tokens = rows * longest
    return tokens, tokens * per_token


def _actor(plan: Plan) -> _Model:
    return _model(plan, "actor", plan.actor, plan.actor.root_params, plan.config.actor.fsdp)


def _critic(plan: Plan) -> _Model:
    root = plan.critic.value_root_params
    return _model(plan, "critic", plan.critic, root, plan.config.critic.fsdp)


def _ref(plan: Plan) -> _Model:
    return _model(plan, "ref", plan.actor, plan.actor.root_params, plan.config.ref.fsdp)


def _model(plan: Plan, name: str, shape: ModelShape, root: int, fsdp: FsdpConfig) -> _Model:
    return _Model(
        name=name,
        shape=shape,
        root_params=root,
        fsdp=fsdp,
        shard_size=plan.dims.shard_size,
        master=ITEM_BYTES[plan.config.model.dtype],
    )


def _trained(plan: Plan) -> list[_Model]:
    return [_actor(plan), _critic(plan)] if plan.config.critic_enabled else [_actor(plan)]


def _resident(plan: Plan, *, with_params: str = "", with_optimizer: str = "") -> Iterator[Item]:
    """What rests on the device: all of a model, less what is offloaded and not in use."""
    if plan.cuda:
        yield Item("trainer's CUDA context and workspaces (assumed)", TRAINER_CONTEXT)
        if plan.sglang:
            yield Item("engine's CUDA context and graphs (assumed)", ENGINE_CONTEXT)
    for model in _trained(plan):
        fsdp = model.fsdp
        if fsdp.offload_policy and plan.cuda:
            continue
        if not (plan.cuda and fsdp.param_offload) or model.name == with_params:
            yield Item(f"{model.name} parameters", model.shard_params * model.master)
        if not (plan.cuda and fsdp.optimizer_offload) or model.name == with_optimizer:
            yield Item(f"{model.name} Adam moments", model.shard_params * 2 * model.master)
    if plan.config.ref_enabled and (not plan.cuda or with_params == "ref"):
        ref = _ref(plan)
        yield Item("ref parameters", ref.shard_params * ref.compute)


def _engine_weights(plan: Plan) -> float:
    item = ITEM_BYTES[plan.config.rollout.dtype]
    return plan.actor.num_params * item / plan.dims.rollout_tp


def _engine_kept(plan: Plan) -> Iterator[Item]:
    """What an engine that does not give memory back holds while training."""
    if not plan.config.rollout.free_cache_engine:
        yield Item("engine weights", _engine_weights(plan))
        yield Item("KV cache", kv_cache(plan)[1])


def _reshard(plan: Plan) -> Iterator[Item]:
    bucket = plan.config.rollout.reshard_bucket_mib * (1 << 20)
    actor, item = plan.actor, ITEM_BYTES[plan.config.rollout.dtype]
    largest = max(actor.embedding_params, actor.hidden_size * actor.intermediate_size)
    whole = actor.num_params * item
    yield from _resident(plan, with_params="actor")
    yield Item("engine weights", _engine_weights(plan))
    yield Item("two reshard buckets", min(2 * bucket, 2 * whole))
    yield Item("cast of one cut", min(bucket, largest * item / plan.dims.shard_size))


def _generate(plan: Plan) -> Iterator[Item]:
    yield from _resident(plan)
    yield Item("engine weights", _engine_weights(plan))
    yield Item("KV cache", kv_cache(plan)[1])
    if not (plan.sglang and plan.cuda):
        rows = min(plan.config.rollout.max_num_seqs, plan.config.data.train_batch_size)
        yield Item("logits and sampling", 3 * rows * plan.actor.vocab_size * 4)


def _log_probs(plan: Plan) -> Iterator[Item]:
    """The forward-only pass that holds most: of the reference where there is one."""
    model = _ref(plan) if plan.config.ref_enabled else _actor(plan)
    longest = plan.config.data.max_prompt_length + plan.config.data.max_response_length
    budget = plan.config.ref.log_prob_max_token_len_per_gpu
    samples = plan.config.data.train_batch_size * plan.config.rollout.n
    tokens = min(
        max(budget, -(-longest // plan.dims.sp)),
        -(-samples // plan.dims.dp) * -(-longest // plan.dims.sp),
    )
    yield from _resident(plan, with_params=model.name)
    yield from _engine_kept(plan)
    yield from _gathered(model, training=False)
    yield Item(f"activations of a layer ({tokens} tokens)", _layer_forward(model, tokens))
    yield Item("log-probs in blocks", _log_prob_buffers(plan, model, tokens, backward=False))


def _train(plan: Plan, model: _Model, section: ActorConfig | CriticConfig) -> Iterator[Item]:
    tokens = micro_tokens(plan, section)
    yield from _resident(plan, with_params=model.name, with_optimizer=model.name)
    yield from _engine_kept(plan)
    if not (plan.cuda and model.fsdp.offload_policy):
        yield Item("gradients", model.shard_params * model.master)
    yield from _gathered(model, training=True)
    yield from _unsharded_gradients(model)
    yield from _activations(plan, model, tokens)


def _gathered(model: _Model, *, training: bool) -> Iterator[Item]:
    """Parameters that FSDP has gathered, in param_dtype: the root group and some layers."""
    shape = model.shape
    layer = shape.layer_params * model.compute
    if training and not model.fsdp.reshard_after_forward:
        yield Item("gathered layers, all of them", shape.num_layers * layer)
    else:
        prefetch = model.fsdp.forward_prefetch or model.fsdp.backward_prefetch
        # the layer that computes, the prefetched one, and the buffer that it arrives in
        yield Item("gathered layers", layer * min(3 if prefetch else 2, shape.num_layers + 1))
    yield Item("gathered embedding and head", model.root_params * model.compute)


def _unsharded_gradients(model: _Model) -> Iterator[Item]:
    """Gradients before they are reduced: of one layer, and of the root group to the end."""
    precision = model.fsdp.mixed_precision
    reduce = ITEM_BYTES[precision.reduce_dtype]
    layer = model.shape.layer_params * (model.compute + 2 * reduce)
    root = model.root_params * model.compute
    yield Item("unsharded gradients", root + max(layer, model.root_params * reduce))


def _activations(plan: Plan, model: _Model, tokens: int) -> Iterator[Item]:
    """Layer inputs or everything of them, and the larger of one layer's and the head's pass."""
    shape, options = model.shape, plan.config.model
    saved = shape.hidden_size * model.compute * tokens
    if not options.enable_gradient_checkpointing:
        layers = shape.num_layers * _layer_saved(plan, model, tokens)
        yield Item(f"activations of all layers ({tokens} tokens)", layers)
    elif options.enable_activation_offload and plan.cuda:
        yield Item(f"inputs of two layers ({tokens} tokens)", 2 * saved)
    else:
        yield Item(f"inputs of all layers ({tokens} tokens)", shape.num_layers * saved)
    layer = _layer_saved(plan, model, tokens) + _layer_backward(model, tokens)
    head = 0.0
    if model.name == "actor":
        head = _log_prob_buffers(plan, model, tokens, backward=True)
    name = "one layer forward and backward" if layer > head else "log-probs in blocks"
    yield Item(name, max(layer, head))


def _layer_saved(plan: Plan, model: _Model, tokens: int) -> float:
    """Bytes that the backward pass of one decoder layer keeps.

    Per token: both norms' float32 inputs and outputs; query, key and value after rotation and the
    attention's output (key and value heads repeated where sp exceeds them); gate, up, activation
    and product of the MLP.
    """
    shape, item = model.shape, model.compute
    query = shape.num_heads * shape.head_dim
    key_value = max(shape.num_kv_heads, plan.dims.sp) * shape.head_dim
    norms = shape.hidden_size * 2 * (4 + 2 * item)
    attention = item * (2 * query + 2 * key_value)
    return tokens * (norms + attention + 4 * item * shape.intermediate_size)


def _layer_backward(model: _Model, tokens: int) -> float:
    """Bytes of gradients and temporaries in the backward pass of one decoder layer."""
    shape, item = model.shape, model.compute
    mlp = 3 * item * shape.intermediate_size
    attention = item * (3 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    return tokens * (max(mlp, attention) + 2 * item * shape.hidden_size)


def _layer_forward(model: _Model, tokens: int) -> float:
    """Bytes that exist at once in the forward pass of one decoder layer without gradients."""
    shape, item = model.shape, model.compute
    mlp = 3 * item * shape.intermediate_size
    attention = item * 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    return tokens * (max(mlp, attention) + shape.hidden_size * (2 * item + 8))


def _log_prob_buffers(plan: Plan, model: _Model, tokens: int, *, backward: bool) -> float:
    """Blocks of logits in float32 (and their gradient), and the scored hidden states."""
    shape, item = model.shape, model.compute
    block = min(LOGITS_BLOCK[plan.cuda], tokens * shape.vocab_size)
    with_entropy = plan.config.actor.entropy_coeff != 0
    blocks = block * (4 * (2 if with_entropy else 1) + ((4 + item) if backward else 4))
    hidden = tokens * shape.hidden_size * (item + ((4 + item) if backward else 0))
    return blocks + hidden


def _drop(items: Iterable[Item]) -> list[Item]:
    """Without items of nothing."""
    return [item for item in items if item.bytes > 0]
