"""python -m ppo.rewards.try: rows, answers, failures and times of a reward."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ppo.check.try_reward import known_answers, main
from ppo.data.columns import Sample

ROOT = Path(__file__).resolve().parents[3]
REWARD = """
import time
def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    if solution_str == "":
        raise ValueError("nothing to score")
    if solution_str == "sleep":
        time.sleep(30)
    return {"score": float(solution_str.endswith(ground_truth)) + bonus, "length": 3}
def trl(prompts, completions, level, **columns):
    return [None if level[0] == 1 else 1.0]
"""


@pytest.fixture
def files(tmp_path) -> tuple[str, str]:
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"{i}+{i}", "ground_truth": str(2 * i), "level": i} for i in range(1, 4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "reward.py"), str(tmp_path / "rows.jsonl")


def table(out: str) -> dict[str, list[str]]:
    """Cells of the table by kind of response."""
    lines = out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("response "))
    rows = [line for line in lines[start + 1 :] if line[18:].strip()[:1].isdigit()]
    return {line[:17].strip(): line[17:].split() for line in rows}


def test_known_answers_of_each_row_are_scored_by_kind(files, capsys) -> None:
    function, rows = files
    code = main([function, "--data", rows, "--rows", "2", "reward.function.kwargs={bonus: 1}"])
    out = capsys.readouterr().out
    found = table(out)
    assert found["the truth"][:5] == ["2", "2.0000", "2", "2", "0"]
    assert found["another's truth"][1] == "1.0000" and found["\\boxed{truth}"][1] == "1.0000"
    assert found["empty"][:5] == ["2", "-", "-", "-", "2"]
    assert "row 0 (line 1), empty: error" in out and "ValueError: nothing to score" in out
    assert "scores 2 (length 3)" in out and "ground truth '2'" in out
    assert code == 1 and "2 of 14 failed: more than reward.max_failed_fraction" in out


def test_responses_of_a_file_are_scored_within_the_time_limit_of_a_run(files, tmp_path, capsys):
    function, rows = files
    (tmp_path / "r.txt").write_text("it is 2\nsleep\n7\n")
    limits = ("reward.timeout_s=0.5", "reward.max_failed_fraction=0.5")
    assert main([function, "--data", rows, "--responses", str(tmp_path / "r.txt"), *limits]) == 0
    out = capsys.readouterr().out
    assert table(out)["given"][:5] == ["3", "0.5000", "0", "1", "1"]
    assert "given: timeout" in out and float(table(out)["given"][6]) >= 500


def test_a_function_of_trls_style_that_does_not_apply_is_told_apart(files, capsys) -> None:
    function, rows = files
    trl = ("reward.function.name=trl", "reward.function.style=trl", "--rows=1")
    assert main([function, "--data", rows, *trl]) == 0
    assert "to 6 responses no function applies" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere.py",), "nowhere.py: no such file"),
        (("builtin",), "is missing: it picks the built-in scorer"),
        (("{function}", "--responses=nowhere.jsonl"), "nowhere.jsonl: no such file"),
        (("{function}", "--responses={rows}"), "must be text; the row has prompt"),
        (("{function}", "reward.timeout=3"), "timeout_s"),
        ((), "FUNCTION_FILE --data FILE"),
    ],
)
def test_what_cannot_be_tried_is_one_message(files, arguments, said, capsys) -> None:
    function, rows = files
    words = [word.format(function=function, rows=rows) for word in arguments]
    assert main([*words, "--data", rows]) == 2
    assert said in capsys.readouterr().err


def test_too_few_responses_are_counted(files, tmp_path, capsys) -> None:
    function, rows = files
    (tmp_path / "r.txt").write_text("only one\n")
    assert main([function, "--data", rows, "--responses", str(tmp_path / "r.txt")]) == 2
    assert "holds 1 responses, for 3 rows" in capsys.readouterr().err


def test_answers_to_a_row_have_the_forms_that_scorers_know() -> None:
    sample = Sample("q", "s", "{4}", {"answer": "2+2\n#### 4", "level": 1})
    found = dict(known_answers(sample, Sample("q", "s", 5, {})))
    assert found["the truth"] == "{4}" and found["\\boxed{truth}"] == "So it is $\\boxed{{4}}$."
    assert found["column answer"] == "2+2\n#### 4"
    assert (found["empty"], found["another's truth"]) == ("", "5")
    assert list(dict(known_answers(Sample("q", "s", None, {}), sample))) == [
        "empty",
        "another's truth",
    ]


def test_the_command_has_the_name_of_its_room(files) -> None:
    function, rows = files
    command = [sys.executable, "-m", "ppo.rewards.try", function, "--data", rows, "--rows=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "the truth" in done.stdout  # the empty answer is one of six
