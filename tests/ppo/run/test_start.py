"""The start of a process: what the launcher says, and how wrong input is reported."""

import json
import time

import pytest
import torch

from ppo.config import ConfigError, load_config
from ppo.errors import InputError
from ppo.run.start import (
    EXIT_CONFIG,
    SAID_ABOVE,
    UNHEARD_S,
    Launch,
    choose_dims,
    pick_device,
    program,
    use_expandable_segments,
)
from ppo.run.startup import StartClock, process_age
from sharding.mesh import init_distributed

ERROR = InputError("configuration: 1 problem\n  rollout.n = 0: must be at least 1")


def under_torchrun(error_file: str, rank: int, local_rank: int, restart: int = 0) -> Launch:
    return Launch.from_env(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_RESTART_COUNT": str(restart),
            "TORCHELASTIC_ERROR_FILE": error_file,
        }
    )


@pytest.mark.parametrize("restart", [0, 1])
def test_wrong_input_is_said_at_once_and_once_and_torchruns_report_points_to_it(
    tmp_path, capfd, restart, monkeypatch
):
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    for rank, local_rank in ((0, 0), (1, 1), (2, 0), (3, 1)):
        file = str(tmp_path / f"error{rank}.json")
        assert under_torchrun(file, rank, local_rank, restart).report(ERROR) == EXIT_CONFIG
    assert waited == [UNHEARD_S, UNHEARD_S]  # those who say nothing; torchrun ends them sooner
    assert capfd.readouterr().err == ("" if restart else f"{ERROR}\n")
    files = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert {name: reason["message"] for name, reason in files.items()} == {
        "error0.json": SAID_ABOVE,
        "error2.json": str(ERROR),  # the second node's own
    }
    assert all(reason["timestamp"] > 1e9 for reason in files.values())


@pytest.mark.parametrize(
    ("devices", "agent", "visible", "found"),
    [
        (2, True, None, [0, 1]),
        (8, True, None, [0, 1]),
        (1, False, None, [0, 0]),  # each sees its own
        (1, True, "3", [0, 0]),  # by a wrapper
        (1, True, None, "2 ranks on a node where torch sees 1 CUDA devices"),
    ],
)
def test_a_rank_has_a_device_of_its_own(monkeypatch, devices, agent, visible, found):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    config, env = load_config("ppo_tiny.yaml", ["trainer.device=auto"]), {}
    if visible is not None:
        env["CUDA_VISIBLE_DEVICES"] = visible
    ranks = [
        Launch(local_rank=rank, world_size=2, ranks_per_node=2, has_agent=agent, env=env)
        for rank in range(2)
    ]
    if isinstance(found, str):
        for rank in ranks:
            with pytest.raises(ConfigError, match=found):
                pick_device(config, rank)
        return
    assert [pick_device(config, rank).index for rank in ranks] == found


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "first"}, "RANK='first' of the environment is no number"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE='-1'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "which do not agree"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "no MASTER_ADDR and MASTER_PORT"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "no MASTER_PORT"),
    ],
)
def test_an_environment_that_torchrun_would_not_make_is_wrong_input(capfd, env, words):
    assert program(lambda *_: 0, env, []) == EXIT_CONFIG
    err = capfd.readouterr().err
    assert words in err and "`unset RANK WORLD_SIZE`" in err and len(err.splitlines()) == 1
    assert program(lambda launch, _: launch.world_size, {"WORLD_SIZE": ""}, []) == 1


def test_without_torchruns_file_the_first_rank_says_it_on_the_first_start(tmp_path, capfd):
    assert Launch(rank=0).report(ERROR) == EXIT_CONFIG
    assert capfd.readouterr().err == f"{ERROR}\n"
    Launch(rank=1).report(ERROR)
    Launch(rank=0, restart_count=1).report(ERROR)
    assert capfd.readouterr().err == ""
    under_torchrun(str(tmp_path / "absent" / "error.json"), 0, 0).report(ERROR)
    assert capfd.readouterr().err == f"{ERROR}\n"


@pytest.fixture
def allocator_settings():
    """What reads torch's own, which are put back."""
    if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        pytest.skip("this torch does not tell its allocator's settings")
    before = torch._C._accelerator_getAllocatorSettings()
    yield torch._C._accelerator_getAllocatorSettings
    torch._C._accelerator_setAllocatorSettings(before)


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("", "expandable_segments:True"),
        ("max_split_size_mb:64", "max_split_size_mb:64,expandable_segments:True"),
        ("expandable_segments:False", "expandable_segments:False"),
    ],
)
def test_segments_of_the_device_grow_unless_the_user_says_else(allocator_settings, given, used):
    torch._C._accelerator_setAllocatorSettings(given)  # as torch does when it is imported
    launch = Launch.from_env({"PYTORCH_ALLOC_CONF": given})
    use_expandable_segments(launch.allocator)
    assert allocator_settings() == used


def test_nccl_keeps_a_record_of_collectives_unless_the_user_says_else_by_any_of_its_names():
    env: dict[str, str] = {}
    Launch.from_env(env)
    assert env["TORCH_FR_BUFFER_SIZE"] == "2000" and env["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    theirs = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    env = dict(theirs)
    Launch.from_env(env)
    assert "TORCH_FR_BUFFER_SIZE" not in env and theirs.items() <= env.items()


def test_the_age_of_a_process_and_the_parts_of_its_start():
    clock = StartClock(process_age())
    clock.mark("imports")
    clock.mark("models")
    clock.mark("models")
    assert list(clock.seconds) == ["imports", "models"]
    assert 0.1 < clock.seconds["imports"] < 3600 and clock.seconds["models"] < 1
    assert str(clock).startswith("started in ") and "imports" in str(clock)


@pytest.mark.gpu
def test_on_a_gpu_memory_in_the_middle_of_a_segment_is_given_back():
    """Without growing segments the last of 32 blocks would keep the whole segment."""
    use_expandable_segments("")
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    blocks = [torch.empty(1 << 20, dtype=torch.uint8, device="cuda") for _ in range(320)]
    last = blocks[-1]
    blocks.clear()
    torch.cuda.empty_cache()
    assert free - torch.cuda.mem_get_info()[0] <= 32 << 20
    assert last.is_cuda


def test_a_run_shards_as_the_check_says_by_its_smallest_device():
    base = ["model.path=Qwen/Qwen2.5-14B-Instruct", "data.train_files=tiny"]
    launch = Launch(world_size=32, ranks_per_node=8)

    def size(*overrides: str, gib: float | None = 80.0) -> tuple[int, str]:
        config = load_config(None, [*base, *overrides])
        memory = None if gib is None else gib * 2**30
        dims, reason = choose_dims(config, launch, memory)
        return dims.shard_size, reason.partition("; ")[2]

    with init_distributed(torch.device("cpu")):  # ranks that are not here have nothing to say
        assert size() == (16, "the smallest larger group that fits")
        assert size(gib=60) == (32, "the smallest larger group that fits")
        assert size(gib=None) == (8, "")
        assert size("actor.fsdp.fsdp_size=8") == (8, "")
        assert size("actor.fsdp.sharding_strategy=FULL_SHARD") == (32, "")
        config = load_config(None, ["model.path=nobody/knows", "data.train_files=tiny"])
        dims, reason = choose_dims(config, launch, 80 * 2**30)
        assert dims.shard_size == 8 and "sizes are unknown" in reason
