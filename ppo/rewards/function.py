"""How a reward function is found, called and read. Must not import torch, nor know processes.

verl's style: compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)
-> float | bool | {"score": ..., metrics}. trl's: f(prompts, completions, **columns) -> list. Both
may be async.
"""

import ast
import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from ppo.plugin import PluginError, load_plugin, parse_plugin
from ppo.rewards.contract import FunctionSettings, RewardError, RewardRequest
from ppo.rewards.scorers import builtin

VERL_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
FLOAT32_MAX = (2 - 2**-23) * 2.0**127


class Scored(NamedTuple):
    """What a function said about one sample."""

    score: float
    extra: dict[str, float]


def check_function(settings: FunctionSettings) -> None:
    """Check file, name and signature without running the file, in no time. Raises RewardError.

    A function that is decorated or imported there is checked when the workers load it.
    """
    if settings.path is None:
        return
    try:
        node = parse_plugin(settings.path, settings.name)
    except PluginError as error:
        raise RewardError(f"reward.function: {error}") from error
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.decorator_list:
        _check_signature(_signature_of(node), settings)


def load_function(settings: FunctionSettings) -> Callable[..., Any]:
    """Import the function, or take the built-in one. Raises RewardError and what the file does."""
    if settings.path is None:
        function: Callable[..., Any] = builtin.compute_score
    else:
        try:
            function = load_plugin(settings.path, settings.name)
        except PluginError as error:
            raise RewardError(f"reward.function: {error}") from error
    if not callable(function):
        raise RewardError(f"reward.function: {settings.name} of {settings.path} is no function")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions of C extensions have none: the probe will tell
        return function
    _check_signature(signature, settings)
    return function


def _check_signature(signature: inspect.Signature, settings: FunctionSettings) -> None:
    if settings.style == "trl":
        call = "(prompts=..., completions=..., **columns)"
        given = _accepted(signature, {"prompts": [], "completions": []})
        missing = "completions" not in given
        problem = (
            "takes no 'completions'" if missing else _binding_problem(signature, settings.kwargs)
        )
    else:
        names = [*VERL_NAMES, *settings.kwargs]
        call = f"({', '.join(f'{name}=...' for name in names)})"
        problem = _binding_problem(signature, dict.fromkeys(names), whole=True)
    if problem:
        where = settings.path or "the built-in scorer"
        written = str(signature).replace("Ellipsis", "...")
        raise RewardError(
            f"reward.function: {settings.name} of {where} has the wrong signature "
            f"{settings.name}{written}: {problem}; it is called as {settings.name}{call}"
        )


def _binding_problem(
    signature: inspect.Signature, arguments: Mapping[str, Any], *, whole: bool = False
) -> str:
    """Why the arguments do not fit; `whole`: nothing else may be needed. Empty when they fit."""
    try:
        (signature.bind if whole else signature.bind_partial)(**arguments)
    except TypeError as error:
        return str(error)
    return ""


def _signature_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> inspect.Signature:
    """The signature as it will be when the definition runs; defaults and annotations left out."""
    kind, given = inspect.Parameter, node.args
    positional = [*given.posonlyargs, *given.args]
    first_default = len(positional) - len(given.defaults)
    parameters = [
        kind(
            argument.arg,
            kind.POSITIONAL_ONLY if i < len(given.posonlyargs) else kind.POSITIONAL_OR_KEYWORD,
            default=... if i >= first_default else kind.empty,
        )
        for i, argument in enumerate(positional)
    ]
    if given.vararg:
        parameters.append(kind(given.vararg.arg, kind.VAR_POSITIONAL))
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        value = kind.empty if default is None else ...
        parameters.append(kind(argument.arg, kind.KEYWORD_ONLY, default=value))
    if given.kwarg:
        parameters.append(kind(given.kwarg.arg, kind.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _accepted(signature: inspect.Signature, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that the function can be given by name."""
    parameters = signature.parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(arguments)
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = {parameter.name for parameter in parameters if parameter.kind in named}
    return {name: value for name, value in arguments.items() if name in names}


def call(
    function: Callable[..., Any], settings: FunctionSettings, request: RewardRequest
) -> Any | Awaitable[Any]:
    """Call the function for one sample; what it returns may have to be awaited."""
    if settings.style != "trl":
        return function(
            data_source=request.data_source,
            solution_str=request.solution_str,
            ground_truth=request.ground_truth,
            extra_info=request.extra_info,
            **settings.kwargs,
        )
    completion: Any = request.solution_str
    if not isinstance(request.prompt, str):  # a conversation is answered with a conversation
        completion = [{"role": "assistant", "content": completion}]
    columns = {
        **request.extra_info,
        "data_source": request.data_source,
        "ground_truth": request.ground_truth,
    }
    arguments = {name: [value] for name, value in columns.items()}
    arguments |= {"prompts": [request.prompt], "completions": [completion]}
    signature = inspect.signature(function)
    return function(**_accepted(signature, arguments), **settings.kwargs)


def read(value: Any, settings: FunctionSettings) -> Scored:
    """Check what the function returned for one sample.

    Raises:
        RewardError: it has a wrong type.
        ValueError: the score is NaN or infinite, as float32.
    """
    name, extra = settings.name, {}
    if settings.style == "trl":
        if isinstance(value, (str, dict)) or not hasattr(value, "__len__") or len(value) != 1:
            raise RewardError(
                f"{name} must return a list with one number per sample, not {value!r}"
            )
        value = value[0]
    elif isinstance(value, dict):
        if "score" not in value:
            keys = ", ".join(map(str, value)) or "nothing"
            raise RewardError(f'{name} returned a dict without "score"; it has {keys}')
        extra = {str(key): number for key, number in value.items() if key != "score"}
        value = value["score"]
    score = _number(value)
    if score is None:
        kind = type(value).__name__
        raise RewardError(f'{name} must return a float, a bool or a dict with "score", not {kind}')
    if not abs(score) <= FLOAT32_MAX:
        raise ValueError(f"{name} returned {score}, which is no finite float32")
    found = {key: _number(entry) for key, entry in extra.items()}
    return Scored(score, {k: v for k, v in found.items() if v is not None and math.isfinite(v)})


def _number(value: Any) -> float | None:
    """The value as a float: Python's numbers, bool, numpy's, and tensors of one element."""
    if hasattr(value, "item") and math.prod(getattr(value, "shape", (0,))) == 1:
        value = value.item()
    return float(value) if isinstance(value, numbers.Real) else None
