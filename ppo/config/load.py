"""From YAML and overrides to a frozen `Config`, or to one error that lists every problem.

Defaults < file < overrides. A key that is null or absent may take its value from other keys
(`derived`, `inherits`); this is resolved here, so that what is loaded, saved and printed is whole.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from ppo.config.bounds import FilePath, broken_rule, unusual
from ppo.config.fields import ConfigError, Problem, Section
from ppo.config.reader import Reader
from ppo.config.root import Config
from ppo.config.schema import flatten, nest, schema
from ppo.config.text import dump, parse
from ppo.config.values import is_null

CONFIG_FOLDER = Path(__file__).resolve().parents[2] / "configs"


MOST_BYTES = 1 << 20
"""of a configuration file"""


def load_config(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    *,
    check: Callable[[Config], list[Problem]] | None = None,
) -> Config:
    """The configuration of a YAML file (as given, else in configs/; None = no file).

    `overrides` are `key.sub=value` or `--key.sub=value`. `check` gives further problems of a
    configuration, which are reported together with those found here. Raises ConfigError.
    """
    reader = Reader()
    reader.read_all(_read_yaml(find_config(path)) if path is not None else {})
    for override in overrides:
        reader.read_override(override)
    if path is not None and is_null(reader.given.get("trainer.experiment_name")):
        reader.given["trainer.experiment_name"] = Path(path).stem
    config = reader.config()
    if check is not None:
        reader.add_unrelated(check(config))
    if reader.problems:
        raise ConfigError(reader.problems)
    return config


def find_config(path: str | Path) -> Path:
    """The file of that name: as given, else in configs/. Raises ConfigError."""
    rule = broken_rule(FilePath, str(path))
    if rule is not None:
        raise ConfigError([Problem("--config", str(path), str(rule))])
    for candidate in (Path(path), Path("configs") / path, CONFIG_FOLDER / path):
        if candidate.is_file():
            return candidate
    if Path(path).is_dir():
        rule = "is a folder: name the file, such as one of configs/"
        raise ConfigError([Problem("--config", str(path), rule)])
    files = [*CONFIG_FOLDER.glob("*po*.yaml"), *CONFIG_FOLDER.glob("tiny/*.yaml")]
    presets = sorted(str(file.relative_to(CONFIG_FOLDER)) for file in files)
    stems = {Path(preset).stem: preset for preset in reversed(presets)}
    close = difflib.get_close_matches(Path(path).stem, stems, n=1)  # without what all end in
    meant = f"did you mean {stems[close[0]]}? " if close else ""
    fix = f"{meant}configs/ has {', '.join(presets)}"
    raise ConfigError([Problem("--config", str(path), "no such file", fix)])


def to_yaml(config: Config) -> str:
    """The resolved configuration as YAML; loading it gives an equal configuration."""
    return dump(nest({path: _as_given(value) for path, value in flatten(config).items()}))


def preset_of(config: Config, *, said: Sequence[str] = ()) -> str:
    """YAML of what differs from the defaults, and of the keys `said`; loading it gives an equal
    configuration, but for trainer.experiment_name."""
    values, shown = flatten(config), {}
    for path, key in schema().items():
        usual = key.default
        if key.derive is not None:
            parts = [values[source] for source in key.derive.paths]
            usual = (
                parts[0] if key.derive.times == len(parts) == 1 else key.derive.times * sum(parts)
            )
        if path in said or key.required or values[path] != usual:
            shown[path] = _as_given(values[path])
    return dump(nest(shown))


def _as_given(value: Any) -> Any:
    """Sections that stand in a mapping as mappings."""
    if not isinstance(value, dict):
        return value
    return {k: vars(v) if isinstance(v, Section) else v for k, v in value.items()}


def from_yaml(text: str) -> Config:
    """The configuration that `to_yaml` wrote. Raises ConfigError."""
    reader = Reader()
    try:
        tree = parse(text)
    except yaml.YAMLError as error:
        raise ConfigError([Problem("", None, f"not valid YAML: {error}")]) from None
    reader.read_all(tree if isinstance(tree, dict) else {})
    config = reader.config()
    if reader.problems:
        raise ConfigError(reader.problems)
    return config


def changed_keys(old: Config, new: Config) -> list[str]:
    """What differs between the configuration of a checkpoint and the present one and may not.

    Each entry reads `path: old -> new`. Sharding, budgets, lengths of the run and the like may
    change at a resume: their fields say so (`may_change`).
    """
    before, after = flatten(old), flatten(new)
    return [
        f"{path}: {before[path]!r} -> {after[path]!r}"
        for path, key in schema().items()
        if before[path] != after[path] and not key.may_change
    ]


def unusual_values(config: Config) -> Iterator[str]:
    """One line for each number outside of its usual range, where it was said first."""
    values = flatten(config)
    for path, key in schema().items():
        value, bound = values[path], unusual(key.hint, values[path])
        follows = key.derive is not None and values[key.derive.paths[0]] == value
        if bound is not None and not follows:
            yield f"{path} = {value}: {bound.usual_in_short()}"


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            rule = f"is longer than {MOST_BYTES >> 20} MiB: no configuration"
            raise ConfigError([Problem("--config", str(path), rule)])
        tree = parse(content.decode("utf-8"))
    except OSError as error:
        rule = f"cannot be read: {error.strerror}"
        raise ConfigError([Problem("--config", str(path), rule)]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([Problem("--config", str(path), f"not valid YAML: {error}")]) from None
    if is_null(tree):
        return {}
    if not isinstance(tree, dict):
        raise ConfigError([Problem("--config", str(path), "must be a mapping of sections")])
    return tree
