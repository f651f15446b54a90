"""verl: values that mean another thing here, and keys that decide together.

Releases 0.3 to 0.9. Names that hold the same value are in ppo/config/trainers/verl.py, its defaults
in verl_defaults.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args

from ppo.config.foreign import foreign
from ppo.config.migrate.given import Given
from ppo.config.migrate.translate import (
    BY_TOKENS,
    DTYPES,
    NOTHING,
    Answer,
    Dialect,
    Rule,
    loggers,
    raw_of,
)
from ppo.config.migrate.verl_defaults import (
    LEFT_AS_THEY_ARE,
    PREFIX,
    TURNS,
    defaults,
    differences,
    has_turns,
    is_above_0,
    value_of,
)
from ppo.config.schema import schema
from ppo.config.sections.rollout import ToolFormat
from ppo.config.trainers.verl import EPISODES, RENAMED
from ppo.config.values import is_null

_SAME_ESTIMATOR = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
_SAME_FORMAT = {"qwen3_coder": "qwen3_xml", "llama3_json": "llama3"}
_MULTIMODAL = re.compile(r"(?i)(?:\b|_)(?:vl|vision|omni|llava|internvl\w*)(?:\b|_)")
_RANDOM = re.compile(r"model\.override_config\..*(dropout|pdrop|layerdrop|jitter)[^.]*")
_OVERLONG = re.compile(
    r"(?:reward_model|reward|custom_reward_function)\."
    r"(?:reward_kwargs\.)?overlong_buffer(?:_cfg)?\.(enable|len|penalty_factor|log)"
)
_LORA = re.compile(r"((?:critic\.)?model\.lora)\.(\w+)")
DYNAMIC, BUDGET = "actor.use_dynamic_bsz", "actor.ppo_max_token_len_per_gpu"


def dialect(given: Given) -> Dialect:
    """How verl's keys become ours."""
    known = set(schema())
    return Dialect(
        name="verl",
        own_name=_own_name,
        lookup=lambda path: foreign(path, known),
        rule=lambda name: _rule(name, given),
        whole=_whole,
        defaults=defaults(given),
    )


def _own_name(path: str) -> str:
    return path.removeprefix(PREFIX)


def _rule(name: str, given: Given) -> Rule | None:
    if _RANDOM.fullmatch(name):
        return lambda raw, given: Answer(unneeded="every pass is that of evaluation")
    if match := _OVERLONG.fullmatch(name):
        return lambda raw, given: _overlong(name, match[1], raw, given)
    if name.startswith("critic.model.") and (ours := RENAMED.get(name, "")).startswith("model."):
        return lambda raw, given: _shared(ours, raw, given)
    if name.endswith(".optim.lr_warmup_steps"):
        return lambda raw, given: NOTHING if str(raw).startswith("-") else Answer({name: raw})
    if name.endswith(".optim.total_training_steps"):
        return lambda raw, given: _only(raw, "-1", "use trainer.total_training_steps")
    if name.endswith(".strategy"):
        return lambda raw, given: _strategy(raw)
    if left := LEFT_AS_THEY_ARE.get(name):
        return _no_default(left[0], why=left[1])
    if name.endswith(".model_dtype") and not name.startswith("actor."):
        return lambda raw, given: _master_dtype(raw, given)
    if name.endswith(".use_torch_compile") and not name.startswith("model."):
        return lambda raw, given: Answer(unneeded="it is of the entropy; see model.compile")
    if (match := _LORA.fullmatch(name)) and not is_above_0(value_of(given, f"{match[1]}.rank")):
        return lambda raw, given: NOTHING  # a section of Megatron's
    return RULES.get(name)


def _overlong(name: str, leaf: str, raw: Any, given: Given) -> Answer:
    """DAPO's penalty, which has a switch there, and is on with a length here."""
    section = name.removesuffix(leaf)
    is_on = str(value_of(given, f"{section}enable", "false")).lower() == "true"
    if leaf in ("enable", "log") or not is_on:
        return NOTHING
    return Answer({f"reward.overlong_buffer.{leaf}": raw})


def _shared(ours: str, raw: Any, given: Given) -> Answer:
    """A key of the critic's model that all models share here."""
    actors = value_of(given, ours, schema()[ours].default if ours in schema() else raw)
    if (
        is_null(raw)
        or ours == "model.use_remove_padding"
        or str(actors).lower() == str(raw).lower()
    ):
        return NOTHING
    return Answer(gap=f"all models share {ours}")


def _master_dtype(raw: Any, given: Given) -> Answer:
    """Of another model than the actor's."""
    said = value_of(given, "actor.fsdp_config.model_dtype", value_of(given, "model.dtype", "fp32"))
    ours = {DTYPES.get(str(dtype), str(dtype)) for dtype in (raw, said)}
    return NOTHING if is_null(raw) or len(ours) == 1 else Answer(gap="all models share model.dtype")


def _strategy(raw: Any) -> Answer:
    if is_null(raw) or str(raw) in ("fsdp", "fsdp2"):
        return NOTHING
    return Answer(
        gap="FSDP2 is what shards here, with actor.fsdp and actor.ulysses_sequence_parallel_size; "
        "Megatron's parallelism is not built"
    )


def _only(raw: Any, accepted: str, otherwise: str) -> Answer:
    return NOTHING if is_null(raw) or str(raw) == accepted else Answer(gap=otherwise)


def _micro_batch(section: str, *, of_all: bool) -> Rule:
    """Sequences of one pass on a device (of_all: of all devices together, in early releases).

    They decide over memory alone: where nobody has asked for them, tokens do here.
    """

    def rule(raw: Any, given: Given) -> Answer:
        if not str(raw).isdigit():
            return NOTHING
        is_dynamic = value_of(given, f"{section}.use_dynamic_bsz", value_of(given, DYNAMIC, None))
        if str(is_dynamic).lower() != "false":
            return Answer(unneeded=BY_TOKENS)
        ranks = _number(given, "trainer.nnodes", 1) * _number(given, "trainer.n_gpus_per_node", 8)
        sp = _number(given, f"{section}.ulysses_sequence_parallel_size", 1)
        each = max(1, int(raw) * sp // ranks) if of_all else int(raw)
        return Answer({f"{section}.ppo_micro_batch_size_per_gpu": raw_of(each)})

    return rule


def _engine(raw: Any, given: Given) -> Answer:
    if str(raw) == "vllm":
        return Answer(unneeded="SGLang generates here")
    engine = {"sglang": "sglang", "sglang_async": "sglang", "hf": "torch"}.get(str(raw))
    return Answer({"rollout.engine": engine}) if engine else _only(raw, "???", "SGLang generates")


def _val_temperature(raw: Any, given: Given) -> Answer:
    samples = str(value_of(given, "rollout.val_kwargs.do_sample", "false")).lower() == "true"
    if samples:
        return Answer({"rollout.val_kwargs.temperature": raw})
    why = (
        "without do_sample releases before 0.7 validate greedily; for later ones, which take this "
    )
    is_greedy = is_null(raw) or str(raw) in ("0", "0.0")
    return Answer(
        {"rollout.val_kwargs.temperature": raw_of(0.0)},
        unneeded="" if is_greedy else f"{why}temperature, say rollout.val_kwargs.temperature",
    )


def _multi_turn(raw: Any, given: Given) -> Answer:
    names = (f"{TURNS}function_tool_path", "data.function_tool_path")
    has_tools = any(not is_null(value_of(given, name, None)) for name in names)
    return Answer(gap=EPISODES) if has_turns(given) and not has_tools else NOTHING


def _of_turns(ours: str) -> Rule:
    """What means nothing unless turns are switched on."""
    return lambda raw, given: (
        Answer({ours: raw}) if has_turns(given) and not is_null(raw) else NOTHING
    )


def _tool_format(raw: Any, given: Given) -> Answer:
    if not has_turns(given):
        return NOTHING
    known = _SAME_FORMAT.get(str(raw), str(raw))
    if known in get_args(ToolFormat):
        return Answer({"rollout.episode.tool_format": known})
    return Answer(unneeded="rollout.episode.tool_format follows the chat template")


def _model(raw: Any, given: Given) -> Answer:
    sees = "it sees, by its name: the language model alone is trained, on text"
    return Answer({"model.path": raw}, gap=sees if _MULTIMODAL.search(str(raw)) else "")


def _estimator(raw: Any, given: Given) -> Answer:
    return Answer({"algorithm.adv_estimator": _SAME_ESTIMATOR.get(str(raw), raw)})


def _manager(raw: Any, given: Given) -> Answer:
    """prime and batch score in parallel, which is always done."""
    same = str(raw) in ("prime", "batch")
    return Answer({"reward.manager": "naive" if same else raw})


def _metric(raw: Any, given: Given) -> Answer:
    if str(raw) != "seq_final_reward":
        return Answer({"algorithm.filter_groups.metric": raw})
    return Answer({"algorithm.filter_groups.metric": "score"}, gap="the score decides, without KL")


def _no_default(*defaults: str, why: str) -> Rule:
    return lambda raw, given: NOTHING if str(raw).lower() in defaults else Answer(gap=why)


def _switch(key: str, off: Any) -> Rule:
    """A switch that is on here, unless `key` says otherwise."""
    return lambda raw, given: Answer({key: raw_of(off)}) if str(raw).lower() == "false" else NOTHING


def _dataset_class(raw: Any, given: Given) -> Answer:
    why = "a class for verl has another interface: see custom_cls in ppo/data/README.md"
    return NOTHING if is_null(raw) else Answer(gap=why)


def _base(raw: Any, given: Given) -> Answer:
    return Answer(gap="name that YAML file too, before the script, for what it sets")


RULES: Mapping[str, Rule] = {
    "config-path": _base,
    "config-name": _base,
    "trainer.nnodes": lambda raw, given: Answer({"check.nnodes": raw}),
    "trainer.n_gpus_per_node": lambda raw, given: Answer({"check.nproc_per_node": raw}),
    "trainer.logger": lambda raw, given: loggers(raw, "jsonl"),
    "trainer.resume_mode": lambda raw, given: (
        NOTHING if str(raw) == "resume_path" else Answer({"trainer.resume_mode": raw})
    ),
    **{
        f"{section}.ppo_micro_batch_size{of_one}": _micro_batch(section, of_all=not of_one)
        for section in ("actor", "critic")
        for of_one in ("", "_per_gpu")
    },
    "actor.use_token_level_loss": lambda raw, given: Answer(
        {"actor.loss_agg_mode": "token-mean" if str(raw) == "True" else "seq-mean-token-mean"}
    ),
    "critic.ulysses_sequence_parallel_size": lambda raw, given: Answer(
        unneeded="it is actor.ulysses_sequence_parallel_size"
    ),
    **{
        f"{section}.rollout_n": lambda raw, given: NOTHING for section in ("actor", "ref", "critic")
    },
    "algorithm.adv_estimator": _estimator,
    "algorithm.filter_groups.metric": _metric,
    "reward_model.reward_manager": _manager,
    "reward.reward_manager.name": _manager,
    "data.custom_cls.path": _dataset_class,
    "data.custom_cls.name": _dataset_class,
    "model.path": _model,
    "rollout.name": _engine,
    f"{TURNS}enable": _multi_turn,
    f"{TURNS}format": _tool_format,
    f"{TURNS}max_assistant_turns": _of_turns("rollout.episode.max_turns"),
    f"{TURNS}max_turns": _of_turns("rollout.episode.max_turns"),
    f"{TURNS}function_tool_path": _of_turns("rollout.episode.path"),
    "rollout.top_k": lambda raw, given: Answer(
        {"rollout.top_k": raw_of(-1) if str(raw) == "0" else raw}
    ),
    "rollout.val_kwargs.do_sample": lambda raw, given: NOTHING,
    "rollout.val_kwargs.temperature": _val_temperature,
    "rollout.val_kwargs.top_k": _no_default("-1", "0", why="validation with top_k is not built"),
    "rollout.enable_chunked_prefill": _switch("rollout.engine_kwargs.chunked_prefill_size", -1),
    "rollout.enable_prefix_caching": _switch("rollout.engine_kwargs.disable_radix_cache", True),
}


def _whole(given: Given) -> Mapping[str, Answer]:
    """Defaults that differ; a budget of tokens for who counted sequences, above the longest one."""
    longest = sum(_number(given, f"data.max_{part}_length", 512) for part in ("prompt", "response"))
    budget = -(-longest // _number(given, "actor.ulysses_sequence_parallel_size", 1))
    default = schema()[BUDGET].default
    is_said = value_of(given, BUDGET) is not None or value_of(given, DYNAMIC) is not None
    fits = is_said or budget <= default
    return {BUDGET: NOTHING if fits else Answer({BUDGET: raw_of(budget)}), **differences(given)}


def _number(given: Given, name: str, default: int) -> int:
    text = str(value_of(given, name, default))
    return int(text) if text.isdigit() and int(text) > 0 else default
