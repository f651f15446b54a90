"""The boundaries between parts, read off the source: who imports what and reads os.environ."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("train_ppo.py", "rollout.py")
SOURCES = sorted(
    path.relative_to(ROOT)
    for path in [
        *(ROOT / script for script in SCRIPTS),
        *(path for part in ("ppo", "sharding", "launch") for path in (ROOT / part).rglob("*.py")),
    ]
    if path.is_file()
)
PURE = (
    "ppo/advantages.py",
    "ppo/losses.py",
    "ppo/kl.py",
    "ppo/logprobs.py",
    "ppo/models/schedule.py",
)
# What pure modules may use of this repository: each other.
PURE_MAY_IMPORT = {name.removesuffix(".py").replace("/", ".") for name in PURE}
ENVIRONMENT_READERS = (*SCRIPTS, "launch/", "ppo/engines/sglang/")


def modules_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"relative import of {node.module}: name the package"
        # "from ppo import kl" names ppo.kl as well as ppo
        return [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def imports(path: Path) -> list[str]:
    """Modules imported anywhere in the file, inside functions too."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return [module for node in ast.walk(tree) for module in modules_of(node)]


def imports_at_import(path: Path) -> list[str]:
    """Modules imported when the file is: not inside functions, nor for type checkers only."""

    def visit(nodes: list[ast.stmt]) -> Iterator[str]:
        for node in nodes:
            yield from modules_of(node)
            for field in ("body", "orelse", "finalbody", "handlers"):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    continue
                if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                    continue
                yield from visit(getattr(node, field, []))

    return list(visit(ast.parse((ROOT / path).read_text(encoding="utf-8")).body))


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def in_ppo(path: Path) -> bool:
    return path.parts[0] == "ppo"


def pure_modules() -> list[Path]:
    return [path for path in SOURCES if str(path) in PURE or str(path).startswith("ppo/rewards/")]


def test_sharding_imports_nothing_from_ppo() -> None:
    for path in SOURCES:
        if path.parts[0] == "sharding":
            foreign = [
                m for m in imports(path) if within(m, "ppo") or m in ("rollout", "train_ppo")
            ]
            assert not foreign, f"{path} imports {foreign}"


def test_nothing_imports_the_training_script() -> None:
    for path in SOURCES:
        assert not any(within(m, "train_ppo") for m in imports(path)), path


@pytest.mark.parametrize("path", pure_modules(), ids=str)
def test_pure_modules_know_no_config_and_no_logger(path: Path) -> None:
    found = imports(path)
    assert not any(within(m, "ppo.config") for m in found), f"{path} imports the configuration"
    if str(path) in PURE:
        ours = [m for m in found if within(m, "ppo") or within(m, "sharding")]
        allowed = [m for m in ours if any(within(m, pure) for pure in PURE_MAY_IMPORT)]
        assert ours == allowed, f"{path} imports {ours}"
        assert not any(within(m, "logging") for m in found), f"{path} logs"


def test_only_the_sglang_files_import_sglang_and_only_inside_functions() -> None:
    for path in SOURCES:
        if str(path).startswith("ppo/engines/sglang/"):
            early = [m for m in imports_at_import(path) if within(m, "sglang")]
            assert not early, f"{path} imports {early} when it is imported"
        elif path.parts[0] != "launch":  # launch/cpu_engine runs inside SGLang
            assert not any(within(m, "sglang") for m in imports(path)), path


def test_the_environment_is_read_in_the_scripts_the_launchers_and_the_engine_host_only() -> None:
    for path in SOURCES:
        if str(path).startswith(ENVIRONMENT_READERS):
            continue
        assert "os.environ" not in imports(path), f"{path} imports os.environ"
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            assert name not in ("os.environ", "os.getenv", "os.putenv"), (
                f"{path}:{getattr(node, 'lineno', 0)} reads the environment"
            )


def test_there_is_no_utils() -> None:
    for path in SOURCES:
        assert path.stem not in ("utils", "util", "helpers", "misc", "common"), path


def test_nothing_prints_but_the_commands() -> None:
    """A module may print what its own command line was asked for; everything else logs."""
    for path in SOURCES:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        prints = [
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
        ]
        is_command = "__main__" in (ROOT / path).read_text(encoding="utf-8")
        assert not prints or is_command or path.parts[0] == "launch", f"{path}:{prints} prints"
