"""From YAML and overrides to a frozen `Config`, or to one error that lists every problem.

Defaults < file < overrides. A key that is null or absent may take its value from other keys
(`derived`, `inherits`); this is resolved here, so that what is loaded, saved and printed is whole.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ppo.config.bounds import FilePath, broken_rule, unusual
from ppo.config.fields import MOST_SHOWN, ConfigError, Problem, short
from ppo.config.foreign import NOT_BUILT_VALUES, foreign_advice, is_read_inside, not_built
from ppo.config.root import Config
from ppo.config.schema import build, flatten, nest, schema, section_paths
from ppo.config.text import Mismatch, Plain, coerce, dump, duration, is_null, parse

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
    reader = _Reader()
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
    presets = ", ".join(sorted(file.name for file in CONFIG_FOLDER.glob("*po*.yaml")))
    raise ConfigError([Problem("--config", str(path), "no such file", f"configs/ has {presets}")])


def to_yaml(config: Config) -> str:
    """The resolved configuration as YAML; loading it gives an equal configuration."""
    return dump(nest(flatten(config)))


def from_yaml(text: str) -> Config:
    """The configuration that `to_yaml` wrote. Raises ConfigError."""
    reader = _Reader()
    reader.read_all(parse(text))
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


@dataclass
class _Reader:
    """Collects raw values by dotted path, and every problem on the way."""

    given: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    bad: set[str] = field(default_factory=set)

    def read_all(self, tree: dict[str, Any]) -> None:
        """Take in a whole file."""
        for name, raw in tree.items():
            self.read(raw, name)

    def read(self, raw: Any, path: str) -> None:
        """Take in a tree of raw values that stands at `path`."""
        if path in schema():
            self.given[path] = raw
        elif isinstance(raw, dict) and (path in section_paths() or is_read_inside(path)):
            for name, value in raw.items():
                self.read(value, f"{path}.{name}")
        elif path not in section_paths():
            self._unknown(path, raw)
        elif not is_null(raw):
            names = ", ".join(sorted(_names_in(path)))
            self._problem(path, _plain(raw), "is a section", f"its keys are {names}")

    def read_override(self, text: str) -> None:
        """Take in one `key.sub=value`, with or without leading dashes."""
        key, equals, value = text.partition("=")
        path = key.lstrip("-").strip()
        if not equals or not path:
            rule = f"{short(repr(text))} is not understood"
            self._problem("", text, rule, "overrides read key.sub=value")
            return
        try:
            raw = parse(value)
        except yaml.YAMLError:
            self._problem(path, value, "not valid YAML", "put it in quotes")
            return
        if not self._set_inside(path, raw):
            self.read(raw, path)

    def config(self) -> Config:
        """The configuration; keys with a problem hold their default."""
        values = {path: self._coerced(path) for path in self.given}
        resolved: dict[str, Any] = {}
        for path in schema():
            self._resolve(path, values, resolved)
        return build(Config, nest({path: resolved[path] for path in schema()}))

    def add_unrelated(self, problems: list[Problem]) -> None:
        """Further problems, but for those that only follow from a key that is bad already."""
        for problem in problems:
            text = str(problem)
            if not any(path and path in text for path in self.bad):
                self.problems.append(problem)

    def _set_inside(self, path: str, raw: Any) -> bool:
        """Override one entry of a free-form mapping, such as reward.function.kwargs.x=1."""
        heads = [key for key in schema() if path.startswith(key + ".")]
        if not heads or "dict" not in str(schema()[heads[0]].hint):
            return False
        node = self.given[heads[0]] = dict(self.given.get(heads[0]) or {})
        *sections, leaf = path[len(heads[0]) + 1 :].split(".")
        for section in sections:
            inner = node.get(section)
            node[section] = node = dict(inner) if isinstance(inner, dict) else {}
        node[leaf] = raw
        return True

    def _coerced(self, path: str) -> Any:
        raw, key = self.given[path], schema()[path]
        if key.derive and is_null(raw):
            return None
        try:
            value = coerce(duration(raw) if key.is_duration else raw, key.hint)
        except Mismatch as mismatch:
            texts = raw if isinstance(raw, list) else [raw]
            unbuilt = sorted(NOT_BUILT_VALUES.get(path, set()).intersection(map(str, texts)))
            fix = f"{', '.join(unbuilt)} is not built yet" if unbuilt else mismatch.fix
            if key.is_duration:
                fix = "seconds, or [D-]HH:MM:SS"
            self._problem(path, _plain(raw), mismatch.rule, fix)
            return None
        rule = broken_rule(key.hint, value)
        if rule is not None:
            self._problem(path, value, str(rule))
            return None
        return value

    def _resolve(self, path: str, values: dict[str, Any], resolved: dict[str, Any]) -> Any:
        """The value of a key: given, else derived, else its default."""
        if path in resolved:
            return resolved[path]
        key = schema()[path]
        is_set = path in values and path not in self.bad
        if is_set and not (key.derive and values[path] is None):
            value = values[path]
        elif key.derive:
            parts = [self._resolve(source, values, resolved) for source in key.derive.paths]
            value = parts[0] if len(parts) == 1 else sum(parts)
            value = value * key.derive.times if key.derive.times != 1 else value
        elif key.required:
            if path not in self.bad:
                self._problem(path, None, "is required", f"set it in the file or as {path}=...")
            value = coerce(Plain("tiny"), key.hint)
        else:
            value = key.default
        resolved[path] = value
        return value

    def _unknown(self, path: str, raw: Any) -> None:
        entry = not_built(path)
        if entry is not None:
            text = "null" if is_null(raw) else str(_plain(raw))
            if text != entry.off:
                self._problem(path, _plain(raw), "this feature is not built yet", entry.instead)
            return
        if len(self.problems) >= MOST_SHOWN:  # nobody reads its advice, which takes a while
            self._problem(path, _plain(raw), "unknown key")
            return
        advice = foreign_advice(path, set(schema()))
        if advice is not None:
            self._problem(path, _plain(raw), "is a key of another trainer", advice)
        else:
            self._problem(path, _plain(raw), "unknown key", _suggestion(path))

    def _problem(self, path: str, value: Any, rule: str, fix: str = "") -> None:
        self.problems.append(Problem(path, value, rule, fix))
        self.bad.add(path)


def _plain(raw: Any) -> Any:
    return str(raw) if isinstance(raw, str) else raw


def _names_in(section: str) -> set[str]:
    head = section + "." if section else ""
    return {path[len(head) :].split(".")[0] for path in schema() if path.startswith(head)}


def _suggestion(path: str) -> str:
    """The known key that was probably meant."""
    section, _, leaf = path.rpartition(".")
    near = difflib.get_close_matches(leaf, _names_in(section), n=1, cutoff=0.75)
    if near:
        return f"did you mean {section + '.' if section else ''}{near[0]}?"
    same_leaf = [known for known in schema() if known.endswith("." + leaf)]
    if same_leaf:
        best = difflib.get_close_matches(path, same_leaf, n=1, cutoff=0.0)
        return f"did you mean {best[0]}?"
    if section in section_paths():
        return f"the keys of {section} are {', '.join(sorted(_names_in(section)))}"
    return f"the sections are {', '.join(sorted(_names_in('')))}"
