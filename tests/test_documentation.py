"""What is documented is true: commands are accepted, programs explain themselves, links lead
somewhere. The long commands run in the full tier."""

import re
from pathlib import Path

import pytest

from tests.documented import (
    ROOT,
    Command,
    check_command,
    commands_in,
    commands_of,
    documents,
    help_of,
    programs,
)

PAGES = [path for path in documents() if path.suffix == ".md"]


def wrong(commands: list[Command]) -> list[str]:
    problems = []
    for command in commands:
        try:
            check_command(command)
        except Exception as error:  # of any kind: all are listed
            problems.append(f"{command.where}: {command.text}\n    {error}")
    return problems


def test_commands_of_the_documentation_are_accepted_by_their_programs() -> None:
    found = [command for path in documents() for command in commands_of(path)]
    assert len(found) > 60
    assert wrong(found) == []


def test_a_command_that_is_wrong_is_found() -> None:
    for text in (
        "python train_ppo.py --config ppo_tiny.yaml actor.optim.lrr=1",
        "python train_ppo.py --config nosuch.yaml --check",
        "torchrun --nproc_per_node=2 nosuch.py --config ppo.yaml",
        "python -m ppo.report RUN --port 80",
        "python -m ppo.data.prepare jsonl --outt x",
        "bash launch/nosuch.sh",
        "bash tests/run.sh --fulll",
        "sbatch --nodes=4 launch/slurm/ppo.sbatch ppo.yaml trainer.sede=1",
        "pip install -e .[nosuch]",
    ):
        assert wrong([Command("here:1", text)]), text
    page = "    X=1 python a.py \\\n        --b c  # d\n\ntext `bash e\nf` text"
    assert [c.words for c in commands_in(page, "x")] == [["python", "a.py", "--b", "c"]]


BENCHMARKS = [  # import much
    pytest.param(name, marks=pytest.mark.full) for name in programs() if "benchmarks" in name
]


@pytest.mark.parametrize("program", [n for n in programs() if "benchmarks" not in n] + BENCHMARKS)
def test_a_program_explains_itself_with_an_example_that_it_accepts(program: str) -> None:
    said = help_of(program)
    called = program if program.endswith(".py") else f"-m {program}"
    usage, _, rest = said.partition("\n\n")
    assert usage.startswith(f"usage: {'python ' if '-m' in called else ''}{called}"), usage
    examples = [c for c in commands_in(rest, program) if called in c.text]
    assert examples, f"--help of {program} has no example"
    assert wrong(examples) == []
    assert "Owns " not in said and "Must not know" not in said


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"", text):
        link = "".join(target)
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        place = (path.parent / file).resolve() if file else path
        assert place.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", place.read_text(encoding="utf-8"), re.M)
            slugs = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in slugs, link


def test_a_folder_s_readme_names_its_files() -> None:
    missing = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if page.parent in (ROOT, ROOT / "tests") or page.name != "README.md":
            continue
        for file in page.parent.glob("*.py"):
            if file.name != "__init__.py" and not re.search(rf"\b{file.stem}\b", text):
                missing.append(str(file.relative_to(ROOT)))
    assert missing == []
