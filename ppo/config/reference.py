"""configs/ppo.yaml as text: every key in order, with its default, choices and meaning.

Owns how a key is shown, and in which values that file, which is a preset as well, departs from the
defaults. What a key means stands with its field; it must not be said again here.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
import types
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from ppo.config.bounds import Bound, bare, rules
from ppo.config.fields import hints
from ppo.config.root import Config
from ppo.config.schema import Key, is_section, schema

COLUMNS = 100

HEADER = """\
# Every key with its default, and itself a preset: Qwen2.5-7B-Instruct, PPO with a critic and a KL
# penalty in the reward, on GSM8K. Values that are not the default say so.
#
#   hardware  one node with 8 GPUs of 80 GB (predicted by --check; not run by us yet)
#   data      python -m ppo.data.prepare gsm8k --out data/gsm8k
#   check     python train_ppo.py --config ppo.yaml --check
#   train     torchrun --nproc_per_node=8 train_ppo.py --config ppo.yaml
#
# Any key may be set behind the command: actor.optim.lr=2e-6. Only data.train_files and model.path
# are required. null in ref and critic means the actor's value. In parentheses: least and largest
# number; outside of what is usual there is a warning.
#
# Written by `python -m ppo.config reference > configs/ppo.yaml`: edit ppo/config/, not this file.
"""

PRESET = {
    "data.train_files": "data/gsm8k/train.parquet",
    "data.val_files": "data/gsm8k/test.parquet",
    "model.path": "Qwen/Qwen2.5-7B-Instruct",
    "rollout.gpu_memory_utilization": 0.5,
    "trainer.total_epochs": 15,
    "trainer.project_name": "gsm8k",
    "trainer.experiment_name": "qwen2.5_7b",
}


def reference() -> str:
    """The whole text of configs/ppo.yaml."""
    lines = [HEADER.rstrip("\n")]
    for name, hint in hints(Config).items():
        section = bare(hint)
        said = " ".join((section.__doc__ or "").split())
        lines += ["", *_above(said, 0), f"{name}:", *_section(section, f"{name}.")]
    return "\n".join(lines) + "\n"


@cache
def docs(section: type) -> dict[str, str]:
    """The docstring of each field of a section, in one line."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, following in itertools.pairwise([*tree.body, ast.Pass()]):
        if isinstance(field, ast.AnnAssign) and isinstance(following, ast.Expr):
            assert isinstance(following.value, ast.Constant), ast.unparse(following)
            found[ast.unparse(field.target)] = " ".join(str(following.value.value).split())
    return found


def _section(section: type, path: str) -> Iterator[str]:
    indent = 2 * path.count(".")
    for field in dataclasses.fields(section):
        said, name = docs(section).get(field.name, ""), path + field.name
        if is_section(hints(section)[field.name]):
            yield from _line(f"{field.name}:", said, indent)
            yield from _section(bare(hints(section)[field.name]), f"{name}.")
        else:
            key = schema()[name]
            value = _show(PRESET.get(name, None if key.derive or key.required else key.default))
            yield from _line(f"{field.name}: {value}", _comment(name, key, said), indent)


def _comment(path: str, key: Key, said: str) -> str:
    """What stands beside a key. A key that follows another section's is explained there."""
    if key.is_inherited:
        return ""
    if choices := _choices(key.hint):
        said = f"{' | '.join(choices)}: {said}"
    notes = [rule.in_short() for rule in rules(key.hint) if isinstance(rule, Bound)]
    if key.derive and "null" not in said:
        source = key.derive.paths[0]
        is_actors = source == f"actor.{path.partition('.')[2]}"
        notes.append("null = the actor's" if is_actors else f"null = {source}")
    if key.required:
        notes.append("required")
    elif path in PRESET:
        notes.append(f"default {_show(key.default)}")
    return f"{said} ({'; '.join(notes)})" if notes else said


def _choices(hint: Any) -> list[str]:
    """Texts that a key may have, where they are few; and N where it may also be a number."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    if get_origin(hint) is Annotated:
        return _choices(get_args(hint)[0])
    if get_origin(hint) is list:
        return _choices(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        found = [choice for member in get_args(hint) for choice in _choices(member)]
        return [*found, "N"] if found and int in map(bare, get_args(hint)) else found
    return []


def _line(text: str, comment: str, indent: int) -> list[str]:
    """A line with its comment behind it, or above it where that is too long."""
    line = " " * indent + text
    if not comment:
        return [line]
    beside = f"{line}  # {comment}"
    return [beside] if len(beside) <= COLUMNS else [*_above(comment, indent), line]


def _above(comment: str, indent: int) -> list[str]:
    lead = " " * indent + "# "
    return textwrap.wrap(
        comment,
        COLUMNS,
        initial_indent=lead,
        subsequent_indent=lead,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _show(value: Any) -> str:
    """A value as YAML, as one writes it by hand."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{', '.join(map(_show, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_show(item)}' for name, item in value.items())}}}"
    return str(value).replace("e-0", "e-").replace("e+0", "e+")
