"""The user's file: which kind of episode it has, found without running it, and loaded.

Owns the kinds. Must not know processes.
"""

import ast
import inspect
import math
import numbers
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ppo.episodes.contract import EpisodeError, EpisodeProgram
from ppo.episodes.policy import Episode
from ppo.plugin import PluginError, load_plugin, parse_plugin


def check_program(program: EpisodeProgram) -> None:
    """Look for the episode in its file, which is not run. Raises EpisodeError."""
    if _has_function_tools(program):
        return
    try:
        found = parse_plugin(program.path, program.name)
    except PluginError as error:
        raise EpisodeError(f"rollout.episode: {error}") from error
    where = f"rollout.episode: {program.path}: {program.name}"
    if isinstance(found, ast.FunctionDef):
        raise EpisodeError(f"{where} must be `async def {program.name}(row, policy)`")
    if isinstance(found, ast.AsyncFunctionDef):
        given = [*found.args.posonlyargs, *found.args.args]
        needed = len(given) - len(found.args.defaults)
        is_enough = len(given) >= 2 or found.args.vararg is not None
        if needed > 2 or not is_enough or None in found.args.kw_defaults:
            raise EpisodeError(f"{where}({ast.unparse(found.args)}) must take (row, policy)")
    if isinstance(found, ast.ClassDef):
        _check_class(found, where)


def load_program(program: EpisodeProgram) -> Episode:
    """Import the file. Raises EpisodeError, and whatever the file itself raises."""
    if _has_function_tools(program):
        from ppo.episodes.function_tools import load_function_tools

        return load_function_tools(program.path)
    try:
        found = load_plugin(program.path, program.name)
    except PluginError as error:
        raise EpisodeError(f"rollout.episode: {error}") from error
    if inspect.isclass(found):
        from ppo.episodes.environments import episode_of

        try:
            return episode_of(found)
        except ValueError as error:
            where = f"rollout.episode: {program.path}: {program.name}"
            raise EpisodeError(f"{where} {error}") from error
    if not inspect.iscoroutinefunction(found):
        raise EpisodeError(
            f"rollout.episode: {program.path}: {program.name} must be `async def "
            f"{program.name}(row, policy)` or a class, it is {type(found).__name__}"
        )
    return found


def read_score(value: Any) -> tuple[float | None, dict[str, float]]:
    """The score that an episode has returned and other finite numbers beside it.

    Raises ValueError for what is neither a finite number, a dict with one as "score", nor None.
    """
    if isinstance(value, Mapping):
        if "score" not in value:
            raise ValueError('the dict that an episode returns needs the key "score"')
        extra: dict[str, float] = {}
        for name, number in value.items():  # numpy's numbers too
            with suppress(OverflowError):
                if name != "score" and isinstance(number, numbers.Real) and math.isfinite(number):
                    extra[str(name)] = float(number)
        score, _ = read_score(value["score"])
        return score, extra
    if value is None:
        return None, {}
    try:
        score = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"an episode returned {type(value).__name__}, not a number") from None
    if not math.isfinite(score):
        raise ValueError(f"an episode returned {score}, which is not finite")
    return score, {}


def _has_function_tools(program: EpisodeProgram) -> bool:
    """Whether the file has no such name, but functions with verl's decorator."""
    try:
        tree = ast.parse(Path(program.path).expanduser().read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return False  # said by who looks for the name
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    if any(function.name == program.name for function in functions):
        return False
    decorators = [d for function in functions for d in function.decorator_list]
    names = [ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in decorators]
    return any(name.rpartition(".")[2] == "function_tool" for name in names)


def _check_class(found: ast.ClassDef, where: str) -> None:
    """As far as an environment can be judged without its bases and decorators."""
    methods = {
        n.name: n for n in found.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    if not found.bases and "reset" not in methods:
        raise EpisodeError(f"{where} has no method reset(self, **row), as environments have")
    reset, made = methods.get("reset"), methods.get("__init__")
    if reset is not None and not reset.decorator_list:
        given = [*reset.args.posonlyargs, *reset.args.args]
        if not given and reset.args.vararg is None:
            raise EpisodeError(f"{where}.reset must take self: reset(self, **row)")
    if made is not None and not made.decorator_list:
        given = made.args.posonlyargs + made.args.args
        needed = [arg.arg for arg in given[1 : len(given) - len(made.args.defaults)]]
        named = zip(made.args.kwonlyargs, made.args.kw_defaults, strict=True)
        needed += [arg.arg for arg, default in named if default is None]
        if needed:
            raise EpisodeError(
                f"{where}.__init__ needs {', '.join(needed)}: an environment is made without "
                "arguments; give them defaults, or read the row in reset(self, **row)"
            )
