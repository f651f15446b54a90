"""Predicted peak memory of one rank in each phase of an iteration, item by item.

Owns which models, optimizers, buckets and engines are on the device in which phase, and the host's
share. Pure numbers: no torch, no process, no file. It counts tensors that exist by design; contexts
and workspaces are assumed items; for what it cannot count there is HEADROOM.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ppo.check.memory_pass import (
    ITEM_BYTES,
    MOMENT_BYTES,
    PENDING_BYTES,
    Item,
    Pass,
    ShardedModel,
    forward_pass,
    total,
    training_pass,
)
from ppo.config import ENGINE_TRAITS, ActorConfig, Config, CriticConfig, EngineTraits, ModelRole
from ppo.model_shapes import (
    CONTEXT_MARGIN,
    KVCache,
    ModelShape,
    embedded_cache,
    sglang_memory,
)
from sharding.dims import ParallelDims
from sharding.layout import FAMILIES

GIB = 1 << 30
# Assumed, bytes: CUDA context and cuBLAS workspaces of a trainer, and of an engine process (with
# CUDA graphs); buffers of an NCCL communicator, which it keeps while nothing is sent. Replace them
# by what nvidia-smi shows on the machine at hand.
TRAINER_CONTEXT = 1.6 * GIB
ENGINE_CONTEXT = 3.0 * GIB
COMMUNICATOR = 0.4 * GIB
WHOLE_LAYERS = 2.7
"""times a batch of whole layers: as it is, converted, in one piece (the most that was measured)"""
HEADROOM = 0.06
"""Share of a device that no plan may count on: a card of 80 GB gives out about 79.4 GiB, torch's
allocator loses some per cent to fragments, and NCCL takes buffers as its communicators come up."""


class Phase(NamedTuple):
    """A phase of the iteration and what a rank holds at its peak."""

    name: str
    items: list[Item]

    @property
    def bytes(self) -> float:
        """The predicted peak."""
        return total(self.items)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the prediction is made from."""

    config: Config
    dims: ParallelDims
    shapes: Mapping[str, ModelShape]
    """by the name of the model: one for each of config.models"""
    cuda: bool
    device_bytes: float
    """the whole card, of which the engine takes its share"""

    @property
    def usable_bytes(self) -> float:
        """What a phase may need; on a CPU `device_bytes` is the user's own figure."""
        return self.device_bytes * (1 - HEADROOM if self.cuda else 1)

    @property
    def engine(self) -> EngineTraits:
        """Of the engine that the run would have."""
        return ENGINE_TRAITS[self.config.planned_engine]

    @property
    def actor(self) -> ModelShape:
        """What the engine generates with."""
        return self.shapes["actor"]

    def models(self, *, trained: bool) -> list[ShardedModel]:
        """Models that are trained, or those that rest on the host while they are idle."""
        roles = self.config.models.values()
        return [self.model(role.name) for role in roles if role.is_trained == trained]

    def model(self, name: str) -> ShardedModel:
        """One of config.models in numbers."""
        role = self.config.models[name]
        shape, lora = self.shapes[name], role.lora
        frozen = role.fsdp.mixed_precision.param_dtype
        return ShardedModel(
            name=name,
            shape=shape,
            has_logits=role.has_logits,
            fsdp=role.fsdp,
            shard_size=self.dims.shard_size,
            master=ITEM_BYTES[frozen if role.is_frozen else self.config.model.dtype],
            moment=MOMENT_BYTES[self._moment_dtype(role)] if role.is_trained else 0,
            lora=None
            if lora is None
            else shape.lora_size(lora.rank, lora.target_modules, lora.exclude_modules),
        )

    @property
    def reference(self) -> ShardedModel:
        """What the actor is compared with: a model of its own, or the actor itself."""
        return self.model("actor" if self.config.ref_is_actor else "ref")

    def _moment_dtype(self, role: ModelRole) -> str:
        optim = self.config.actor.optim if role.name == "actor" else self.config.critic.optim
        return optim.state_dtype or ("float32" if role.lora else self.config.model.dtype)


def phases(plan: Plan) -> list[Phase]:
    """Every phase of an iteration in order, for the rank that holds most."""
    found = [Phase("reshard", _drop(_reshard(plan))), Phase("generate", _drop(_generate(plan)))]
    if "reward model" in plan.config.models:
        found.append(Phase("reward model", _drop(_reward_model(plan))))
    found.append(Phase("log-probs", _drop(_log_probs(plan))))
    if "critic" in plan.config.models:
        found.append(Phase("train critic", _drop(_train(plan, "critic", plan.config.critic))))
    found.append(Phase("train actor", _drop(_train(plan, "actor", plan.config.actor))))
    return found


def micro_tokens(plan: Plan, section: ActorConfig | CriticConfig) -> int:
    """Most tokens that a rank computes at once in an update (its slice of the sp group's row)."""
    longest = plan.config.data.max_length
    sequences = section.ppo_mini_batch_size * plan.config.rollout.n
    of_a_rank = max(1, -(-sequences // plan.dims.dp)) * longest
    if section.use_dynamic_bsz:
        row = min(max(section.ppo_max_token_len_per_gpu * plan.dims.sp, longest), of_a_rank)
    else:
        row = min((section.ppo_micro_batch_size_per_gpu or sequences) * longest, of_a_rank)
    return -(-row // plan.dims.sp)


def host_bytes(plan: Plan) -> list[Item]:
    """Host memory of one node: each rank holds its rows of the rollout batch."""
    config, ranks = plan.config, plan.dims.ranks_per_node
    rows = -(-config.data.train_batch_size * config.rollout.n // plan.dims.dp)
    # eight float32 tensors and a mask of [b, T], and as much again while advantages are made of
    # them; ids, log-probs and text of a sample where it was made, and ids where it is computed with
    batch = rows * config.data.max_response_length * (16 * 4 + 1)
    ids = rows * config.data.max_length * 16
    items = [Item("rollout batch", ranks * batch), Item("tokens and texts", ranks * ids)]
    if config.actor.full_kl:
        ref = plan.reference
        states = rows * config.data.max_response_length * ref.shape.hidden_size * ref.compute
        moves = config.critic_enabled or config.actor.ppo_epochs > 1  # to other ranks, copied
        states *= 2 if moves else 1
        items.append(Item("ref last hidden states", ranks * states))
    for model in plan.models(trained=True):
        fsdp, params = model.fsdp, model.trained_params
        if fsdp.param_offload or fsdp.offload_policy:
            items.append(Item(f"{model.name} parameters", ranks * model.stored_bytes))
        if fsdp.optimizer_offload or fsdp.offload_policy or fsdp.steps_on_host:
            items.append(Item(f"{model.name} Adam moments", ranks * params * 2 * model.moment))
        trained = ranks * params * model.trained_bytes
        if fsdp.offload_policy or fsdp.steps_on_host:
            items.append(Item(f"{model.name} gradients", trained))
        if fsdp.steps_on_host:
            items.append(Item(f"{model.name} parameters, for the step", trained))
            way = min(2 * PENDING_BYTES, 2 * params * model.trained_bytes)  # in powers of two
            items.append(Item(f"{model.name} gradients on their way", ranks * way))
    for model in plan.models(trained=False) if plan.cuda else []:
        items.append(Item(f"{model.name} parameters", ranks * model.shard_params * model.compute))
    items.append(Item("inputs of all layers", ranks * _offloaded_inputs(plan)))
    items += [_saved_copy(plan, model) for model in plan.models(trained=True)]
    return _drop(items)


def _offloaded_inputs(plan: Plan) -> float:
    """Of the model that has most of them. torch pins a power of two for each, and keeps it."""
    options = plan.config.model
    if not (plan.cuda and options.enable_activation_offload and options.policy == "full"):
        return 0.0
    sections = {"actor": plan.config.actor, "critic": plan.config.critic}
    return max(
        model.shape.num_layers * 2.0 ** math.ceil(math.log2(row * micro_tokens(plan, section)))
        for name, section in sections.items()
        if name in plan.config.models
        for model in [plan.model(name)]
        for row in [model.shape.hidden_size * model.compute]
    )


def _saved_copy(plan: Plan, model: ShardedModel) -> Item:
    """Of weights and moments while a checkpoint is written; what rests on the host is not copied.

    One of the replicas of a shard writes it.
    """
    config, fsdp = plan.config, model.fsdp
    rested = plan.cuda and fsdp.param_offload and not fsdp.offload_policy
    bytes_of_each = 0 if rested else model.trained_bytes
    rests = plan.cuda and (fsdp.optimizer_offload or fsdp.steps_on_host) and not fsdp.offload_policy
    if model.name in config.saving("optimizer") and not rests:
        bytes_of_each += 2 * model.moment
    if not config.trainer.async_save or config.trainer.save_freq < 0:
        bytes_of_each = 0
    ranks = plan.dims.ranks_per_node / plan.dims.dp_replicate
    size = ranks * model.trained_params * bytes_of_each
    return Item(f"{model.name} copy, to save it asynchronously", size)


def kv_cache(plan: Plan) -> KVCache:
    """An engine's KV cache on one rank, by the rule that the engine itself has."""
    rollout, tp = plan.config.rollout, plan.dims.rollout_tp
    itemsize = ITEM_BYTES[rollout.dtype]
    if plan.engine.own_processes:
        memory = sglang_memory(
            plan.actor,
            num_params=plan.actor.num_params,
            itemsize=itemsize,
            tp=tp,
            device_bytes=plan.device_bytes,
            utilization=rollout.gpu_memory_utilization,
            max_model_len=rollout.max_model_len,
            max_num_seqs=rollout.max_num_seqs,
            on_cpu=not plan.cuda,
        )
        return memory.cache
    sequences = requests_per_engine(plan)
    used = total(_resident(plan)) + engine_weights(plan)
    return embedded_cache(
        sequences,
        longest=plan.config.longest_sampled,
        token_bytes=plan.actor.kv_bytes_per_token(tp=tp, itemsize=itemsize),
        state_bytes=plan.actor.states.bytes_of(tp),
        max_num_seqs=rollout.max_num_seqs,
        utilization=rollout.gpu_memory_utilization,
        device_bytes=plan.device_bytes if plan.cuda else None,
        free_bytes=plan.device_bytes - used,
    )


def requests_per_engine(plan: Plan) -> int:
    """Sequences of an iteration that one engine generates, or of a round of dynamic sampling."""
    data, groups = plan.config.data, plan.config.algorithm.filter_groups
    prompts = data.gen_batch_size if groups.enable else data.train_batch_size
    return -(-prompts * plan.config.rollout.n // plan.dims.rollout_dp)


def kv_context(plan: Plan) -> int:
    """Tokens that the KV cache has to hold at least: one sequence, as the engine counts it."""
    return plan.config.rollout.max_model_len + (CONTEXT_MARGIN if plan.engine.own_processes else 0)


def _resident(plan: Plan, *, with_params: str = "", with_optimizer: str = "") -> Iterator[Item]:
    """What rests on the device: all of a model, less what is offloaded and not in use."""
    if plan.cuda:
        yield Item("trainer's CUDA context and workspaces (assumed)", TRAINER_CONTEXT, "fixed")
        if plan.engine.own_processes and plan.config.rollout.engine_process != "rank":
            yield Item("engine's CUDA context and graphs (assumed)", ENGINE_CONTEXT, "engine")
        number = plan.dims.num_communicators
        yield Item(f"NCCL communicators, {number} (assumed)", number * COMMUNICATOR, "fixed")
    for model in plan.models(trained=True):
        fsdp = model.fsdp
        if fsdp.offload_policy and plan.cuda:
            continue
        if not (plan.cuda and fsdp.param_offload) or model.name == with_params:
            yield Item(f"{model.name} parameters", model.stored_bytes, "parameters")
        rests = fsdp.optimizer_offload and model.name != with_optimizer
        if not (plan.cuda and (rests or fsdp.steps_on_host)):
            size = model.trained_params * 2 * model.moment
            yield Item(f"{model.name} Adam moments", size, "optimizer")
    for model in plan.models(trained=False):
        if not plan.cuda or with_params == model.name:
            size = model.shard_params * model.compute
            yield Item(f"{model.name} parameters", size, "parameters")


def engine_weights(plan: Plan) -> float:
    """Each rank's part, and the whole embedding where ranks do not split it."""
    actor, tp = plan.actor, plan.dims.rollout_tp
    unsplit = actor.unsplit_params if plan.engine.own_processes else actor.embedding_params
    item = ITEM_BYTES[plan.config.rollout.dtype]
    return (actor.num_params + (tp - 1) * unsplit) * item / tp


def _engine_kept(plan: Plan) -> Iterator[Item]:
    """What an engine that does not give memory back holds while training."""
    if plan.engine.own_processes and not plan.config.rollout.free_cache_engine:
        yield Item("engine weights", engine_weights(plan), "engine")
        yield Item("KV cache", kv_cache(plan).bytes, "KV cache")


def _reshard(plan: Plan) -> Iterator[Item]:
    bucket = plan.config.rollout.reshard_bucket_mib * (1 << 20)
    actor, item = plan.actor, ITEM_BYTES[plan.config.rollout.dtype]
    largest = max(actor.embedding_params, actor.hidden_size * actor.intermediate_size)
    whole = actor.num_params * item
    yield from _resident(plan, with_params="actor")
    yield Item("engine weights", engine_weights(plan), "engine")
    if plan.engine.own_processes and not plan.config.rollout.free_cache_engine:
        yield Item("KV cache", kv_cache(plan).bytes, "KV cache")
    yield Item("two reshard buckets", min(2 * bucket, 2 * whole), "buckets")
    if plan.engine.own_processes and actor.model_type not in FAMILIES:
        size = WHOLE_LAYERS * min(_whole_layers(actor, bucket / item), actor.num_params) * item
        yield Item("whole layers, converted, and as they are sent", size, "buckets")
    cut = min(bucket, largest * item / plan.dims.shard_size)
    yield Item("cast of one cut", cut, "buckets")
    offloads = plan.cuda and plan.config.actor.fsdp.offload_policy
    if (lora := plan.model("actor").lora) is not None:
        yield Item("sum of one cut with its adapter, in float32", cut / item * 4, "buckets")
        size = plan.dims.shard_size
        low = 0 if size == 1 and not offloads else actor.num_layers * lora.low
        up = actor.num_layers * lora.up / size if offloads else 0
        yield Item("adapters that are merged, gathered", 4 * (low + up), "buckets")


def _whole_layers(shape: ModelShape, bucket: float) -> float:
    """Most parameters of a batch of sharding/reshard/full_tensors.py, whose bucket has so many: it
    ends with the layer that fills it, or with embedding or head."""
    layers = min(math.ceil(bucket / shape.layer_params), shape.num_layers)
    return max(
        layers * shape.layer_params, shape.embedding_params + (layers - 1) * shape.layer_params
    )


def _generate(plan: Plan) -> Iterator[Item]:
    cache = kv_cache(plan)
    yield from _resident(plan)
    yield Item("engine weights", engine_weights(plan), "engine")
    yield Item("KV cache", cache.bytes, "KV cache")
    rows = min(cache.sequences, requests_per_engine(plan))
    size = rows * plan.actor.vocab_size * _sampling_bytes(plan)
    yield Item(f"logits and sampling ({rows} sequences)", size, "logits")


def _sampling_bytes(plan: Plan) -> int:
    """Bytes of each logit of a sequence while its token is drawn: as the head gives it, and three
    times in float32. In the embedded engine top_p sorts the vocabulary and sums it in float64
    (ppo/engines/embedded/sampling.py)."""
    rollout, item = plan.config.rollout, ITEM_BYTES[plan.config.rollout.dtype]
    if not plan.engine.own_processes and rollout.top_p < 1 and rollout.top_k == -1:
        return item + 32
    return item + 12


def _reward_model(plan: Plan) -> Iterator[Item]:
    """The reward model reads as many tokens as actor and critic do, by its own tokenizer or not."""
    budget = plan.config.reward.model.max_token_len_per_gpu
    yield from _forward_only(plan, plan.model("reward model"), budget)


def _log_probs(plan: Plan) -> list[Item]:
    """The forward-only pass that holds most: of the reference where there is one, which may be
    smaller than the actor."""
    config = plan.config
    budgets = {"actor": micro_tokens(plan, config.actor)}
    if "ref" in config.models:
        budgets["ref"] = config.ref.log_prob_max_token_len_per_gpu
    passes = [list(_forward_only(plan, plan.model(name), n)) for name, n in budgets.items()]
    return max(passes, key=total)


def _forward_only(plan: Plan, model: ShardedModel, budget: int) -> Iterator[Item]:
    """A pass over all samples with at most `budget` tokens of a rank at once."""
    longest = -(-plan.config.data.max_length // plan.dims.sp)
    budget = max(budget, longest)
    samples = -(-plan.config.data.train_batch_size * plan.config.rollout.n // plan.dims.dp)
    run = Pass(
        tokens=min(budget, samples * longest),
        sp=plan.dims.sp,
        mlp_rows=plan.config.model.mlp_block_rows,
        with_entropy=model.name == "actor",
        cuda=plan.cuda,
        keeps_hidden=plan.config.actor.full_kl and model == plan.reference,
    )
    yield from _resident(plan, with_params=model.name)
    yield from _engine_kept(plan)
    yield from forward_pass(model, run)


def _train(plan: Plan, name: str, section: ActorConfig | CriticConfig) -> Iterator[Item]:
    model, options = plan.model(name), plan.config.model
    tokens = micro_tokens(plan, section)
    samples = -(-section.ppo_mini_batch_size * plan.config.rollout.n // plan.dims.dp)
    run = Pass(
        tokens=tokens,
        sp=plan.dims.sp,
        policy=options.policy,
        mlp_rows=options.mlp_block_rows,
        activation_offload=options.enable_activation_offload,
        with_entropy=plan.config.actor.entropy_coeff != 0 or _is_only_update(plan),
        accumulates=samples * plan.config.data.max_length > tokens * plan.dims.sp,
        replicas=plan.dims.dp_replicate > 1,
        steps_on_host=plan.cuda and (model.fsdp.offload_policy or model.fsdp.steps_on_host),
        cuda=plan.cuda,
        reference=plan.reference if name == "actor" and plan.config.actor.full_kl else None,
    )
    yield from _resident(plan, with_params=model.name, with_optimizer=model.name)
    yield from _engine_kept(plan)
    yield from training_pass(model, run)


def _is_only_update(plan: Plan) -> bool:
    """Whether the update may take the old log-probs itself, and the entropy with them."""
    actor = plan.config.actor
    return actor.ppo_epochs == 1 and actor.ppo_mini_batch_size >= plan.config.data.train_batch_size


def _drop(items: Iterable[Item]) -> list[Item]:
    """Without items of nothing."""
    return [item for item in items if item.bytes > 0]
