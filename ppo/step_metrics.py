"""What is logged of a rollout batch and of a step: every rank adds its rows."""

import resource
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ppo.advantages import masked_variance
from ppo.batch import degeneration
from ppo.batch.packing import Batcher
from ppo.batch.samples import RolloutBatch, positions_up_to
from ppo.config import Config
from ppo.losses import rollout_probs_diff
from ppo.metrics import Metrics, timing_shares
from ppo.model_shapes import AttentionShape
from ppo.models.flops import ModelSize, batch_flops, utilisation
from ppo.models.learner import Learner
from sharding.adapters import adapters_of
from sharding.mesh import Mesh


def _spread(metrics: Metrics, name: str, values: Tensor) -> None:
    """Add NAME/mean, max and min of what this rank has; of all ranks in the end."""
    if values.numel():
        metrics.add(f"{name}/mean", values.double().sum().item(), values.numel())
        metrics.maximum(f"{name}/max", values.max().item())
        metrics.minimum(f"{name}/min", values.min().item())


def _spread_of_all(metrics: Metrics, name: str, values: Tensor) -> None:
    """Set NAME/mean, max and min of what every rank knows."""
    if values.numel():
        metrics.set(f"{name}/mean", values.double().mean().item())
        metrics.set(f"{name}/max", values.max().item())
        metrics.set(f"{name}/min", values.min().item())


def summarise_batch(batch: RolloutBatch, batcher: Batcher, metrics: Metrics) -> None:
    """Lengths, rewards, advantages, values, and the mismatch of engine and trainer. Collective."""
    overview, mask, ranks = batch.all, batch.response_mask, batcher.mesh.dp_group
    _spread_of_all(metrics, "response_length", overview.response_lengths)
    metrics.set("response_length/clip_ratio", overview.cut[overview.is_last].double().mean().item())
    _spread_of_all(metrics, "prompt_length", overview.prompt_lengths)
    if overview.are_scored:
        scored = overview.is_last & ~overview.failed
        _spread_of_all(metrics, "critic/score", overview.scores[scored])
    if batch.rewards is not None and overview.are_scored:
        failed = overview.failed[batch.rows]
        _spread(metrics, "critic/rewards", batch.rewards.sum(-1)[~failed])
    for name in ("advantages", "returns", "values"):
        tensor = getattr(batch, name)
        if tensor is not None:
            _spread(metrics, f"critic/{name}", tensor[mask])
    if batch.returns is not None and batch.values is not None and overview.counted.sum() > 1:
        unexplained = masked_variance(batch.returns - batch.values, mask, ranks)
        variance = masked_variance(batch.returns, mask, ranks).clamp(min=1e-12)
        metrics.set("critic/vf_explained_var", (1 - unexplained / variance).item())
    if batch.old_logprobs is not None and not batch.bypasses_old:
        scored = batch.is_scored
        diff = rollout_probs_diff(batch.old_logprobs, batch.rollout_logprobs, scored)
        number = scored.sum()
        metrics.add("training/rollout_probs_diff_mean", diff.mean * number, number)
        metrics.maximum("training/rollout_probs_diff_max", diff.max)
    _balance(batch, batcher, metrics)
    high_water_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    metrics.maximum("perf/cpu_memory_used_gb", high_water_kib / 2**20)


def watch_for_degeneration(
    batch: RolloutBatch,
    batcher: Batcher,
    metrics: Metrics,
    is_text: Callable[[Tensor], Tensor],
) -> None:
    """Signs that the policy degenerates, of all samples and of those that count. Collective.

    is_text: whether a token stands for printable text, of ids of any shape.
    """
    overview, is_sampled = batch.all, batch.is_sampled
    documents = zip(batch.documents(range(len(batch))), batch.prompt_lengths.tolist(), strict=True)
    found = [document[length:] for document, length in documents]
    flat = torch.cat(found) if found else batch.tokens[:0]
    flat = flat[is_sampled[batch.is_response]]  # what was observed says nothing of the policy
    lengths = is_sampled.sum(-1)
    is_token = positions_up_to(lengths)
    ids = batch.tokens.new_zeros(is_token.shape)
    ids[is_token] = flat
    loops = degeneration.looping(ids, lengths)
    counts = (overview.counted > 0)[batch.rows]
    metrics.add("degeneration/looping", loops.sum().item(), len(loops))
    metrics.add("degeneration/unprintable", (~is_text(flat)).sum().item(), flat.numel())
    keys = torch.zeros(len(overview), dtype=torch.long)
    keys[batch.rows] = degeneration.answer_keys(ids, lengths)
    dist.all_reduce(keys, group=batcher.mesh.dp_group)  # one rank has each, the others zeros
    last = overview.is_last
    scored = last & ~overview.failed
    of_groups = {
        "distinct_answers": degeneration.distinct_share(keys[last], overview.group_ids[last]),
        "flat_groups": degeneration.flat_share(
            overview.total_scores[scored], overview.group_ids[scored]
        ),
    }
    for name, share in of_groups.items():
        if share is not None:
            metrics.set(f"degeneration/{name}", share)
    counted = overview.counted > 0
    if counted.any() and not counted.all():
        number = (loops & counts).sum().item()
        metrics.add("degeneration/looping_counted", number, counts.sum().item())
        of_counted = overview.response_lengths[counted].double().mean().item()
        metrics.set("response_length/mean_counted", of_counted)
        share = overview.cut[counted].double().mean().item()
        metrics.set("response_length/clip_ratio_counted", share)


def _balance(batch: RolloutBatch, batcher: Batcher, metrics: Metrics) -> None:
    """Tokens per dp rank: dealt out in order, and as assigned by cost."""
    lengths, dp = batch.all.lengths, batcher.budget.dp
    before = [int(lengths[rank::dp].sum()) for rank in range(dp)]
    after = torch.zeros(dp, dtype=torch.long).index_add_(0, batch.owners, lengths).tolist()
    metrics.set("global_seqlen/min", min(before))
    metrics.set("global_seqlen/max", max(before))
    metrics.set("global_seqlen/balanced_min", min(after))
    metrics.set("global_seqlen/balanced_max", max(after))
    metrics.set("perf/total_num_tokens", int(lengths.sum()))


def perf_metrics(
    values: Mapping[str, float],
    batch: RolloutBatch,
    actor: Learner,
    critic: Learner | None,
    config: Config,
    mesh: Mesh,
) -> dict[str, float]:
    """Throughput, utilisation, shares of time and memory, from the reduced values of a step."""
    world_size, cuda = mesh.dims.world_size, mesh.device.type == "cuda"
    device_name = torch.cuda.get_device_name(mesh.device) if cuda else "cpu"
    tokens = values["perf/total_num_tokens"]
    perf = timing_shares(dict(values))
    if "memory_gib/step" in values:
        held = perf["perf/max_memory_allocated_gb"] = values["memory_gib/step"]
        total = torch.cuda.get_device_properties(mesh.device).total_memory / 2**30
        perf["perf/max_memory_share"] = held / total
    perf["perf/throughput"] = tokens / values["timing_s/step"] / world_size
    for learner, epochs in ((actor, config.actor.ppo_epochs), (critic, config.critic.ppo_epochs)):
        if learner is not None:
            perf |= utilisation(
                learner.name,
                batch_flops(
                    model_size(learner.module),
                    batch.all.lengths.tolist(),
                    num_scored=batch.all.num_sampled,
                    epochs=epochs,
                ),
                seconds=values.get(f"timing_s/update_{learner.name}", 0.0),
                num_devices=world_size,
                device_name=device_name,
            )
    return perf


def model_size(module: Any) -> ModelSize:
    """What a token of a transformers model costs: an embedding's rows are looked up, not multiplied
    with, and of experts a token visits a few."""
    config = module.config.get_text_config()
    shape, used = AttentionShape.of(config), _share_of_experts(config)
    table, head = module.get_input_embeddings().weight, _head(module)
    return ModelSize(
        num_params=sum(
            p.numel() * (used if ".experts." in name else 1)
            for name, p in module.named_parameters()
            if p is not table and p is not head
        ),
        head_params=0 if head is None else head.numel(),
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        head_dim=shape.head_dim,
        is_frozen=adapters_of(module) is not None,
    )


def _head(module: Any) -> Tensor | None:
    """The weight of the output head; a value model has none."""
    try:
        output = module.get_output_embeddings()
    except AttributeError:  # several families look for it under its name
        return None
    return None if output is None else output.weight


def _share_of_experts(config: Any) -> float:
    number = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    return config.num_experts_per_tok / number if number else 1.0
