"""What a user has of another trainer: files and words of a command line, as one flat table.

Owns which file is read how, which command of a script is the training, and what its words say.
Must not know what any key means.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ppo.config.fields import ConfigError, Problem
from ppo.config.migrate.shell import ShellError, commands_of
from ppo.config.text import Plain, parse

MOST_BYTES = 1 << 20
"""of a file"""
_VARIABLE = re.compile(r"([A-Z_][A-Z0-9_]*)=(.*)", re.DOTALL)
_OVERRIDE = re.compile(r"(?:\+\+|\+|~)?([A-Za-z_][\w./@-]*)=(.*)", re.DOTALL)
_FLAG = re.compile(r"--([A-Za-z_][\w.-]*)(?:=(.*))?", re.DOTALL)
_INTERPOLATION = re.compile(r"\$\{([^${}]*)\}")
_LAUNCHERS = {
    **dict.fromkeys(("nnodes", "num_machines"), "nnodes"),
    **dict.fromkeys(("nproc_per_node", "nproc-per-node"), "nproc_per_node"),
    "num_processes": "world_size",
}
"""options of torchrun and accelerate, and what they count"""


class Given(NamedTuple):
    """All that was given; later words win."""

    keys: dict[str, Any]
    """raw values (as `parse` gives them) by dotted path"""
    ranks: dict[str, int]
    """nnodes, nproc_per_node or world_size, where a launcher says so"""
    not_understood: list[str]
    program: str = ""
    """the class of TRL, or the module, that reads them; empty = nobody knows"""
    calls: frozenset[str] = frozenset()
    """the classes that Python files call"""


def read_given(words: Sequence[str], *, config_classes: Sequence[str] = ()) -> Given:
    """Read files (YAML, shell, Python; - is a script on stdin), overrides and flags.

    `NAME=value` in capitals stands for a variable of the scripts. config_classes: calls of these
    are read from Python files, and the first that is called is the program. Raises ConfigError.
    """
    variables = {match[1]: match[2] for word in words if (match := _VARIABLE.fullmatch(word))}
    given, rest = Given({}, {}, []), []
    is_flags = False
    for word in words:
        if word == "-" or (not is_flags and _is_file(word)):
            text = sys.stdin.read() if word == "-" else _text_of(Path(word))
            given = _joined(given, _read_file(word, text, variables, config_classes))
        elif not _VARIABLE.fullmatch(word):
            rest.append(word)
            flag = _FLAG.fullmatch(word)
            is_value = not word.startswith("-") and "=" not in word
            is_flags = flag[2] is None if flag else is_flags and is_value
    return _resolved(_joined(given, _read_words(rest)))


def nested(keys: Mapping[str, Any], tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Leaves of a tree by dotted path, over those of `keys`."""
    found = dict(keys)
    for name, value in tree.items():
        inside = f"{path}.{name}" if path else name
        is_section = isinstance(value, dict) and value
        found = nested(found, value, inside) if is_section else {**found, inside: value}
    return found


def _is_file(word: str) -> bool:
    """Whether the word names a file that is there. Raises ConfigError for one that is not."""
    if word.startswith(("-", "+", "~")) or "=" in word:
        return False
    if not Path(word).is_file():
        raise ConfigError([Problem("", word, f"{word}: no such file")])
    return True


def _text_of(path: Path) -> str:
    try:
        content = path.read_bytes()[: MOST_BYTES + 1]
        if len(content) <= MOST_BYTES:
            return content.decode("utf-8")
        rule = f"is longer than {MOST_BYTES >> 20} MiB: no configuration"
    except OSError as error:
        rule = f"cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        rule = "is not UTF-8"
    raise ConfigError([Problem("", str(path), f"{path}: {rule}")])


def _read_file(
    name: str, text: str, variables: Mapping[str, str], config_classes: Sequence[str]
) -> Given:
    suffix = Path(name).suffix
    try:
        if suffix in (".yaml", ".yml"):
            tree = parse(text)
            return Given(nested({}, tree if isinstance(tree, dict) else {}), {}, [])
        if suffix == ".py":
            return _read_python(text, config_classes)
        return _read_command(commands_of(text, variables))
    except (yaml.YAMLError, ShellError, SyntaxError) as error:
        raise ConfigError([Problem("", name, f"{name} is not understood: {error}")]) from None


def _read_command(commands: Sequence[Sequence[str]]) -> Given:
    """The command that says most."""
    read = [
        _read_words(words[end:], words[:end]) for words in commands for end in [_program(words)]
    ]
    return max(read, key=lambda given: len(given.keys), default=Given({}, {}, []))


def _program(words: Sequence[str]) -> int:
    """How many words of a command are the launcher's and the program's name."""
    if words[0] == "trl":
        return 2
    for number, word in enumerate(words):
        if word in ("-m", "--module") and number + 1 < len(words):
            return number + 2
        if word.endswith(".py") and "=" not in word:
            return number + 1
    return 0


def _read_words(words: Sequence[str], launcher: Sequence[str] = ()) -> Given:
    """`key=value` as Hydra has it, `--flag value`, `--flag=value`, `--flag` (true)."""
    given = Given({}, {}, [], launcher[-1] if launcher else "")
    for name, values in _flags(launcher, given.not_understood):
        if name in _LAUNCHERS and values and values[0].isdigit():
            given.ranks[_LAUNCHERS[name]] = int(values[0])
    given.not_understood.clear()
    for name, values in _flags(words, given.not_understood):
        parsed = [_parsed(value) for value in values]
        given.keys[name] = parsed[0] if len(parsed) == 1 else parsed or Plain("true")
    return given


def _flags(words: Sequence[str], left: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Names with the texts behind them; words that belong to none go to `left`."""
    name, values = "", []
    for word in words:
        flag, override = _FLAG.fullmatch(word), _OVERRIDE.fullmatch(word)
        if flag or override:
            if name:
                yield name, values
            name, values = "", []
        if flag and flag[2] is None:
            name = flag[1]
        elif flag or override:
            match = flag or override
            assert match is not None
            yield match[1], [match[2]]
        elif name:
            values.append(word)
        elif word.startswith("~"):  # Hydra: without this key
            yield word[1:], ["null"]
        else:
            left.append(word)
    if name:
        yield name, values


def _parsed(text: str) -> Any:
    try:
        return parse(text)
    except yaml.YAMLError:
        return text


def _read_python(text: str, config_classes: Sequence[str]) -> Given:
    """Keyword arguments of the calls of these classes, where they are written out."""
    given, calls = Given({}, {}, []), set[str]()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        if name not in config_classes:
            continue
        calls.add(name)
        for keyword in node.keywords:
            try:
                value = ast.literal_eval(keyword.value)
                given.keys[str(keyword.arg)] = parse(yaml.safe_dump(value).removesuffix("...\n"))
            except (ValueError, yaml.YAMLError):
                given.not_understood.append(f"{keyword.arg}={ast.unparse(keyword.value)}")
    program = next((name for name in config_classes if name in calls), "")
    return given._replace(program=program, calls=frozenset(calls))


def _joined(old: Given, new: Given) -> Given:
    return Given(
        {**old.keys, **new.keys},
        {**old.ranks, **new.ranks},
        [*old.not_understood, *new.not_understood],
        new.program or old.program,
        old.calls | new.calls,
    )


def _resolved(given: Given) -> Given:
    """With OmegaConf's `${other.key}` filled in, as far as the others are there."""
    keys = {path: _filled(value, path, given.keys, 0) for path, value in given.keys.items()}
    return given._replace(keys=keys)


def _filled(value: Any, path: str, keys: Mapping[str, Any], depth: int) -> Any:
    if isinstance(value, list):
        return [_filled(item, path, keys, depth) for item in value]
    if not isinstance(value, str) or "${" not in value or depth > 9:
        return value
    whole = _INTERPOLATION.fullmatch(value)
    if whole:
        found = _referred(whole[1], path, keys)
        return value if found is None else _filled(found, path, keys, depth + 1)

    def text(match: re.Match[str]) -> str:
        found = _referred(match[1], path, keys)
        return found if isinstance(found, str) else match[0]

    filled = _INTERPOLATION.sub(text, value)
    again = filled if filled == value else _filled(filled, path, keys, depth + 1)
    return type(value)(again) if isinstance(again, str) else again


def _referred(inside: str, path: str, keys: Mapping[str, Any]) -> Any:
    """What ${inside} at `path` stands for; None where that is not given."""
    resolver, _, argument = inside.rpartition(":")
    name, comma, default = (argument or inside).partition(",")
    dots = len(name) - len(name.lstrip("."))
    if dots:
        above = path.split(".")[:-dots]
        name = ".".join([*above, name[dots:]])
    if resolver in ("", "oc.select") and name in keys:
        return keys[name]
    return _parsed(default) if comma and resolver in ("oc.select", "oc.env") else None
