"""The boundaries between parts, read off the source: who imports what and reads os.environ."""

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("train_ppo.py", "rollout.py")
PROGRAMS = ("ppo/rewards/try.py",)
"""files that lie in a room because a command has its name there; nobody imports them"""
SOURCES = sorted(
    path.relative_to(ROOT)
    for path in [
        *(ROOT / script for script in SCRIPTS),
        *(path for part in ("ppo", "sharding", "launch") for path in (ROOT / part).rglob("*.py")),
    ]
    if path.is_file()
)
# Who may import whom. A room is a folder of ppo/, or a file that lies flat in it; all of sharding/
# is one. The maths knows itself alone: no config, no logger, no collective but through `group`.
MATHS = {
    *("ppo.advantages", "ppo.kl", "ppo.logprobs", "ppo.losses", "ppo.policy_losses"),
    "ppo.selection",
}
MAY_IMPORT: dict[str, set[str]] = {
    "ppo.errors": set(),
    "ppo.metrics": {"sharding"},
    "ppo.model_shapes": {"sharding"},
    "ppo.files": {"ppo.errors"},
    "ppo.plugin": {"ppo.errors"},
    "ppo.tracking": {"ppo.errors", "ppo.files"},
    "ppo.report": set(),
    **dict.fromkeys(MATHS, MATHS),
    "sharding": set(),
    "ppo.config": {"ppo.errors", "sharding"},
    "ppo.rewards": {"ppo.errors", "ppo.plugin"},
    "ppo.episodes": {"ppo.errors", "ppo.plugin", "ppo.rewards"},
    "ppo.data": {
        *("ppo.config", "ppo.errors", "ppo.files", "ppo.models", "ppo.plugin", "ppo.rewards"),
    },
    "ppo.models": {"ppo.config", "ppo.errors", "ppo.files", "ppo.logprobs", "sharding"},
    "ppo.engines": {"ppo.config", "ppo.errors", "ppo.model_shapes", "ppo.models", "sharding"},
    "ppo.check": {
        *("ppo.config", "ppo.data", "ppo.episodes", "ppo.errors", "ppo.model_shapes"),
        *("ppo.plugin", "ppo.rewards", "sharding"),
    },
    "ppo.run": {"ppo.check", "ppo.config", "ppo.errors", "ppo.files", "sharding"},
    "ppo.batch": {"ppo.config", "ppo.data", "ppo.engines", "ppo.models", "sharding"},
    "ppo.forward_passes": {"ppo.batch", "ppo.metrics", "ppo.run", "sharding"},
    "ppo.estimators": {"ppo.advantages", "ppo.batch", "ppo.config"},
    "ppo.guards": {"ppo.config"},
    "ppo.update": {
        *("ppo.advantages", "ppo.batch", "ppo.config", "ppo.estimators", "ppo.guards", "ppo.kl"),
        *("ppo.losses", "ppo.metrics", "ppo.models", "ppo.policy_losses", "ppo.selection"),
    },
    "ppo.rollout": {
        *("ppo.batch", "ppo.config", "ppo.data", "ppo.engines", "ppo.episodes", "ppo.errors"),
        *("ppo.files", "ppo.forward_passes", "ppo.metrics", "ppo.models", "ppo.rewards"),
        *("ppo.run", "ppo.tracking", "sharding"),
    },
    "ppo.step_metrics": {
        *(
            "ppo.advantages",
            "ppo.batch",
            "ppo.config",
            "ppo.losses",
            "ppo.metrics",
            "ppo.model_shapes",
        ),
        *("ppo.models", "sharding"),
    },
    "ppo.state": {
        *("ppo.config", "ppo.data", "ppo.errors", "ppo.guards", "ppo.kl", "ppo.models"),
        *("ppo.run", "sharding"),
    },
}
# Finer than rooms: these files of a room may import less than it, or alone what it may.
ONLY_PREPARE_KNOWS_SCORERS = "ppo/data/prepare/"
NO_TORCH = (
    *("ppo/check/", "ppo/config/", "ppo/report/", "ppo/rewards/", "ppo/errors.py"),
    *("ppo/episodes/", "ppo/plugin.py"),
    *("ppo/model_shapes/", "sharding/dims.py", "sharding/heads.py", "sharding/layout.py"),
    "sharding/partition.py",
)
MOST_PAIRS_OF_ROOMS = 120
"""115, and 5 for episodes, a subject of their own: they know rewards, plugin and errors as rewards
do; ppo.rollout runs them, and ppo.check looks at the file that has them"""
MOST_FILES_OF_A_FOLDER = 18
ENVIRONMENT_READERS = (
    *(*SCRIPTS, "launch/", "ppo/engines/sglang/"),
    "ppo/rollout/train_reward_model.py",
)


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax of a file."""
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def modules_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"relative import of {node.module}: name the package"
        # "from ppo import kl" names ppo.kl as well as ppo
        return [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


@cache
def imports(path: Path) -> list[str]:
    """Modules imported anywhere in the file, inside functions too."""
    tree = tree_of(path)
    return [module for node in ast.walk(tree) for module in modules_of(node)]


@cache
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

    return list(visit(tree_of(path).body))


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def name_of(path: Path) -> str:
    """The module that a file is: ppo/config/__init__.py is ppo.config."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str:
    """sharding, ppo.config, ppo.batch, train_ppo, ..."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "ppo" else parts[0]


OURS = {name_of(path): path for path in SOURCES if path.parts[0] != "launch"}


@cache
def ours(path: Path) -> set[str]:
    """The files of ours that a file imports: "from ppo import kl" is ppo/kl.py alone."""
    found = set()
    for node in ast.walk(tree_of(path)):
        modules = [module for module in modules_of(node) if module in OURS]
        found |= {m for m in modules if not any(other.startswith(m + ".") for other in modules)}
    return found


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """What lies on a circle, or leads to one; empty without a circle."""
    left = {start: set(ends) for start, ends in arrows.items()}
    while leaves := [start for start, ends in left.items() if not ends & left.keys()]:
        for leaf in leaves:
            del left[leaf]
    return sorted(left)


def test_every_room_imports_what_its_row_of_the_table_allows() -> None:
    used = set()
    for module, path in OURS.items():
        room = room_of(module)
        if str(path) in (*SCRIPTS, *PROGRAMS) or module in ("ppo", "sharding"):
            continue
        for other in map(room_of, ours(path)):
            if other not in (room, "ppo"):
                assert other in MAY_IMPORT[room], f"{path} imports {other}"
                used.add((room, other))
    scripts = {(s, room_of(m)) for s in (*SCRIPTS, *PROGRAMS) for m in ours(Path(s))}
    assert len(used | scripts) <= MOST_PAIRS_OF_ROOMS, len(used | scripts)


def test_there_is_a_row_for_every_room_and_a_room_for_every_row() -> None:
    rooms = {room_of(module) for module in OURS} - {"ppo", "train_ppo", "rollout"}
    assert rooms == set(MAY_IMPORT)


def test_files_and_rooms_import_each_other_in_no_circle() -> None:
    files = {module: ours(path) - {module} for module, path in OURS.items()}
    assert circle(files) == []
    rooms = {room: row - MATHS for room, row in MAY_IMPORT.items() if room not in MATHS}
    assert circle(rooms) == []


def test_the_test_of_circles_finds_one() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def test_the_top_level_holds_two_scripts_and_five_folders() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    top = {name.partition("/")[0] for name in listed.stdout.split()}
    project = {"CONTRIBUTING.md", "LICENSE", "README.md", "pyproject.toml"}
    folders = {"configs", "launch", "ppo", "sharding", "tests"}
    assert {name for name in top if name[0] != "."} <= {*SCRIPTS, *folders, *project}


def test_nobody_imports_a_script() -> None:
    for path in SOURCES:
        names = {name_of(Path(script)) for script in (*SCRIPTS, *PROGRAMS)}
        scripts = [m for m in imports(path) if m in names or m.split(".")[0] in names]
        assert not scripts, f"{path} imports {scripts}"


def test_only_the_data_commands_know_scorers() -> None:
    for module, path in OURS.items():
        if room_of(module) == "ppo.data" and not str(path).startswith(ONLY_PREPARE_KNOWS_SCORERS):
            assert not any(within(m, "ppo.rewards") for m in imports(path)), path


def test_sections_of_the_configuration_are_imported_from_its_door_only() -> None:
    tests = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py"))
    for path in [*SOURCES, *tests]:
        if not str(path).startswith("ppo/config/") and path.name != Path(__file__).name:
            text = (ROOT / path).read_text(encoding="utf-8")
            assert "from ppo.config.sections" not in text, f"{path}: import it from ppo.config"


def test_what_answers_in_seconds_imports_no_torch() -> None:
    def reached(module: str, seen: set[str]) -> set[str]:
        for name in imports_at_import(OURS[module]):
            if name in OURS and name not in seen:
                seen.add(name)
                reached(name, seen)
            elif within(name, "torch"):
                seen.add(f"torch, by {module}")
        return seen

    for module, path in OURS.items():
        if str(path).startswith(NO_TORCH):
            assert not [m for m in reached(module, set()) if m.startswith("torch")], path


def test_no_folder_is_too_full_to_read() -> None:
    for folder in {path.parent for path in SOURCES}:
        files = [p for p in SOURCES if p.parent == folder and p.stem not in ("__init__",)]
        assert len(files) <= MOST_FILES_OF_A_FOLDER, (folder, len(files))


@pytest.mark.parametrize("room", sorted(MATHS))
def test_the_maths_logs_nothing(room: str) -> None:
    assert not any(within(m, "logging") for m in imports(OURS[room])), f"{room} logs"


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
        for node in ast.walk(tree_of(path)):
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            assert name not in ("os.environ", "os.getenv", "os.putenv"), (
                f"{path}:{getattr(node, 'lineno', 0)} reads the environment"
            )


def test_objects_are_exchanged_and_errors_shared_in_one_place() -> None:
    """Written by hand it is a hang when it is wrong: sharding/agree.py is tested for it."""
    for path in SOURCES:
        for name in ("all_gather_object", "broadcast_object_list"):
            text = (ROOT / path).read_text(encoding="utf-8")
            assert path.name == "agree.py" or name not in text, f"{path}: {name}"


def test_there_is_no_utils() -> None:
    for path in SOURCES:
        assert path.stem not in ("utils", "util", "helpers", "misc", "common"), path


def test_nothing_prints_but_the_commands() -> None:
    """A module may print what its own command line was asked for; everything else logs."""
    for path in SOURCES:
        tree = tree_of(path)
        prints = [
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
        ]
        is_command = "__main__" in (ROOT / path).read_text(encoding="utf-8")
        assert not prints or is_command or path.parts[0] == "launch", f"{path}:{prints} prints"
