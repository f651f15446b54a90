"""Keys of another trainer into ours, with what is lost and what had to be said.

Owns the order in which a key is answered: a rule of its trainer, our own name, the tables in
ppo/config/trainers/. Every value is read as its key here would read it; one that does not fit is
reported. Must not know any trainer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args

from ppo.config.bounds import broken_rule
from ppo.config.fields import Problem, short
from ppo.config.foreign import Foreign, not_built
from ppo.config.migrate.given import Given
from ppo.config.reader import Reader
from ppo.config.root import Config
from ppo.config.schema import Key, flatten, schema
from ppo.config.sections.trainer import LoggerName
from ppo.config.text import Plain, parse
from ppo.config.values import Mismatch, coerce, is_null

_UNKNOWN_TEXT = re.compile(r"\$\{(\w+)\}|\$\(|`")
_SWITCHES = ("enable", "enabled", "url", "tool", "class_path")
"""keys that switch their section on"""
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "float": "float32"}


class Answer(NamedTuple):
    """What becomes of a key; all empty = nothing, and nobody needs to know."""

    values: Mapping[str, Any] = {}
    """keys of ours, with raw values"""
    gap: str = ""
    """what it asks for does not happen, or has to be written by hand: why"""
    unneeded: str = ""
    """why nobody needs it here"""


Rule = Callable[[Any, Given], Answer]
"""Given the raw value of a key, and all of them."""
NOTHING = Answer()
BY_TOKENS = (
    "micro-batches are cut by tokens, actor.ppo_max_token_len_per_gpu, and change no gradient; "
    "actor.use_dynamic_bsz=false cuts them by sequences"
)
UNBOUNDED_KL_COEF = {"algorithm.kl_ctrl.min": 0.0, "algorithm.kl_ctrl.max": 1000}
"""of an adaptive coefficient without bounds; the largest range that is admitted here"""


class Dialect(NamedTuple):
    """A trainer to translate from."""

    name: str
    own_name: Callable[[str], str]
    """what a key would be called here, if it has the same name"""
    lookup: Callable[[str], Foreign | None]
    rule: Callable[[str], Rule | None]
    """of that name, which wins over all tables"""
    whole: Callable[[Given], Mapping[str, Answer]]
    """what follows from several keys together, or from none, by what it is about"""
    defaults: Mapping[str, Any]
    """its defaults of our keys, as YAML has them: those here that differ are written out"""


class Translation(NamedTuple):
    """A configuration of ours, and all that it does not hold."""

    values: dict[str, Any]
    """of our keys, of their types"""
    defaults: dict[str, Any]
    """defaults of the other trainer where ours are others: part of the configuration too"""
    gaps: dict[str, str]
    """`key = value` of the other trainer -> why it is not in the configuration"""
    unneeded: dict[str, str]
    missing: list[str]
    """keys that must be filled in"""


def translate(dialect: Dialect, given: Given) -> Translation:
    """Answer every key. What the trainer does by default is written where ours does otherwise."""
    work = _Work(dialect, given)
    paths = {dialect.own_name(path): path for path in given.keys}  # the last of equal names
    for name in sorted(paths, key=lambda name: name not in schema()):  # ours before what is like it
        work.answer(paths[name])
    for subject, answer in dialect.whole(given).items():
        work.take(subject, Plain(""), answer)
    for word in given.not_understood:
        work.gaps[word] = "is not understood: say its value in the place of this"
    return work.result()


class _Work:
    def __init__(self, dialect: Dialect, given: Given) -> None:
        self.dialect, self.given = dialect, given
        self.raw: dict[str, Any] = {}
        self.gaps: dict[str, str] = {}
        self.unneeded: dict[str, str] = {}

    def answer(self, path: str) -> None:
        raw, name = self.given.keys[path], self.dialect.own_name(path)
        unknown = _UNKNOWN_TEXT.search(str(raw))
        if unknown:
            hint = f"; {unknown[1]}=... behind the command says it" if unknown[1] else ""
            self.gaps[_shown(path, raw)] = f"only a run of the script tells its value{hint}"
        elif rule := self.dialect.rule(name):
            self.take(path, raw, rule(raw, self.given))
        elif name in schema():
            self.take(path, raw, Answer({name: raw}))
        else:
            self.take(path, raw, self._of_tables(path, raw))

    def _of_tables(self, path: str, raw: Any) -> Answer:
        other, entry = self.dialect.lookup(path), not_built(path)
        asks = not (_asks_for_nothing(raw) or _is_switched_off(path, self.given.keys))
        if entry is not None:
            is_off = _text(raw) == entry.off
            return Answer(gap=f"is not built yet; {entry.instead}" if asks and not is_off else "")
        if other is None:
            return Answer(
                gap=f"is no key that {self.dialect.name} is known to have" if asks else ""
            )
        if other.ours is not None:
            return Answer({} if is_null(raw) else {other.ours: raw})
        if other.advice.endswith("; remove it") and "not built" not in other.advice:
            return Answer(unneeded=other.advice.removesuffix("; remove it") if asks else "")
        return Answer(gap=other.advice.removesuffix("; remove it") if asks else "")

    def take(self, path: str, raw: Any, answer: Answer) -> None:
        """Keep what an answer says; a value that its key does not admit is a gap."""
        for ours, value in answer.values.items():
            problem, value = _read(ours, value)
            if ours in self.raw and self.raw[ours] != value:
                self.gaps[_shown(path, raw)] = (
                    f"here it is {ours}, which is {_text(self.raw[ours])}"
                )
            elif problem is None:
                self.raw[ours] = value
            elif not is_null(value):
                self.gaps[_shown(path, raw)] = f"{ours} {problem}"
        if answer.gap:
            self.gaps[_shown(path, raw)] = answer.gap
        if answer.unneeded:
            self.unneeded[_shown(path, raw)] = answer.unneeded

    def result(self) -> Translation:
        defaults: dict[str, Any] = {}
        for in_critic in (False, True):  # whose defaults follow the actor's
            config, _ = self._config(defaults)
            now = flatten(config)
            for path, text in self.dialect.defaults.items():
                is_critics = path.startswith("critic.")
                if is_critics is not in_critic or (is_critics and not config.critic_enabled):
                    continue
                value = coerce(parse(str(text)), schema()[path].hint)
                if path not in self.raw and value != now[path]:
                    defaults[path] = value
        config, problems = self._config(defaults)
        missing = [path for path, key in schema().items() if key.required and path not in self.raw]
        for problem in problems:  # what stands inside of a mapping
            if problem.path not in missing:
                self.gaps[problem.path] = str(problem)
                self._drop(lambda path, bad=problem.path: (path + ".").startswith(bad + "."))
        self._drop_without_effect(config)
        given = self._reader().given
        values = {
            path: coerce(given[path], key.hint)
            for path, key in schema().items()
            if path in given and not (key.derive and is_null(given[path]))
        }
        return Translation(values, defaults, self.gaps, self.unneeded, missing)

    def _drop_without_effect(self, config: Config) -> None:
        """Keys of models that the run does not have."""
        used = {"critic.": config.critic_enabled, "reward.model.": config.reward.model.enable}
        for section in (section for section, is_used in used.items() if not is_used):
            if self._drop(lambda path, section=section: path.startswith(section)):
                self.unneeded[f"{section}*"] = "the run has no such model"

    def _drop(self, is_unwanted: Callable[[str], bool]) -> bool:
        """Forget keys; whether there were any."""
        kept = {path: raw for path, raw in self.raw.items() if not is_unwanted(path)}
        dropped, self.raw = len(kept) < len(self.raw), kept
        return dropped

    def _reader(self) -> Reader:
        reader = Reader()
        for path, raw in self.raw.items():
            reader.put(raw, path)
        return reader

    def _config(self, defaults: Mapping[str, Any]) -> tuple[Config, list[Problem]]:
        reader = self._reader()
        for path, value in defaults.items():
            reader.put(raw_of(value), path)
        return reader.config(), reader.problems


def loggers(names: Any, *always: str) -> Answer:
    """trainer.logger of another trainer's names, in our order, with those that are `always`."""
    asked = {str(name) for name in (names if isinstance(names, list) else [names])}
    ours = [name for name in get_args(LoggerName) if name in asked or name in always]
    others = [name for name in asked - {*ours, "none", "all"} if not is_null(Plain(name))]
    gap = f"there is no {', '.join(sorted(others))} here" if others else ""
    return Answer({"trainer.logger": ours}, gap)


def prompt_files(raw: Any) -> Answer:
    """data.train_files, where names are those of files."""
    names = [str(name) for name in (raw if isinstance(raw, list) else str(raw).split(","))]
    if all(name == "tiny" or name.endswith((".parquet", ".jsonl", ".json")) for name in names):
        return Answer({"data.train_files": names})
    return Answer(
        gap="data sets become files first, `python -m ppo.data.prepare --help` lists how; then say "
        "data.train_files"
    )


def raw_of(value: Any) -> Any:
    """A value as `parse` gives it."""
    if isinstance(value, dict):
        return {name: raw_of(item) for name, item in value.items()}
    if isinstance(value, list):
        return [raw_of(item) for item in value]
    if value is None or isinstance(value, bool):
        return Plain({None: "null", True: "true", False: "false"}[value])
    return value if isinstance(value, str) else Plain(repr(value))


def _read(path: str, raw: Any) -> tuple[str | None, Any]:
    """What is wrong with a value of our key, or None; and the value, in our words."""
    key: Key | None = schema().get(path)
    if key is None:
        return None, raw  # inside of a mapping
    if isinstance(raw, str) and raw in DTYPES and "bfloat16" in str(key.hint):
        raw = Plain(DTYPES[raw])
    if key.derive and is_null(raw):
        return None, raw
    try:
        rule = broken_rule(key.hint, coerce(raw, key.hint))
    except Mismatch as mismatch:
        return f"{mismatch.rule}; {mismatch.fix}" if mismatch.fix else mismatch.rule, raw
    return None if rule is None else str(rule), raw


def _asks_for_nothing(raw: Any) -> bool:
    return (
        is_null(raw) or raw in ([], {}) or _text(raw).lower() in ("false", "", "none", "0", "0.0")
    )


def _is_switched_off(path: str, keys: Mapping[str, Any]) -> bool:
    """Whether a section around the key says that it does nothing, as whole files of defaults do."""
    parts = path.split(".")
    for length in range(1, len(parts)):
        *above, name = parts[:length]
        switches = [*(f"{name}.{switch}" for switch in _SWITCHES), f"use_{name}"]
        paths = [".".join([*above, switch]) for switch in switches]
        if any(path in keys and _asks_for_nothing(keys[path]) for path in paths):
            return True
    return False


def _text(raw: Any) -> str:
    return str(raw) if isinstance(raw, str) else re.sub(r"'", "", str(raw))


def _shown(path: str, raw: Any) -> str:
    return f"{path} = {short(_text(raw))}" if _text(raw) else path
