"""The file of an episode is looked at before a start, and never run."""

from pathlib import Path

import pytest

from ppo.check.files import missing_files, wrong_contents
from ppo.config import load_config

REQUIRED = ["model.path=tiny", "data.train_files=tiny"]


def problems(path: Path, *overrides: str) -> list[str]:
    config = load_config(None, [*REQUIRED, f"rollout.episode.path={path}", *overrides])
    return [str(problem) for problem in (*missing_files(config), *wrong_contents(config))]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("async def episode(row, policy): ...", None),
        ("async def episode(row, policy, *, seed=0): ...", None),
        ("class episode:\n    def reset(self, **row): ...", None),
        ("from elsewhere import episode", None),
        ("raise SystemExit", "defines no 'episode'"),
        ("async def episode(", "is not valid Python"),
        ("def episode(row, policy): ...", "must be `async def episode(row, policy)`"),
        ("async def episode(row): ...", "must take (row, policy)"),
        ("class episode: ...", "has no method reset"),
    ],
)
def test_a_file_that_holds_no_episode_is_a_problem(tmp_path, content, words):
    path = tmp_path / "game.py"
    path.write_text(content + "\n")
    found = problems(path)
    assert len(found) == (words is not None) and all(words in text for text in found), found


def test_a_file_or_a_run_that_is_not_there_is_a_problem(tmp_path):
    found = problems(tmp_path / "no.py", f"rollout.episode.replay={tmp_path}")
    assert any("rollout.episode.path" in text and "no such file" in text for text in found)
    assert any("rollout.episode.replay" in text and "samples/" in text for text in found)
