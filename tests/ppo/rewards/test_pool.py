"""The reward pool against functions that do everything wrong."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, Literal

import pytest

from ppo.config import RewardConfig, RewardFunctionConfig
from ppo.rewards.contract import RewardError, RewardRequest, RewardResult
from ppo.rewards.function import call, check_function, functions_of, load_function
from ppo.rewards.pool import RewardPool

NASTY = """
import os, subprocess, sys, time
from helper import GREETING

class Odd:
    def item(self): raise RuntimeError("no number")
    def __str__(self): raise RuntimeError("no text")

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0):
    match solution_str:
        case "raise": raise KeyError("no such thing")
        case "loop":
            while True: pass
        case "os._exit": os._exit(3)
        case "sys.exit": sys.exit(4)
        case "nan": return float("nan")
        case "inf": return {"score": float("-inf")}
        case "huge": return -1e39
        case "print": print("x" * 3_000_000, flush=True); return 1
        case "close": os.closerange(0, 65536); time.sleep(60)
        case "memory": return len(bytearray(64 << 30))
        case "none": return None
        case "pred": return {"score": 1, "pred": ground_truth, "acc": 1}
        case "dict": return {"score": 1, "acc": True, "text": "t", "bad": float("nan"),
                             "inf": float("-inf"), "big": 10**400, "odd": Odd(), Odd(): 1, 5: 2,
                             "\\ud800": 3}
        case "big": return 10**400
        case "modules": return {"score": 0, "torch": "torch" in sys.modules, "pid": os.getpid()}
        case "child":
            child = subprocess.Popen(["sleep", "600"])
            open(ground_truth, "w").write(str(child.pid))
            time.sleep(600)
        case "core": return __import__("resource").getrlimit(4)[0]
    return len(GREETING) + len(data_source) + ground_truth + extra_info.get("x", 0) + bonus
"""


def settings(
    *paths: Path,
    name: str = "compute_score",
    style: Literal["verl", "trl"] = "verl",
    weights: list[float] | None = None,
    workers: int = 1,
    timeout_s: float = 60.0,
    **kwargs,
) -> RewardConfig:
    function = RewardFunctionConfig(
        path=[str(path) for path in paths] or None,
        name=name.split(),
        kwargs=kwargs,
        style=style,
        weights=weights,
    )
    return RewardConfig(function=function, num_workers=workers, timeout_s=timeout_s)


def request(text="", *, source="src", truth: object = 1, extra=None, prompt: object = "p"):
    return RewardRequest(source, text, truth, extra or {}, prompt)


def check(reward: RewardConfig) -> None:
    for function in functions_of(reward.function):
        check_function(function)


def score(pool: RewardPool, *requests: RewardRequest) -> list[RewardResult]:
    job = pool.submit(requests)
    assert job.poll(60)
    return job.results


def write(path: Path, source: str) -> Path:
    path.write_text(textwrap.dedent(source))
    return path


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie that nobody reaps does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(*pids: int) -> None:
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still alive: {[p for p in pids if is_alive(p)]}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def nasty_file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("nasty")
    write(folder / "helper.py", "GREETING = 'hello'")
    return write(folder / "nasty.py", NASTY)


@pytest.fixture(scope="module")
def nasty(nasty_file):
    log = nasty_file.with_name("prints.log")
    reward = settings(nasty_file, workers=2, timeout_s=2.0, bonus=0.5)
    with RewardPool(reward, log_path=log) as pool:
        yield pool


def test_scores_come_in_order_with_arguments_options_and_neighbour_modules(nasty):
    requests = [request(str(i), truth=i, extra={"x": 100}) for i in range(50)]
    results = score(nasty, *requests)
    assert [r.score for r in results] == [5 + 3 + i + 100 + 0.5 for i in range(50)]
    assert not any(result.failed for result in results)


@pytest.mark.parametrize(
    ("text", "failed", "said"),
    [
        ("raise", "error", "KeyError: 'no such thing'"),
        ("loop", "timeout", "no result after reward.timeout_s = 2 s"),
        ("os._exit", "error", "ended: exit code 3"),
        ("sys.exit", "error", "SystemExit: 4"),
        ("nan", "error", "compute_score returned nan"),
        ("inf", "error", "compute_score returned -inf"),
        ("big", "error", "compute_score returned inf, which is no finite float32"),
        ("huge", "error", "compute_score returned -1e+39, which is no finite float32"),
        ("close", "error", "ended: signal SIGKILL"),
        ("memory", "error", "MemoryError"),
        ("none", "error", "must return a float, a bool or a dict"),
    ],
)
def test_a_bad_sample_costs_itself_alone(nasty, text, failed, said):
    good = request(truth=1)
    results = score(nasty, good, request(text), good, good)
    assert [result.score for result in results] == [9.5, None, 9.5, 9.5]
    assert results[1].failed == failed
    assert said in results[1].traceback
    assert "worker.py" not in results[1].traceback


def test_the_time_limit_holds_while_the_trainer_does_not_poll(nasty):
    job = nasty.submit([request("loop"), request()])
    time.sleep(4.5)
    assert job.poll(0)
    assert [result.failed for result in job.results] == ["timeout", None]


def test_workers_have_no_torch_no_core_files_and_prints_go_to_the_log(nasty, nasty_file):
    modules, core, printed = score(nasty, request("modules"), request("core"), request("print"))
    assert modules.extra["torch"] == 0
    assert modules.extra["pid"] in nasty.pids
    assert core.score == 0
    assert printed.score == 1
    assert nasty_file.with_name("prints.log").stat().st_size > 3_000_000


def test_dict_results_give_their_finite_numbers_as_metrics(nasty):
    extra = {"acc": 1.0, "5": 2.0, "\\ud800": 3.0}
    assert score(nasty, request("dict")) == [RewardResult(1.0, extra=extra)]


def test_the_entry_pred_is_the_answer_and_no_metric(nasty):
    preds = [" 3 ", 3, 2.5, True, None, "", [3]]
    found = score(nasty, *(request("pred", truth=pred) for pred in preds))
    assert [one.answer for one in found] == ["3", "3", "2.5", "True", None, None, None]
    assert all(one.score == 1 and one.extra == {"acc": 1.0} for one in found)


def test_signals_meant_for_the_trainer_do_not_end_workers(nasty):
    before = nasty.pids
    for pid in before:
        assert os.getsid(pid) == pid  # a terminal's Ctrl-C does not even reach it
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            os.kill(pid, number)
    assert score(nasty, request())[0].score == 9.5
    assert nasty.pids == before


def test_a_worker_that_is_killed_while_idle_is_replaced(nasty):
    victim = nasty.pids[0]
    os.kill(victim, signal.SIGKILL)
    wait_until_gone(victim)
    assert [r.score for r in score(nasty, *[request()] * 8)] == [9.5] * 8
    deadline = time.monotonic() + 10
    while victim in nasty.pids:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_sample_that_a_killed_worker_never_read_goes_to_another(nasty_file):
    with RewardPool(settings(nasty_file, workers=2, bonus=0.5)) as fresh:
        os.kill(fresh.pids[0], signal.SIGKILL)  # and submit at once: the pool cannot know yet
        assert [r.score for r in score(fresh, *[request()] * 8)] == [9.5] * 8


def test_a_timeout_ends_what_the_function_started(nasty, tmp_path):
    note = tmp_path / "pid"
    assert score(nasty, request("child", truth=str(note)))[0].failed == "timeout"
    wait_until_gone(int(note.read_text()))


def test_workers_end_with_the_pool_and_a_job_that_is_not_done_says_so(nasty_file):
    with RewardPool(settings(nasty_file, workers=2)) as pool:
        pids = pool.pids
        job = pool.submit([request("loop")])
        assert not job.poll(0.3)
    wait_until_gone(*pids)
    with pytest.raises(RewardError, match="the reward pool is closed"):
        job.poll(None)


def test_workers_end_with_a_parent_that_is_killed_and_never_run_its_main(nasty_file, tmp_path):
    main = write(
        tmp_path / "train_ppo.py",
        f"""
        import sys, time
        sys.path.insert(0, {str(Path(__file__).parents[3])!r})
        from tests.ppo.rewards.test_pool import RewardPool, request, settings
        with open({str(tmp_path / "started")!r}, "a") as file:
            file.write("main ")
        with RewardPool(settings({str(nasty_file)!r}, workers=2)) as pool:
            pool.submit([request("loop"), request("child", truth={str(tmp_path / "child")!r})])
            print(*pool.pids, flush=True)
            time.sleep(600)
        """,
    )
    with subprocess.Popen([sys.executable, str(main)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        deadline = time.monotonic() + 10
        while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        pids.append(int((tmp_path / "child").read_text()))
        assert len(pids) == 3 and all(is_alive(pid) for pid in pids)
        parent.kill()
    wait_until_gone(*pids)
    assert (tmp_path / "started").read_text() == "main "


def test_async_functions_are_awaited_together_each_under_its_own_limit(tmp_path):
    source = """
    import asyncio, os, time
    async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        if solution_str == "os._exit": os._exit(1)
        if solution_str == "raise": raise TimeoutError("mine")
        await asyncio.sleep(60 if solution_str == "late" else 0.5)
        return len(solution_str)
    """
    reward = settings(write(tmp_path / "f.py", source), timeout_s=3.0)
    with RewardPool(reward) as pool:
        start = time.monotonic()
        texts = ["late", "raise", *["a" * i for i in range(14)]]
        results = score(pool, *map(request, texts))
        assert time.monotonic() - start < 5  # one after the other: 14 x 0.5 + 3
        assert [result.failed for result in results] == ["timeout", "error", *[None] * 14]
        assert [result.score for result in results[2:]] == list(range(14))
        results = score(pool, request("a"), request("os._exit"), request("bb"))
        assert [result.score for result in results] == [1.0, None, 2.0]
        assert "exit code 1" in results[1].traceback


def test_trl_style_functions_get_lists_of_one_and_the_columns_they_name(tmp_path):
    source = """
    def plain(prompts, completions, level, **kwargs):
        assert (prompts, kwargs["ground_truth"]) == (["p"], [7])
        assert kwargs["reward_model"] == [{"ground_truth": 7}] and "extra_info" in kwargs
        return [len(completions[0]) + (level[0] or 0)]
    def chat(completions, data_source):
        return [float(completions[0][0] == {"role": "assistant", "content": data_source[0]})]
    async def wrong(completions, **kwargs): return 1.0
    """
    path = write(tmp_path / "f.py", source)
    with RewardPool(settings(path, name="plain", style="trl")) as pool:
        assert pool.columns == {"level"}
        assert score(pool, request("abc", truth=7, extra={"level": 10}))[0].score == 13
        assert score(pool, request("abc", truth=7))[0].score == 3  # null where a row has none
    with RewardPool(settings(path, name="chat", style="trl")) as pool:
        assert pool.columns == frozenset()
        assert score(pool, request("src", prompt=[{"role": "user"}]))[0].score == 1
    with RewardPool(settings(path, name="wrong", style="trl")) as pool:
        assert "must return a list" in score(pool, request("a"))[0].traceback


def test_a_function_without_a_signature_is_given_all_columns(tmp_path):
    path = write(tmp_path / "f.py", "compute_score = dict")  # as some of C extensions
    (function,) = functions_of(settings(path, style="trl").function)
    got: Any = call(load_function(function), request("abc", extra={"level": 10}))
    assert (got["completions"], got["level"], got["data_source"]) == (["abc"], [10], ["src"])


SEVERAL = """
def length(completions, **kwargs): return [len(completions[0])]
async def even(completions, **kwargs):
    return [None if completions[0] == "none" else len(completions[0]) % 2 == 0]
def scored(data_source, solution_str, ground_truth, extra_info):
    return {"score": 4, "tokens": 2}
"""


def test_scores_of_several_functions_are_summed_and_each_is_a_metric(tmp_path):
    one, two = write(tmp_path / "one.py", SEVERAL), write(tmp_path / "two.py", SEVERAL)
    reward = settings(one, name="length even", style="trl", weights=[0.5, 10.0])
    with RewardPool(reward) as pool:
        assert score(pool, request("abcd"), request("abc"), request("none")) == [
            RewardResult(12.0, extra={"length": 4.0, "even": 1.0}),
            RewardResult(1.5, extra={"length": 3.0, "even": 0.0}),
            RewardResult(2.0, extra={"length": 4.0}),  # None: does not apply
        ]
    with RewardPool(settings(one, name="even", style="trl")) as pool:
        assert score(pool, request("none")) == [RewardResult(None)]
    with RewardPool(settings(one, two, name="scored")) as pool:
        extra = {"one.scored": 4, "one.scored/tokens": 2, "two.scored": 4, "two.scored/tokens": 2}
        assert score(pool, request("a")) == [RewardResult(8.0, extra=extra)]


def test_every_function_has_a_label_of_its_own():
    def labels(*paths: str, names: list[str]) -> list[str]:
        function = RewardFunctionConfig(path=list(paths), name=names)
        return [function.label for function in functions_of(function)]

    assert labels("a/x.py", names=["f", "g"]) == ["f", "g"]
    assert labels("a/x.py", "a/y.py", names=["f"]) == ["x.f", "y.f"]
    assert labels("a/x.py", "b/x.py", names=["f"]) == ["0.f", "1.f"]


@pytest.mark.parametrize(
    ("paths", "names", "weights"),
    [(2, 3, None), (3, 2, None), (2, 2, [1.0]), (1, 1, [1.0, 2.0]), (0, 1, None), (1, 0, None)],
)
def test_lists_of_functions_that_do_not_fit_together_are_refused(paths, names, weights):
    function = RewardFunctionConfig(
        path=[f"{i}.py" for i in range(paths)], name=["f"] * names, weights=weights
    )
    with pytest.raises(RewardError, match="do not fit together"):
        functions_of(function)


@pytest.mark.parametrize(
    ("style", "source", "said"),
    [
        ("verl", "def f(prompts, completions, **kwargs): pass", "TRL's style; set reward.functi"),
        ("verl", "def f(prompts=None, completions=None, **kw): pass", "this is TRL's style"),
        ("trl", "def f(data_source, solution_str, **kw): pass", "verl's style; leave reward.fun"),
        ("trl", "def f(completions, /): pass", "takes no 'completions'"),
        ("verl", "def f(**kwargs): pass", "kwargs must not hold ground_truth"),
    ],
)
def test_the_other_style_is_recognised(tmp_path, style, source, said):
    reward = settings(write(tmp_path / "f.py", source), name="f", style=style)
    if "must not hold" in said:
        reward.function.kwargs["ground_truth"] = 1
    with pytest.raises(RewardError, match=said):
        check(reward)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def other(): pass", "defines no 'compute_score'; it has other"),
        ("def compute_score(text): pass", r"wrong signature compute_score\(text\): "),
        (
            "def compute_score(data_source, solution_str, ground_truth, extra_info, more): pass",
            "missing a required argument: 'more'",
        ),
        ("def compute_score(data_source, *, solution_str, ground_truth): pass", "'extra_info'"),
        ("def compute_score(:", "is not valid Python"),
    ],
)
def test_a_wrong_file_or_signature_is_found_without_running_it(tmp_path, source, said):
    path = write(tmp_path / "f.py", f"raise RuntimeError('was run')\n{source}")
    with pytest.raises(RewardError, match=said):
        check(settings(path))
    with pytest.raises(RewardError, match="no such file"):
        check(settings(tmp_path / "gone.py"))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_module\ndef compute_score(**kwargs): pass", "No module named 'no_such_mo"),
        ("compute_score = lambda text: 1", "wrong signature"),
        ("compute_score = 3", "is no function"),
        (
            "import os\ndef compute_score(**kwargs): pass\nos._exit(5)",
            r"ended \(exit code 5\) while",
        ),
    ],
)
def test_what_only_importing_shows_is_found_before_the_run(tmp_path, source, said):
    with (
        pytest.raises(RewardError, match=said),
        RewardPool(settings(write(tmp_path / "f.py", source))),
    ):
        pass


def test_the_probe_refuses_wrong_types_and_warns_of_what_an_empty_answer_may_cause(tmp_path):
    source = """
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        assert solution_str == ""
        return {"text": "1", "empty": 1 / len(solution_str or "abc"[:ground_truth])}[data_source]
    """
    with RewardPool(settings(write(tmp_path / "f.py", source))) as pool:
        with pytest.raises(RewardError, match=r"data_source 'text': .* not str"):
            pool.probe([request("x", source="text"), request("x", source="empty")])
        assert pool.probe([request("x", source="empty", truth=2)] * 3) == []
        source = "def compute_score(**kwargs): raise IndexError('no words')"
    with RewardPool(settings(write(tmp_path / "g.py", source))) as pool:
        (warning,) = pool.probe([request("x", source="empty"), request("y", source="empty")])
        assert "data_source 'empty' (error)" in warning and "IndexError: no words" in warning


def test_an_unknown_data_source_is_found_by_the_probe():
    with (
        RewardPool(settings()) as pool,
        pytest.raises(RewardError, match=r"'mine' \(built in: .*gsm8k.*reward\.function\.path"),
    ):
        pool.probe([request(source="exact_match"), request(source="mine")])


def test_a_worker_runs_on_all_cores_though_its_rank_is_bound_to_some(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info): return 1\n"
    )
    mine = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(mine)})
        with RewardPool(settings(file)) as pool:
            (worker,) = pool.pids
            assert os.sched_getaffinity(worker) == os.sched_getaffinity(os.getppid())
    finally:
        os.sched_setaffinity(0, mine)
