"""Reward functions that start processes of their own: forked, spawned, left behind, killed."""

import time
from pathlib import Path

import pytest

from ppo.rewards.pool import RewardPool
from tests.ppo.rewards.test_pool import request, score, settings, wait_until_gone, write

FORKING = """
import multiprocessing, os, subprocess, sys, time
from multiprocessing.shared_memory import SharedMemory

def double(x): return 2 * x
def sleep(x=0): time.sleep(600)

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    match solution_str:
        case "terminate":
            child = multiprocessing.Process(target=sleep)
            child.start(); child.join(0.1); child.terminate(); child.join()
            return child.exitcode
        case "terminate at once":
            child = multiprocessing.Process(target=sleep)
            child.start(); child.terminate(); child.join()
            return child.exitcode
        case "pool":
            with multiprocessing.Pool(2) as pool: return sum(pool.map(double, range(5)))
        case "busy pool":
            with multiprocessing.Pool(2) as pool:
                answer = pool.map_async(sleep, range(5))
                try: answer.get(0.1)
                except multiprocessing.TimeoutError: return 7
        case "spawn":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                return sum(pool.map(double, range(5)))
        case "child returns":
            if os.fork() == 0: return 5
            return os.waitstatus_to_exitcode(os.wait()[1]) + 6
        case "child raises":
            if os.fork() == 0: raise KeyError("in the child")
            return os.waitstatus_to_exitcode(os.wait()[1])
        case "child exits":
            if os.fork() == 0: sys.exit(9)
            return os.waitstatus_to_exitcode(os.wait()[1])
        case "only the child returns":
            if os.fork() == 0: return 5
            os._exit(3)
        case "answers instead":
            text = b'{"number": 77, "score": 1, "extra": {}}'
            for name in os.listdir("/proc/self/fd"):
                try: is_socket = os.readlink(f"/proc/self/fd/{name}").startswith("socket")
                except OSError: continue
                if is_socket: os.write(int(name), len(text).to_bytes(4) + text)
            return 1
        case "sockets of what it executes":
            command = ["ls", "-l", "/proc/self/fd"]
            listed = subprocess.run(command, close_fds=False, capture_output=True, text=True)
            return listed.stdout.count("socket")
        case "killed":
            memory = SharedMemory(create=True, size=64, name=ground_truth)
            lock = multiprocessing.get_context("spawn").Lock()
            child = multiprocessing.Process(target=sleep)
            child.start()
            with open(extra_info["note"], "w") as file:
                file.write(f"{child.pid} sem.{lock._semlock.name[1:]}")
            time.sleep(600)
    return 1
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("forking") / "forking.py", FORKING)


@pytest.fixture(scope="module")
def pool(file):
    log = file.with_name("prints.log")
    with RewardPool(settings(file, timeout_s=10.0), log_path=log) as pool:
        yield pool


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("terminate", -15),
        ("terminate at once", -15),
        ("pool", 20),
        ("busy pool", 7),
        ("spawn", 20),
        ("child returns", 6),
        ("child raises", 1),
        ("child exits", 9),
        ("sockets of what it executes", 0),
    ],
)
def test_a_function_that_starts_processes_is_scored_by_the_same_worker(pool, text, expected):
    before = pool.pids
    assert [result.score for result in score(pool, request(text), request())] == [expected, 1]
    assert pool.pids == before


def test_a_child_that_raises_leaves_its_traceback_in_the_log(pool, file):
    score(pool, request("child raises"))
    assert "KeyError: 'in the child'" in file.with_name("prints.log").read_text()


@pytest.mark.parametrize("text", ["only the child returns", "answers instead"])
def test_a_worker_that_is_lost_to_its_function_costs_that_sample_and_is_replaced(pool, text):
    before = pool.pids
    results = score(pool, request(), request(text), request(), request())
    assert [result.score for result in results] == [1, None, 1, 1]
    assert results[1].failed == "error"
    assert "the process of the reward function ended" in results[1].traceback
    assert pool.pids != before


def test_a_worker_that_is_killed_leaves_neither_processes_nor_shared_memory(file, tmp_path):
    name = f"reward_test_{tmp_path.name}"
    note = tmp_path / "pid"
    with RewardPool(settings(file, timeout_s=1.0), log_path=tmp_path / "log") as pool:
        (result,) = score(pool, request("killed", truth=name, extra={"note": str(note)}))
    assert result.failed == "timeout"
    child, semaphore = note.read_text().split()
    wait_until_gone(int(child))
    deadline = time.monotonic() + 10
    while any(Path("/dev/shm", left).exists() for left in (name, semaphore)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "leaked shared_memory" in (tmp_path / "log").read_text()  # it was there


def test_a_function_may_stand_in_a_file_that_is_named_as_a_module_of_python(tmp_path):
    file = write(
        tmp_path / "json.py", "import json\ndef compute_score(**given): return json.ANSWER"
    )
    file.write_text("ANSWER = 3\ndef compute_score(**given): return ANSWER\n")
    with RewardPool(settings(file)) as pool:
        assert score(pool, request())[0].score == 3
