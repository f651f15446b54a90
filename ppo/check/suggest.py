"""`--suggest`: a configuration for a model, an algorithm and a machine that passes `--check`.

Owns what each algorithm starts from and how memory is spent: as little as possible is offloaded,
then the budgets grow to the largest that fit. Whether they do is the memory plan's to say.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

from ppo.check.describe import verdict
from ppo.check.fits import UTILIZATION, fits
from ppo.check.memory_phases import (
    GIB,
    Plan,
    host_bytes,
    kv_cache,
    kv_context,
    phases,
    requests_per_engine,
)
from ppo.check.preflight import check_shapes, find_models, how_to_know, plan_of
from ppo.check.remedies import (
    ACTIVATION_OFFLOAD,
    SHARD_SIZE,
    Settings,
    changed,
    larger,
    offloads,
    remedy,
    share_of_engine,
)
from ppo.check.rules import check_config
from ppo.config import (
    ESTIMATOR_NEEDS,
    CommandLine,
    Config,
    ConfigError,
    Problem,
    load_config,
    preset_of,
)
from ppo.model_shapes import MOST_SEQUENCES
from sharding.dims import divisors

RESPONSES = 8
"""to a prompt, where responses are compared"""
MINI_BATCHES = 4
CACHED_TOKENS, CACHED_SEQUENCES = 1 << 16, 4
"""that the KV cache of an engine should hold, whichever is more, if that many are generated"""
MOST_BITS = 16
"""of a token budget"""
USUAL_PERCENT, MOST_PERCENT = 30, 90
"""of a device for the engine: at first, where more is of no use; at most"""
_NO_KL = {"algorithm.adv_estimator": "grpo", "algorithm.use_kl_in_reward": False}
_STARTS: dict[str, Settings] = {
    "ppo": {"algorithm.adv_estimator": "gae"},
    "grpo": {**_NO_KL, "actor.use_kl_loss": True},
    "dapo": {
        **_NO_KL,
        "algorithm.filter_groups.enable": True,
        "algorithm.filter_groups.metric": "acc",
        "algorithm.filter_groups.max_num_gen_batches": 10,
        "actor.clip_ratio_high": 0.28,
        "actor.clip_ratio_c": 10.0,
        "reward.manager": "dapo",
    },
    **{name: {"algorithm.adv_estimator": name} for name in ESTIMATOR_NEEDS if name != "grpo"},
}
"""what an algorithm sets; most are an estimator alone"""
_DATA: Settings = {
    "data.train_files": ["data/gsm8k/train.parquet"],
    "data.val_files": ["data/gsm8k/test.parquet"],
    "trainer.project_name": "gsm8k",
    "trainer.total_epochs": 15,
}
TP, SP = "rollout.tensor_model_parallel_size", "actor.ulysses_sequence_parallel_size"
BUDGETS = {
    "actor": "actor.ppo_max_token_len_per_gpu",
    "critic": "critic.ppo_max_token_len_per_gpu",
    "ref": "ref.log_prob_max_token_len_per_gpu",
    "reward model": "reward.model.max_token_len_per_gpu",
}
SAID = (
    *("check.nnodes", "check.nproc_per_node", "check.device_memory_gib"),
    *("data.max_prompt_length", "data.max_response_length", "data.train_batch_size"),
    *("actor.ppo_mini_batch_size", BUDGETS["actor"], "rollout.n", UTILIZATION, TP),
)
"""keys that the file has though they may be the defaults"""


class Wish(NamedTuple):
    """What was asked for."""

    algorithm: str
    overrides: Sequence[str]
    given: frozenset[str]
    """keys of the overrides, which stay as they are"""

    def load(self, settings: Settings) -> Config:
        """The configuration with these settings, but for what is given. Raises ConfigError."""
        texts = [f"{key}={_text(value)}" for key, value in settings.items()]
        return load_config(None, [*texts, *self.overrides])


def run_suggest(options: CommandLine) -> int:
    """All of `--suggest`: prints a YAML file, or what is in its way and what would fit."""
    given = frozenset(text.partition("=")[0].lstrip("-+") for text in options.overrides)
    wish = Wish(options.suggest, options.overrides, given)
    try:
        start = _start(wish)
        plan = _plan(wish.load(start), options)
        settings = {**start, **_settings(plan, wish)}
        plan = _plan(wish.load(settings), options)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write("\n".join([*_header(plan, wish), preset_of(plan.config, said=SAID)]))
    return 0


def _start(wish: Wish) -> Settings:
    """What the algorithm starts from. Raises ConfigError where there is none of that name."""
    if wish.algorithm not in _STARTS:
        known = ", ".join(_STARTS)
        raise ConfigError([Problem("--algorithm", wish.algorithm, f"must be one of {known}")])
    settings: dict[str, Any] = {**_DATA, **_STARTS[wish.algorithm]}
    if ESTIMATOR_NEEDS[settings["algorithm.adv_estimator"]].siblings:
        settings["rollout.n"] = RESPONSES
    config = wish.load(settings)
    prompts = _mini_batch(config)
    if "data.train_batch_size" in wish.given:
        prompts = max(n for n in divisors(config.data.train_batch_size) if n <= prompts)
    elif "actor.ppo_mini_batch_size" in wish.given:
        prompts = config.actor.ppo_mini_batch_size
    settings["actor.ppo_mini_batch_size"] = prompts
    settings["data.train_batch_size"] = MINI_BATCHES * prompts
    if wish.algorithm == "dapo":
        settings["reward.overlong_buffer.len"] = max(1, config.data.max_response_length // 4)
    return settings


def _mini_batch(config: Config) -> int:
    """Prompts of a mini-batch, a power of two: 32 sequences for a rank, 64 to 512 in all."""
    ranks = config.check.nnodes * config.check.nproc_per_node
    sequences = max(min(max(32 * ranks, 64), 512), ranks)
    return 1 << max(0, (sequences - 1).bit_length() - (config.rollout.n - 1).bit_length())


def _plan(config: Config, options: CommandLine) -> Plan:
    """The plan of a configuration. Raises ConfigError where it cannot work, or is of a model whose
    sizes are not known."""
    ranks = config.check.nproc_per_node
    world_size = ranks * config.check.nnodes
    dims, models = config.dims(world_size, ranks), find_models(config, options.model_config)
    problems = [
        *check_config(config, world_size=world_size, ranks_per_node=ranks),
        *models.problems,
        *check_shapes(config, models.shapes, dims),
    ]
    for role in config.models.values():
        if role.name not in models.shapes and not problems:
            rule = "its sizes are not known here"
            problems.append(Problem(role.path_key, role.path, rule, how_to_know(role.path)))
    if problems:
        raise ConfigError(problems)
    return changed(plan_of(config, dims, models.shapes), {})


def _settings(plan: Plan, wish: Wish) -> Settings:
    """What makes the plan fit, and its largest budgets. Raises ConfigError where nothing does."""
    spent = _least_offloaded(plan, wish)
    if spent is None:
        raise ConfigError([_too_large(plan, wish)])
    found = changed(plan, spent)
    if found.dims.nodes > 1 and SHARD_SIZE not in wish.given:
        spent = {**spent, SHARD_SIZE: found.dims.shard_size}  # not more ranks for larger budgets
    for key, values in _growing(found, wish).items():
        tried = changed(plan, spent)
        # what is smaller than what fits, fits
        first = bisect_left(values, True, key=lambda value: fits(changed(tried, {key: value})))
        spent = {**spent, key: values[first]} if first < len(values) else spent
    return spent


def _least_offloaded(plan: Plan, wish: Wish) -> Settings | None:
    """Of the settings that fit with the smallest budgets those that cost the least time."""
    levels: list[Settings] = [{}, *offloads(plan)]
    levels.append({**levels[-1], **ACTIVATION_OFFLOAD})
    degrees = [
        [degree] if key in wish.given else [degree, *larger(plan, degree)]
        for key, degree in ((SP, plan.dims.sp), (TP, plan.dims.rollout_tp))
    ]
    context = kv_context(plan)
    wanted = max(CACHED_TOKENS, CACHED_SEQUENCES * context)
    for (cached, level), (sp, tp) in product(product((wanted, context), levels), product(*degrees)):
        tried: Settings = {**_smallest(plan, sp), **level, SP: sp, TP: tp}
        engine = changed(plan, tried)
        share = share_of_engine(engine, min(cached, _most_cached(engine)))
        if share is not None and plan.engine.own_processes:
            tried = {**tried, UTILIZATION: share}
        tried = {key: value for key, value in tried.items() if key not in wish.given}
        if fits(changed(plan, tried)):
            return tried
    return None


def _most_cached(plan: Plan) -> int:
    """Tokens of the longest sequences that an engine generates at once."""
    most = plan.config.rollout.max_num_seqs or MOST_SEQUENCES
    return min(requests_per_engine(plan), most) * kv_context(plan)


def _smallest(plan: Plan, sp: int) -> dict[str, Any]:
    """Budgets of one sequence."""
    length = -(-plan.config.data.max_length // sp)
    return {key: length for name, key in BUDGETS.items() if name in plan.config.models}


def _growing(plan: Plan, wish: Wish) -> dict[str, list[Any]]:
    """Larger values of each budget, from the largest."""
    config, length = plan.config, -(-plan.config.data.max_length // plan.dims.sp)
    rows = config.actor.ppo_mini_batch_size * config.rollout.n
    most = -(-rows // plan.dims.dp) * length  # of a mini-batch on a rank
    sizes = [1 << bit for bit in range(MOST_BITS, -1, -1)]
    found: dict[str, list[Any]] = {
        key: [size for size in sizes if length < size < 2 * most] for key in _smallest(plan, 1)
    }
    least = round(100 * config.rollout.gpu_memory_utilization)
    if plan.engine.own_processes:
        used = share_of_engine(plan, _most_cached(plan)) or 1
        most = min(MOST_PERCENT, max(USUAL_PERCENT, round(100 * used)))
        shares = [most, *range(most - most % 5, 0, -5)]
        found[UTILIZATION] = [percent / 100 for percent in shares if percent > least]
    return {key: values for key, values in found.items() if key not in wish.given}


def _too_large(plan: Plan, wish: Wish) -> Problem:
    """What would fit instead."""
    machine = f"{plan.dims.world_size} x {plan.device_bytes / GIB:g} GiB"
    rule = f"{wish.algorithm} does not fit on {machine} with any setting"
    fix = remedy(changed(plan, _smallest(plan, plan.dims.sp)))
    return Problem("model.path", plan.config.model.path, rule, fix)


def _header(plan: Plan, wish: Wish) -> list[str]:
    """Comments: what it is for, how it is run, how full it is."""
    config, dims = plan.config, plan.dims
    ranks, nodes = dims.ranks_per_node, dims.nodes
    many = f"--nnodes={nodes} --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 "
    many = many if nodes > 1 else ""
    host = sum(item.bytes for item in host_bytes(plan)) / GIB
    tokens, longest = kv_cache(plan).tokens, config.rollout.max_model_len
    return [
        f"# Suggested by --suggest, not run: {config.model.path}, {wish.algorithm}.",
        "#",
        f"#   hardware  {nodes} node{'s' * (nodes > 1)} with {ranks} GPU{'s' * (ranks > 1)} of "
        f"{plan.device_bytes / GIB:g} GiB (predicted by --check)",
        "#   data      python -m ppo.data.prepare gsm8k --out data/gsm8k, or your own",
        "#   check     python train_ppo.py --config FILE --check",
        f"#   train     torchrun {many}--nproc_per_node={ranks} train_ppo.py --config FILE",
        f"#   memory    {verdict(plan, phases(plan))};",
        f"#             {tokens // longest} sequences of {longest} tokens in an engine's cache, "
        f"{host:.0f} GiB of host memory per node",
        "",
    ]


def _text(value: Any) -> str:
    """A value as an override has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(value)}]" if isinstance(value, list) else str(value)
