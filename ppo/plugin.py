"""Names out of a Python file of the user: reward functions and dataset classes.

Owns finding and importing such a file. Must not import torch: reward workers use it.
"""

import ast
import importlib.util
import os
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from ppo.errors import InputError


class PluginError(InputError):
    """The file of the user is not there, is not Python, or lacks the name."""


def parse_plugin(path: str, name: str) -> ast.stmt | None:
    """Find `name` in the file without running it: the definition, None when it is imported there.

    Raises PluginError. A name that the file only makes at run time is not found: define it.
    """
    file = Path(os.path.expanduser(path))
    if not file.is_file():
        raise PluginError(f"{path}: no such file (from {Path.cwd()})")
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise PluginError(f"{path}: is not valid Python: {error}") from error
    except OSError as error:
        raise PluginError(f"{path}: cannot be read: {error.strerror}") from error
    defined: list[str] = []
    for statement in _top_level(tree.body):
        names = _names(statement)
        if name in names or "*" in names:
            is_def = isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            return statement if is_def else None
        defined.extend(names)
    raise PluginError(f"{path}: defines no '{name}'; it has {', '.join(defined) or 'nothing'}")


def load_plugin(path: str, name: str) -> Any:
    """Import the file and return its `name`. Raises PluginError; errors of the file itself pass."""
    module = load_module(path)
    if not hasattr(module, name):
        names = [key for key in vars(module) if not key.startswith("_")]
        raise PluginError(f"{path}: defines no '{name}'; it has {', '.join(names) or 'nothing'}")
    return getattr(module, name)


def load_module(path: str) -> ModuleType:
    """Import the file. Raises PluginError; errors of the file itself pass.

    The file's folder is searched first for what it imports, as for a script. Its module has the
    name under which it can be imported from there: processes that multiprocessing spawns import it.
    """
    file = Path(os.path.expanduser(path)).resolve()
    if not file.is_file():
        raise PluginError(f"{path}: no such file (from {Path.cwd()})")
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    module_name = _module_name(file)
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise PluginError(f"{path}: is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look their module up
    spec.loader.exec_module(module)
    return module


def _module_name(file: Path) -> str:
    """The file's own name, or another where that one means another module."""
    spec = None
    with suppress(ImportError, ValueError):  # names such as reward.v2
        spec = importlib.util.find_spec(file.stem)
    is_own = spec is not None and spec.origin == str(file)
    return file.stem if is_own else f"plugin_{file.stem}"


def _top_level(statements: list[ast.stmt]) -> list[ast.stmt]:
    """Statements of the module, those inside `if`, `try` and `with` included."""
    found: list[ast.stmt] = []
    for statement in statements:
        found.append(statement)
        if isinstance(statement, (ast.If, ast.Try, ast.With)):
            children = ast.iter_child_nodes(statement)
            found.extend(_top_level([child for child in children if isinstance(child, ast.stmt)]))
    return found


def _names(statement: ast.stmt) -> list[str]:
    """Names that a statement binds."""
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            return [alias.asname or alias.name for alias in aliases]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []
