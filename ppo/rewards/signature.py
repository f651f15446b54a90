"""What a reward function takes: whether its call will fit, without calling it. Pure."""

import ast
import inspect
from collections.abc import Mapping
from typing import Any

from ppo.rewards.contract import Function, RewardError

VERL_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL_NAMES = ("prompts", "completions")
ROW_NAMES = ("data_source", "ground_truth", "extra_info", "reward_model")
"""columns that every row has, for trl's style"""
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def check_signature(signature: inspect.Signature, function: Function) -> None:
    """Raises RewardError when the function cannot be called in its style."""
    if function.style == "trl":
        call = "(prompts=..., completions=..., **columns)"
        problem = _trl_problem(signature, function)
    else:
        names = [*VERL_NAMES, *function.kwargs]
        call = f"({', '.join(f'{name}=...' for name in names)})"
        problem = _verl_problem(signature, function)
    if problem:
        where = function.path or "the built-in scorer"
        written = str(signature).replace("Ellipsis", "...")
        raise RewardError(
            f"reward.function: {function.name} of {where} has the wrong signature "
            f"{function.name}{written}: {problem}; it is called as {function.name}{call}"
        )


def required_columns(signature: inspect.Signature, function: Function) -> frozenset[str]:
    """Columns of the data that a function of trl's style cannot be called without."""
    if function.style != "trl":
        return frozenset()
    given = {*TRL_NAMES, *ROW_NAMES, *function.kwargs}
    return frozenset(
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind in _BY_NAME and parameter.default is parameter.empty and name not in given
    )


def accepted(signature: inspect.Signature, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that the function can be given by name."""
    parameters = signature.parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(arguments)
    names = {parameter.name for parameter in parameters if parameter.kind in _BY_NAME}
    return {name: value for name, value in arguments.items() if name in names}


def _trl_problem(signature: inspect.Signature, function: Function) -> str:
    if "solution_str" in signature.parameters and "completions" not in signature.parameters:
        return "this is verl's style; leave reward.function.style out"
    if "completions" not in accepted(signature, {"completions": []}):
        return "takes no 'completions'"
    return _binding_problem(signature, function.kwargs)


def _verl_problem(signature: inspect.Signature, function: Function) -> str:
    if "completions" in signature.parameters and "solution_str" not in signature.parameters:
        return "this is TRL's style; set reward.function.style=trl"
    if twice := sorted(set(VERL_NAMES) & set(function.kwargs)):
        return f"reward.function.kwargs must not hold {', '.join(twice)}"
    return _binding_problem(signature, dict.fromkeys([*VERL_NAMES, *function.kwargs]), whole=True)


def _binding_problem(
    signature: inspect.Signature, arguments: Mapping[str, Any], *, whole: bool = False
) -> str:
    """Why the arguments do not fit; `whole`: nothing else may be needed. Empty when they fit."""
    try:
        (signature.bind if whole else signature.bind_partial)(**arguments)
    except TypeError as error:
        return str(error)
    return ""


def signature_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> inspect.Signature:
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
