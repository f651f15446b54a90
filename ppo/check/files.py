"""What a run needs on this machine: files, packages, and what is wrong inside the files.

Owns looking, not loading: must not load a model or import transformers.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ppo.check.episodes import episode_file_problems
from ppo.check.model_folder import INDEX, model_problems
from ppo.config import ENGINE_TRAITS, PACKAGES_OF_LOGGERS, Config, Problem, RolloutConfig
from ppo.data.columns import CHARS_PER_TOKEN, QUICK_ROWS, check_data_files, parse_row
from ppo.data.rows import DataError, find_files, read_rows
from ppo.data.tokenizer import token_difference
from ppo.model_shapes import (
    UNREADABLE,
    config_json,
    file_of_model,
    rope_problem,
    sglang_problem,
    sp_problem,
)
from ppo.plugin import PluginError, parse_plugin
from ppo.rewards.contract import Function, RewardError
from ppo.rewards.function import check_function, functions_of
from sharding.heads import text_value

# where this project keeps models and checkpoints: never the name of an organisation
_LOCAL_FOLDERS = ("models", "runs", "data")
# one of these is there where weights are
_WEIGHTS = ("model.safetensors", INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")


def missing_files(config: Config) -> list[Problem]:
    """Files and packages that the run needs and this machine lacks."""
    found = [*_missing_data(config), *_missing_models(config)]
    plugins = [("reward.function.path", path) for path in config.reward.function.path or ()]
    if config.data.custom_cls.path is not None:
        plugins.append(("data.custom_cls.path", config.data.custom_cls.path))
    if config.rollout.episode.path is not None:
        plugins.append(("rollout.episode.path", config.rollout.episode.path))
    found += [
        Problem(key, path, "no such file", _looked_for(path))
        for key, path in plugins
        if not _is_file(path)
    ]
    replay = config.rollout.episode.replay
    if replay is not None and not (_is_file(replay) or (Path(replay) / "samples").is_dir()):
        rule = "neither a folder of a run with samples/ nor a file of samples"
        found.append(Problem("rollout.episode.replay", replay, rule))
    resume = config.trainer.resume_path
    if resume is not None and not _holds_checkpoint(Path(resume)):
        rule = "no checkpoint there" if Path(resume).is_dir() else "no such folder"
        found.append(Problem("trainer.resume_mode", resume, rule, "or use auto or disable"))
    return [*found, *_missing_package(config.rollout), *_missing_trackers(config)]


def _missing_trackers(config: Config) -> Iterator[Problem]:
    for name in config.trainer.logger:
        if name in PACKAGES_OF_LOGGERS and not _is_installed(name):
            rule = f"the package {name} is not installed"
            fix = f"pip install -e '.[{name}]', or leave it out"
            yield Problem("trainer.logger", name, rule, fix)


def _is_installed(package: str) -> bool:
    """A folder of that name, as wandb leaves one where it runs offline, is no package."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _missing_package(rollout: RolloutConfig) -> Iterator[Problem]:
    kind = rollout.engine_kind(cuda=True)
    package = ENGINE_TRAITS[kind].package
    if package is not None and importlib.util.find_spec(package) is None:
        rule = f"the package {package} is not installed"
        fix = f"pip install -e '.[{package}]', or use rollout.engine=auto"
        yield Problem("rollout.engine", kind, rule, fix)


def wrong_contents(config: Config, model_config: Path | None = None) -> list[Problem]:
    """What is wrong inside the files that are there: first rows, signature of the reward.

    model_config: the config.json of model.path, where it is given apart from the model.
    """
    found = []
    for key, named in config.prompt_files.items():
        files = [f for f in named if f == "tiny" or _found(f) is None]
        try:
            if files:
                check_data_files(files, config.data, need_data_source=config.needs_data_source)
        except DataError as error:
            found.append(Problem(key, None, str(error)))
    custom = config.data.custom_cls
    if custom.path is not None and custom.name is not None and _is_file(custom.path):
        try:
            parse_plugin(custom.path, custom.name)
        except PluginError as error:
            found.append(Problem("data.custom_cls", None, str(error)))
    found += episode_file_problems(config.rollout.episode)
    for function in _functions(config):
        try:
            check_function(function)
        except RewardError as error:
            found.append(Problem("reward.function.path", function.path, str(error)))
    return [*found, *_tokens_of_ref(config), *_families(config, model_config)]


def _families(config: Config, model_config: Path | None) -> Iterator[Problem]:
    """Models that are here and whose sequences would not be the same in every batch or engine, or
    cannot be cut."""
    for role in config.models.values():
        data, is_actor = config.data, role.name == "actor"
        longest = data.longest_sampled if is_actor else data.max_length
        file = config_json(role.path)
        if model_config is not None and role.path == config.model.path:
            file = model_config
        if file is None or (role.path == config.model.path and role.path_key != "model.path"):
            continue
        try:
            keys = _overridden(json.loads(file.read_bytes()), config.model_of(role).override_config)
            few = config.position_problem(role, text_value(keys, "max_position_embeddings"))
            ropes, uncut = rope_problem(keys, longest), sp_problem(keys)
            on_cpu = config.trainer.device == "cpu"
            engine = sglang_problem(keys, longest, on_cpu=on_cpu)
        except UNREADABLE:  # said where its sizes are read
            continue
        if few is not None:
            yield few
        if ropes is not None:
            yield Problem(role.path_key, role.path, ropes)
        kind = config.rollout.engine_kind(cuda=True)
        if engine is not None and kind == "sglang" and role.path_key == "model.path":
            yield Problem("rollout.engine", kind, engine)
        sp = config.actor.ulysses_sequence_parallel_size
        if uncut is not None and sp > 1:
            yield Problem("actor.ulysses_sequence_parallel_size", sp, f"{role.path}: {uncut}")


def _overridden(keys: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """The keys of a config.json as a start reads them; of a multimodal one the language model's."""
    if isinstance(keys.get("text_config"), dict):
        return {**keys, "text_config": {**keys["text_config"], **override}}
    return {**keys, **override}


def _tokens_of_ref(config: Config) -> Iterator[Problem]:
    """Another model as reference whose tokenizer is here, and another one than the actor's."""
    role = config.models.get("ref")
    if role is None or role.path == config.model.path:
        return
    files = [file_of_model(p, "tokenizer.json") for p in (config.model.tokenizer_path, role.path)]
    if None in files or files[0] == files[1]:
        return
    from tokenizers import Tokenizer  # a tenth of a second; transformers would take five

    try:
        own, other = (Tokenizer.from_file(str(file)).get_vocab() for file in files)
    except Exception:  # it raises nothing more specific; a run says which file it is
        return
    difference = token_difference(own, other, max(own.values(), default=-1) + 1)
    if difference is not None:
        rule = f"its tokenizer is not that of {config.model.tokenizer_path}: {difference}"
        yield Problem(role.path_key, role.path, rule, "use a model with the same tokenizer")


def _functions(config: Config) -> list[Function]:
    """The reward functions whose files are there."""
    try:
        functions = functions_of(config.reward.function)
    except RewardError:  # said by ppo/check/rules.py
        return []
    return [function for function in functions if function.path and _is_file(function.path)]


def _is_file(path: str) -> bool:
    return Path(path).is_file()


def overlong_prompts(config: Config) -> Iterator[str]:
    """A warning for each file whose first prompts are all too long, their template aside.

    Nothing is said where the tokenizer is not here or has no tokenizer.json, nor of data that is
    wrong in itself: `wrong_contents` says that.
    """
    file = file_of_model(config.model.tokenizer_path, "tokenizer.json")
    files = [f for f in config.data.train_files if f != "tiny" and _found(f) is None]
    if file is None or not files or config.data.custom_cls.path is not None:
        return
    from tokenizers import Tokenizer  # a tenth of a second; transformers would take five

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # it raises nothing more specific
        yield f"model.tokenizer_path: {file} cannot be read: {error}"
        return
    most = config.data.max_prompt_length
    for path in find_files(files):
        prompts = _first_prompts(path, config)
        lengths = [_num_tokens(tokenizer, messages, most) for messages in prompts]
        if lengths and min(lengths) > most:
            yield (
                f"data.max_prompt_length = {most}: the first {len(lengths)} prompts of {path} have "
                f"{min(lengths)} to {max(lengths)} tokens or more, all too long"
            )


def _first_prompts(path: Path, config: Config) -> list[list[dict[str, str]] | str]:
    try:
        rows = list(islice(read_rows(path), QUICK_ROWS))
        return [parse_row(row, config.data, need_data_source=False).messages for row in rows]
    except DataError:
        return []


def _num_tokens(tokenizer: Any, messages: list[dict[str, str]] | str, most: int) -> int:
    """Tokens of the texts alone, of long ones the start: no prompt has less."""
    texts = [messages] if isinstance(messages, str) else [m["content"] for m in messages]
    starts = [text[: CHARS_PER_TOKEN * most] for text in texts]  # megabytes would take minutes
    return sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in starts)


def _holds_checkpoint(folder: Path) -> bool:
    """Whether the folder is a checkpoint or a run with one, damaged or not."""
    return any(
        next(folder.glob(pattern), None) is not None
        for pattern in ("manifest.json", "step_*/manifest.json", "checkpoints/step_*/manifest.json")
    )


def _missing_data(config: Config) -> Iterator[Problem]:
    for key, patterns in config.prompt_files.items():
        for pattern in patterns:
            error = None if pattern == "tiny" else _found(pattern)
            if error is not None:
                is_absent = error.problem in ("no such file", "no file matches")
                advice = [_looked_for(pattern), "python -m ppo.data.prepare writes data"]
                fix = "; ".join(filter(None, advice)) if is_absent else ""
                yield Problem(key, pattern, error.problem, fix)


def _looked_for(path: str) -> str:
    """Where a relative path leads, which may be another folder than was meant."""
    is_whole = path.startswith("~") or Path(path).is_absolute()
    return "" if is_whole else f"it is looked for in {Path.cwd()}"


def _found(pattern: str) -> DataError | None:
    """Why the loader would find no file there; None when it does."""
    try:
        find_files([pattern])
    except DataError as error:
        return error
    return None


def _missing_models(config: Config) -> Iterator[Problem]:
    for key, path in _model_paths(config).items():
        if Path(path).exists():
            if key != "model.tokenizer_path" or not Path(path).is_dir():
                for rule, fix in model_problems(Path(path)):
                    yield Problem(key, path, rule, fix)
        elif not is_hub_name(path):
            yield Problem(
                key, path, "no such folder", "or use a name of the Hub: ORGANISATION/NAME"
            )


def to_download(config: Config) -> list[Problem]:
    """Models that a run would download first: names of the Hub that its cache lacks."""
    return [
        Problem(key, path, "a run downloads it", f"hf download {path}")
        for key, path in _model_paths(config).items()
        if not Path(path).is_dir() and is_hub_name(path) and not _is_cached(path, key)
    ]


def _is_cached(path: str, key: str) -> bool:
    """Whether the Hub's cache has more of a model than the config.json that `--check` reads."""
    needed = ("tokenizer_config.json",) if key == "model.tokenizer_path" else _WEIGHTS
    return any(file_of_model(path, name) is not None for name in needed)


def _model_paths(config: Config) -> dict[str, str]:
    """Each model path once, by the first key that names it."""
    paths = {config.model.path: "model.path"}
    paths.setdefault(config.model.tokenizer_path, "model.tokenizer_path")
    for role in config.models.values():
        paths.setdefault(role.path, role.path_key)
    return {key: path for path, key in paths.items() if path != "tiny"}


def is_hub_name(path: str) -> bool:
    """ORGANISATION/NAME, and not a folder of ours that is not there (yet)."""
    owner, slash, name = path.partition("/")
    is_name = bool(slash and owner and name) and "/" not in name and owner[0] not in ".~"
    return is_name and owner not in _LOCAL_FOLDERS and not Path(owner).is_dir()
