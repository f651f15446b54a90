"""The start of a process: what the launcher says, and how wrong input is reported."""

import json

from ppo.errors import InputError
from ppo.run.start import EXIT_CONFIG, Launch

ERROR = InputError("configuration: 1 problem\n  rollout.n = 0: must be at least 1")


def under_torchrun(error_file: str, rank: int, local_rank: int) -> Launch:
    return Launch.from_env(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_RESTART_COUNT": "1",
            "TORCHELASTIC_ERROR_FILE": error_file,
        }
    )


def test_the_first_rank_of_each_node_tells_torchrun_what_is_wrong(tmp_path, capfd):
    for rank, local_rank in ((0, 0), (1, 1), (2, 0), (3, 1)):
        launch = under_torchrun(str(tmp_path / f"error{rank}.json"), rank, local_rank)
        assert launch.report(ERROR) == EXIT_CONFIG
    assert sorted(file.name for file in tmp_path.iterdir()) == ["error0.json", "error2.json"]
    reason = json.loads((tmp_path / "error2.json").read_text())
    assert reason["message"] == str(ERROR) and reason["timestamp"] > 1e9
    assert capfd.readouterr().err == ""


def test_without_torchruns_file_the_first_rank_says_it_on_the_first_start(tmp_path, capfd):
    assert Launch(rank=0).report(ERROR) == EXIT_CONFIG
    assert capfd.readouterr().err == f"{ERROR}\n"
    Launch(rank=1).report(ERROR)
    Launch(rank=0, restart_count=1).report(ERROR)
    assert capfd.readouterr().err == ""
    under_torchrun(str(tmp_path / "absent" / "error.json"), 0, 0).report(ERROR)
    assert capfd.readouterr().err == f"{ERROR}\n"
