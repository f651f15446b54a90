"""What is given for each key, and what becomes of it: raw values, then a whole `Config`.

Owns the problems of single keys and where a value comes from that is not given. Must not know
files, nor rules over several keys.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from ppo.config.bounds import broken_rule, home_expanded
from ppo.config.fields import Problem, short
from ppo.config.foreign import foreign, is_read_inside, not_built
from ppo.config.root import Config
from ppo.config.schema import build, nest, schema, section_paths
from ppo.config.text import Plain, parse
from ppo.config.values import Mismatch, coerce, duration, is_null

MOST_ADVISED = 500
"""problems after which it is no longer looked up what an unknown key may mean: it takes a while"""


@dataclass
class Reader:
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
        path = key.lstrip("-+").strip()  # Hydra writes +key=value
        if path.startswith("~"):
            self._unset(path[1:])
            return
        if not equals or not path:
            rule = f"{short(repr(text))} is not understood"
            self._problem("", text, rule, "overrides read key.sub=value")
            return
        try:
            raw = parse(value)
        except yaml.YAMLError:
            self._problem(path, value, "not valid YAML", "put it in quotes")
            return
        self.put(raw, path)

    def put(self, raw: Any, path: str) -> None:
        """Take in a raw value that stands at `path`, or inside of a mapping there."""
        if not self._set_inside(path, raw):
            self.read(raw, path)

    def _unset(self, path: str) -> None:
        """Hydra's ~key, a key or a section: back to the default."""
        inside = [key for key in self.given if key == path or key.startswith(path + ".")]
        if not inside and path not in {*schema(), *section_paths()}:
            self._unknown(path, None)
        for key in inside:
            del self.given[key]

    def config(self) -> Config:
        """The configuration; keys with a problem hold their default."""
        values = {path: self._coerced(path) for path in self.given}
        resolved: dict[str, Any] = {}
        for path in schema():
            self._resolve(path, values, resolved)
        return build(Config, nest({path: resolved[path] for path in schema()}))

    def add_unrelated(self, problems: list[Problem]) -> None:
        """Further problems, but for those that only follow from a key that is bad already."""
        bad = [re.compile(rf"(?<![\w.]){re.escape(path)}(?![\w])") for path in self.bad if path]
        for problem in problems:
            text = str(problem)
            if not any(path.search(text) for path in bad):
                self.problems.append(problem)

    def _set_inside(self, path: str, raw: Any) -> bool:
        """Override one entry of a free-form mapping, such as reward.function.kwargs.x=1."""
        heads = [key for key in schema() if path.startswith(key + ".")]
        if not heads or "dict" not in str(schema()[heads[0]].hint):
            return False
        node = self.given[heads[0]] = dict(self.given.get(heads[0]) or {})
        inside = path[len(heads[0]) + 1 :]
        names_have_dots = "float" in str(schema()[heads[0]].hint)  # files and data sources
        *sections, leaf = [inside] if names_have_dots else inside.split(".")
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
            fix = "seconds, or [D-]HH:MM:SS" if key.is_duration else mismatch.fix
            if mismatch.at:
                self._problem(f"{path}.{mismatch.at}", _plain(mismatch.value), mismatch.rule, fix)
                self.bad.add(path)
            else:
                self._problem(path, _plain(raw), mismatch.rule, fix)
            return None
        rule = broken_rule(key.hint, value)
        if rule is not None:
            self._problem(path, value, str(rule))
            return None
        return home_expanded(key.hint, value)

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
        is_many = len(self.problems) >= MOST_ADVISED
        other = None if is_many else foreign(path, set(schema()))
        if other is None:
            fix = "" if is_many else _suggestion(path)
            self._problem(path, _plain(raw), "unknown key", fix)
            return
        self.bad.add(path)
        rule = "is a key of another trainer"
        self.problems.append(Problem(path, _plain(raw), rule, other.advice, is_listed=True))
        # so that what is wrong with the value is said at once
        if other.ours is not None and not self._set_inside(other.ours, raw):
            self.given.setdefault(other.ours, raw)

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
