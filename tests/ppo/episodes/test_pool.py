"""Episodes in their processes, whatever the user's code does; the engine is a script."""

import textwrap
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from ppo.episodes.contract import EpisodeError, EpisodeProgram, EpisodeResult, TurnRequest
from ppo.episodes.pool import EpisodePool
from ppo.episodes.program import check_program
from tests.ppo.episodes.scripted import (
    END,
    LIMITS,
    check_segment,
    ids_of,
    play,
    reply_to,
    spec,
    text_of,
)
from tests.ppo.episodes.shapes import format_of, id_of

NASTY = """
import asyncio, os, signal, subprocess, sys, threading, time
import numpy as np

def adds(a: int, b: int = 1) -> int:
    '''Adds.

    Args:
        a: one
        b: other
    '''
    return a + b

def does(what: str):
    '''Does something bad.

    Args:
        what: the name of it
    '''
    match what:
        case "hang": time.sleep(600)
        case "spin":
            while True: pass
        case "raise": raise KeyError("no such thing")
        case "exit": sys.exit(3)
        case "die": os._exit(3)
        case "kill": os.kill(os.getpid(), signal.SIGKILL)
        case "print": print("x" * 10_000_000, flush=True); return "printed"
        case "long": return "y" * 10_000_000
        case "bytes": return b"caf\\xc3\\xa9 \\xff"
        case "surrogate": return "half \\ud800"
        case "fork": return "child" if os.fork() == 0 else "parent"
        case "start": return str(subprocess.Popen(["sleep", "600"]).pid)
        case "odd": return {"set": {1}}
        case "late": raise TimeoutError("connecting took 2 s")
        case "silent": raise ConnectionError
        case "parts": return [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
        case "image": return [{"type": "text", "text": "a"}, {"type": "image", "image": b"..."}]
        case "list": return [{"type": "book", "title": "x"}]
        case "modules": return str("torch" in sys.modules)
    return "done"

async def waits(what: str = ""):
    '''Waits for ever.

    Args:
        what: exit, or cancel, instead
    '''
    match what:
        case "exit": sys.exit(3)
        case "cancel": raise asyncio.CancelledError
    await asyncio.sleep(600)

async def tools(row, policy):
    policy.score = 0.25
    reply = await policy.chat(tools=[adds, does, waits])
    while reply.tool_calls:
        reply = await policy.chat(await policy.run_tools(reply))
    return float(reply.text) if reply.text else None

async def code(row, policy):
    await policy.chat()
    match row["does"]:
        case "raise": raise RuntimeError("broken environment")
        case "exit": sys.exit(3)
        case "block": time.sleep(600)
        case "wait": await asyncio.sleep(600)
        case "die": os._exit(3)
        case "text": return "much"
        case "nan": return float("nan")
        case "cancel": asyncio.current_task().cancel(); await asyncio.sleep(1)
        case "fork":
            if os.fork() == 0: return 0.0
        case "reward": policy.reward(float("inf"))
        case "role": await policy.chat({"content": "who?"})
        case "ids": await policy.complete([10**6])
        case "image": await policy.chat({"role": "user", "content": [{"type": "image"}]})
        case "both": await asyncio.gather(policy.chat("a"), policy.chat("b"))
        case "given up":
            asking = asyncio.ensure_future(policy.chat("a"))
            await asyncio.sleep(0)
            asking.cancel()
            await policy.complete("b")
        case "behind":
            asking = asyncio.ensure_future(policy.chat("a"))
            await asyncio.sleep(0)
            policy.branch()
        case "whole": await policy.chat([*policy.messages, {"role": "user", "content": "b"}])
        case "thread": await asyncio.to_thread(time.sleep, 600)
        case "message":
            await policy.chat({"role": "user", "content": "x", "odd": object()})
            return 0.5
        case "score": policy.score = float("nan")
        case "swallow":
            try: await policy.chat("x" * 5000)
            except Exception: pass
    await asyncio.sleep(0.2)
    return 1.0

async def episode(row, policy):
    return await globals()[row.get("kind", "tools")](row, policy)

async def two_rewards(row, policy):
    reply = await policy.chat("How many?", stop=["!"])
    policy.reward(1); policy.reward(0.5)
    reply = await policy.complete(" <result>42</result>", max_tokens=4)
    policy.reward(2)
    said = {"length": len(reply.ids), "half": np.float32(0.5), "turns": np.int64(2)}
    return {"score": 1, **said, "finish": reply.finish, "bad": float("nan"), "huge": 10**400}

async def too_long(row, policy):
    for said in ("x" * 5000, "short"):
        try: await policy.chat(said)
        except BaseException as over: assert over.finish == "length"
    reply = await policy.branch("numbers").complete([np.int64(1), True], max_tokens=np.int64(2))
    return len(reply.ids)

async def branches(row, policy):
    reply = await policy.chat()
    goes_on = policy.branch()
    parts = [{"type": "text", "text": "Sum up: "}, {"type": "text", "text": reply.text}]
    other = policy.branch({"role": "user", "content": parts})
    await asyncio.gather(goes_on.chat("left"), policy.chat("right"), other.chat())
    try: goes_on.branch().reward(1)
    except ValueError as error: assert "no sampled token" in str(error)
    return 3

async def at_once(row, policy):
    policy.score = 0.75
    await policy.chat()
    left, right = policy.branch(), policy.branch()
    while True:
        asked = [each.chat("On.") for each in (left, right)]
        if row.get("in_group", True):
            async with asyncio.TaskGroup() as group:
                for each in asked: group.create_task(each)
        else:
            await asyncio.gather(*asked)

async def shared(row, policy):
    await policy.chat("a")
    before, left = policy.messages, policy.tokens_left
    for asking in (policy.chat("b", max_tokens=0), policy.complete("b", max_tokens=-1)):
        try: await asking
        except ValueError as error: assert "at least 1" in str(error)
    assert (policy.messages, policy.tokens_left) == (before, left)
    await policy.branch().complete(" more")
    assert policy.messages == before
    return 1.0

async def loops(row, policy):
    policy.score = 0.75
    while True:
        await policy.chat(row.get("say", "On."))
"""


def call(name: str, **arguments: object) -> str:
    import json

    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def bad(what: str) -> str:
    return call("does", what=what)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> EpisodeProgram:
    path = tmp_path_factory.mktemp("episodes") / "nasty.py"
    path.write_text(textwrap.dedent(NASTY))
    return EpisodeProgram(str(path))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "episodes.log"


@pytest.fixture(scope="module")
def pool(program: EpisodeProgram, log: Path) -> Iterator[EpisodePool]:
    chat = format_of("Qwen2.5")
    with EpisodePool(program, chat, LIMITS, num_workers=2, log_path=log) as opened:
        yield opened
        pids = opened.pids
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def tool_script(said: dict[int, list[str]]):
    def script(request: TurnRequest) -> str:
        return said[request.episode][request.turn]

    return script


def told(result: EpisodeResult) -> str:
    """What the last tool has answered."""
    return [m for m in result.messages if m["role"] == "tool"][-1]["content"]


def test_whatever_a_tool_does_the_model_is_told_and_other_episodes_go_on(
    pool: EpisodePool, log: Path
) -> None:
    said = {
        0: [call("adds", a=2, b=3), "1"],
        1: [bad("raise"), "1"],
        2: [bad("exit"), "1"],
        3: [bad("print"), "1"],
        4: [bad("bytes"), "1"],
        5: [bad("surrogate"), "1"],
        6: [bad("fork"), "1"],
        7: [bad("odd"), "1"],
        8: [call("nothing"), "1"],
        9: [call("adds", c=2), "1"],
        10: ["<tool_call>{", "1"],
        11: [bad("modules"), "1"],
        12: [call("adds", a="x"), "1"],
        13: [bad("long")],
        14: [call("adds", a=1) + call("adds", a=2), "1"],
        15: [bad("late"), "1"],
        16: [bad("silent"), "1"],
        17: [bad("parts"), "1"],
        18: [bad("image"), "1"],
        19: [bad("list"), "1"],
        20: [call("waits", what="exit"), "1"],
        21: [call("waits", what="cancel"), "1"],
    }
    results = play(pool, [spec(number) for number in said], tool_script(said))
    assert log.stat().st_size > 10_000_000  # what was printed
    texts = {number: told(result) for number, result in results.items() if number != 13}
    assert texts[0] == "5" and texts[14] == "3"
    assert "no such thing" in texts[1]
    assert "SystemExit" in texts[2] and "SystemExit" in texts[20]
    assert texts[21] == "Error: CancelledError()"
    assert texts[3] == "printed" and texts[4] == "café \ufffd" and texts[5] == "half \\ud800"
    assert texts[6] == "parent"  # the child has ended where the tool returned
    assert texts[7] == "{'set': {1}}"
    assert texts[8] == "Error: there is no tool 'nothing'; there are: adds, does, waits"
    assert "unexpected keyword argument 'c'" in texts[9] or "missing" in texts[9]
    assert "malformed call of a tool" in texts[10] and texts[11] == "False"
    assert "Error: can only concatenate" in texts[12]
    assert texts[15] == "Error: connecting took 2 s"  # its limit, not ours
    assert texts[16] == "Error: ConnectionError"
    assert texts[17] == "a b" and texts[19] == '[{"type": "book", "title": "x"}]'
    assert "text alone is read" in texts[18]
    for number, result in results.items():
        assert result.failed is None, result.reason
        assert result.score == (0.25 if number == 13 else 1.0)
        for segment in result.segments:
            check_segment(segment)
    # 10 MB do not fit: the episode ended before they were appended
    assert results[13].finish == "length" and results[13].counts["observation_tokens"] == 0
    counts = {name: sum(r.counts[name] for r in results.values()) for name in results[0].counts}
    assert counts["tool_calls"] == 23 and counts["turns"] == 43
    assert counts["parse_error"] == 3 and counts["tool_error"] == 8
    assert counts["tool_timeout"] == counts["env_error"] == 0


def test_tools_that_hang_are_an_observation_and_their_processes_are_replaced(
    program: EpisodeProgram,
) -> None:
    said = {0: [bad("hang"), "1"], 1: [bad("spin"), "1"], 2: [call("waits"), "1"]}
    said |= {number: [call("adds", a=number), "1"] for number in range(3, 8)}
    limits = LIMITS._replace(tool_timeout_s=0.5)
    with EpisodePool(program, format_of("Qwen2.5"), limits, num_workers=2) as pool:
        before = set(pool.pids)
        results = play(pool, [spec(number) for number in said], tool_script(said))
        for number, result in results.items():
            assert (result.score, result.failed) == (1.0, None)
            if number < 3:
                name = "waits" if number == 2 else "does"
                assert told(result) == f"Error: {name} took longer than 0.5 s"
                assert result.counts["tool_timeout"] == 1
        deadline = time.monotonic() + 30  # threads hang in both: replaced when they are idle
        while set(pool.pids) & before and time.monotonic() < deadline:
            pool.poll(0.1)
        assert not set(pool.pids) & before
        assert not [pid for pid in before if _is_running(pid)]


def test_episodes_that_wait_for_a_process_are_told_so_that_nobody_waits_for_them(
    program: EpisodeProgram,
) -> None:
    limits = LIMITS._replace(tool_timeout_s=0.2)

    def asked() -> list[TurnRequest]:
        while not (requests := pool.poll(1.0)[0]):
            assert pool.unfinished
        return requests

    with EpisodePool(program, format_of("Qwen2.5"), limits, num_workers=1) as pool:
        pool.begin([spec(0)])
        (first,) = asked()
        pool.answer([reply_to(first, bad("hang"))])
        (second,) = asked()  # the tool was too slow: its thread hangs in the process
        assert pool.held == 0
        pool.begin([spec(1)])
        deadline = time.monotonic() + 30
        while pool.held == 0 and time.monotonic() < deadline:
            assert pool.poll(0.05) == ([], [])
        assert pool.held == 1 and pool.unfinished == 2
        pool.answer([reply_to(second, "1")])
        (third,) = asked()  # of a new process
        assert (third.episode, pool.held) == (1, 0)


def test_code_that_ends_its_process_fails_alone(pool: EpisodePool) -> None:
    said: dict[int, list[str]] = {0: [bad("die")], 1: [bad("kill")]}
    said |= {number: [call("adds", a=number), call("adds", a=1), "1"] for number in range(2, 14)}
    asked: list[TurnRequest] = []
    results = play(pool, [spec(n) for n in said], tool_script(said), seen=asked)
    for number, result in results.items():
        if number < 2:
            assert result.failed == "error" and result.finish == "error"
            assert result.reason.startswith("its process ended (")
            assert result.counts["env_error"] == 1
        else:
            assert (result.score, result.failed) == (1.0, None), result.reason
            assert result.counts["tool_calls"] == 2
    # those that began again were told the turns that they had: nothing was sampled twice
    keys = [(request.episode, request.turn) for request in asked]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("starts", [3])
def test_what_a_tool_has_started_ends_with_its_process(
    program: EpisodeProgram, starts: int, tmp_path: Path
) -> None:
    said = {number: [bad("start"), "1"] for number in range(starts)}
    with EpisodePool(program, format_of("Qwen2.5"), LIMITS, num_workers=1) as pool:
        results = play(pool, [spec(number) for number in said], tool_script(said))
        pids = [int(told(result)) for result in results.values()]
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        # a stop, in the middle of episodes: the set ends at once, and the pool goes on
        pool.begin([spec(0, kind="code", does="block"), spec(1)])
        pool.poll(5.0)
        start = time.monotonic()
        pool.abort()
        assert pool.unfinished == 0 and pool.poll() == ([], [])
        assert time.monotonic() - start < 10
        again = play(pool, [spec(0)], lambda request: "1")
        assert again[0].score == 1.0
        # an episode that is dropped while it waits takes its process with it, too
        pool.begin([spec(0)])
        assert pool.poll(30.0)[0]
        before = pool.pids
        pool.abort()
        deadline = time.monotonic() + 10
        while pool.pids == before and time.monotonic() < deadline:
            pool.poll(0.05)
        assert pool.pids != before
        start = time.monotonic()
    assert time.monotonic() - start < 10
    deadline = time.monotonic() + 5
    while any(_is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if _is_running(pid)]


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_environment_that_crashes_masks_its_episode_and_is_counted(pool: EpisodePool) -> None:
    kinds = ["raise", "exit", "text", "nan", "cancel", "reward", "role", "ids", "swallow"]
    good = ["fork", "message", "fine"]
    asks = ["image", "both", "given up", "behind", "whole", "score"]
    rows = [spec(i, kind="code", does=does) for i, does in enumerate([*kinds, *good, *asks])]
    pids = pool.pids
    results = play(pool, rows, lambda request: "hello")
    assert pool.pids == pids  # nothing of this costs a process
    reasons = ["broken environment", "SystemExit", "str, not a number", "not finite"]
    reasons += ["Cancelled", "not a finite number", "a message needs a role", "ids must lie below"]
    for number, reason in enumerate(reasons):
        result = results[number]
        assert result.failed == "error" and reason in result.reason, (number, result.reason)
        assert result.counts["env_error"] == 1 and result.score is None
        assert ('File "' in result.reason) == (number not in (2, 3))
        assert number == 4 or "ppo/episodes/worker.py" not in result.reason
        assert [text_of(s.ids) for s in result.segments] == [f"hello{END}"]
    # a limit is no Exception: code that catches these does not go on
    assert results[8].failed is None and results[8].finish == "length"
    assert [results[i].score for i in (9, 10, 11)] == [1.0, 0.5, 1.0]
    waits = ["waits for a turn already"] * 3
    reasons = ["text alone is read", *waits, "pass what is new alone", "policy.score: nan is not"]
    for number, reason in enumerate(reasons, start=12):
        assert results[number].failed == "error" and reason in results[number].reason


def test_code_that_blocks_the_event_loop_fails_alone_within_the_limits(
    program: EpisodeProgram,
) -> None:
    limits = LIMITS._replace(tool_timeout_s=0.5, timeout_s=8.0)
    rows = [spec(0, kind="code", does="block"), spec(1, kind="code", does="wait")]
    rows += [spec(number, kind="code", does="fine") for number in range(2, 6)]
    with EpisodePool(program, format_of("Qwen2.5"), limits, num_workers=1) as pool:
        start = time.monotonic()
        results = play(pool, rows, lambda request: "hello", within_s=300)
    # it takes 12 s; on a busy machine it is the start of another process that takes long
    assert time.monotonic() - start < 200
    assert results[0].failed in ("error", "timeout"), results[0]
    assert results[1].failed == "timeout" and results[1].reason == "no end after 8 s"
    for number in range(2, 6):
        assert (results[number].score, results[number].failed) == (1.0, None)


def test_a_process_whose_threads_hang_where_nobody_counts_them_is_replaced(
    program: EpisodeProgram,
) -> None:
    limits = LIMITS._replace(tool_timeout_s=0.5, timeout_s=1.0)
    with EpisodePool(program, format_of("Qwen2.5"), limits, num_workers=1) as pool:
        before = pool.pids
        result = play(pool, [spec(0, kind="code", does="thread")], lambda request: "hello")[0]
        assert (result.failed, result.reason) == ("timeout", "no end after 1 s")
        deadline = time.monotonic() + 30
        while pool.pids == before and time.monotonic() < deadline:
            pool.poll(0.05)
        assert pool.pids != before


def test_turns_are_appended_to_what_was_sampled_and_never_encoded_again(pool: EpisodePool) -> None:
    asked: list[TurnRequest] = []
    specs = [spec(0, kind="loops"), spec(1, kind="loops", say="x" * 120)]
    results = play(pool, specs, lambda request: "hello", seen=asked)
    mine = [request for request in asked if request.episode == 0]
    assert [request.turn for request in mine] == list(range(LIMITS.max_turns))
    sampled = [id_of("he"), id_of("llo"), id_of(END)]
    between = ids_of(f"\n<|im_start|>user\nOn.{END}\n<|im_start|>assistant\n")
    for before, after in pairwise(mine):
        assert after.prompt_ids == before.prompt_ids + sampled + between
        assert after.sampled_before == before.sampled_before + 3
        assert after.uid == before.uid == 1000
        assert after.max_tokens == before.max_tokens - len(sampled) - len(between)
    first = results[0]
    assert (first.finish, first.score, first.counts["turns"]) == ("max_turns", 0.75, 8)
    assert first.counts["observation_tokens"] == 7 * len(between)
    (segment,) = first.segments
    check_segment(segment)
    assert segment.prompt_ids + segment.ids.tolist() == mine[-1].prompt_ids + sampled
    assert segment.sampled.sum() == segment.counted.sum() == 24
    wanted = [-(len(request.prompt_ids) + i + 1) / 1024 for request in mine for i in range(3)]
    assert segment.logprobs[segment.sampled].tolist() == wanted
    # the other ran out of tokens: what did not fit was not appended
    (segment,) = results[1].segments
    assert results[1].finish == "length" and results[1].failed is None
    assert segment.ids[-1] == id_of(END) and len(segment.ids) <= LIMITS.max_response_length
    assert len(segment.ids) + len(between) + 117 > LIMITS.max_response_length


def test_rewards_stop_texts_and_text_that_is_written_for_the_model(pool: EpisodePool) -> None:
    def script(request: TurnRequest):
        assert request.stop == (("!",) if request.turn == 0 else ())
        return ("6 x 7!", "stop_text") if request.turn == 0 else ("hello" * 3, "stop")

    result = play(pool, [spec(0, kind="two_rewards")], script)[0]
    (segment,) = result.segments
    assert text_of(segment.ids) == "6 x 7! <result>42</result>hellohello"
    assert text_of(segment.prompt_ids).endswith(
        "user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert segment.sampled.tolist() == [True] * 6 + [False] * 20 + [True] * 4
    assert segment.turn_rewards == [(5, 1.0), (5, 0.5), (29, 2.0)]
    assert (result.score, result.extra) == (1.0, {"length": 4.0, "half": 0.5, "turns": 2.0})
    assert result.counts["observation_tokens"] == 20
    said = result.messages[-1]
    assert said == {"role": "assistant", "content": "6 x 7! <result>42</result>hellohello"}


def test_branches_share_a_prefix_and_count_each_token_once(pool: EpisodePool) -> None:
    asked: list[TurnRequest] = []
    result = play(pool, [spec(7, kind="branches")], lambda r: f"turn {r.turn}", seen=asked)[7]
    main, forked, other, empty = result.segments
    for segment in result.segments:
        check_segment(segment)
    shared = len(ids_of("turn 0")) + 1
    assert text_of(main.ids[:shared]) == text_of(forked.ids[:shared]) == f"turn 0{END}"
    assert main.counted[:shared].all() and not forked.counted[:shared].any()
    assert forked.sampled[:shared].all()
    assert "right" in text_of(main.ids) and "left" in text_of(forked.ids)
    assert forked.logprobs[:shared].tolist() == main.logprobs[:shared].tolist()
    wanted = f"<|im_start|>user\nSum up: turn 0{END}\n<|im_start|>assistant\n"
    assert text_of(other.prompt_ids) == wanted
    assert not empty.counted.any() and len(empty.ids) == len(forked.ids)
    total = sum(int(segment.counted.sum()) for segment in result.segments)
    assert total == 4 * shared and result.counts["turns"] == 4 and result.counts["branches"] == 3
    rows = [spec(0, kind="shared"), spec(1, kind="too_long")]
    results = play(pool, rows, lambda request: "hello")
    assert [results[i].score for i in (0, 1)] == [1.0, 2.0], results
    assert [results[i].counts["branches"] for i in (0, 1)] == [1, 1]
    uids = {(request.segment, request.uid) for request in asked}
    assert len(uids) == 3 and {uid for _, uid in uids} == {1007 + (s << 52) for s in range(3)}
    assert [r.sampled_before for r in asked if r.segment == 1] == [0]


def test_a_prompt_or_observation_that_is_too_long(program: EpisodeProgram) -> None:
    limits = LIMITS._replace(max_prompt_length=50, max_response_length=60, max_observation_tokens=9)
    with EpisodePool(program, format_of("Qwen2.5"), limits, num_workers=1) as pool:
        rows = [spec(0, "x" * 40, kind="code", does=""), spec(1, "x" * 200, kind="code", does="")]
        rows.append(spec(2, kind="loops", say="123456789abc"))
        parts = [{"type": "text", "text": "1234"}, {"type": "text", "text": "56789abc"}]
        rows.append(spec(3, kind="loops", say=[{"role": "user", "content": parts}]))
        results = play(pool, rows, lambda request: "hello")
    # what a prompt has beyond 50 tokens was observed
    (segment,) = results[0].segments
    assert segment.prompt_ids + segment.ids[:9].tolist() == rows[0].prompt_ids
    assert segment.sampled.tolist() == [False] * 9 + [True] * 3
    assert (results[0].score, results[0].counts["observation_tokens"]) == (1.0, 0)
    # there is no room for a token: an episode with nothing counted
    (segment,) = results[1].segments
    assert (segment.prompt_ids, len(segment.ids)) == (rows[1].prompt_ids[:50], 0)
    assert (results[1].finish, results[1].score, results[1].failed) == ("length", None, None)
    for number in (2, 3):
        (segment,) = results[number].segments
        assert "123456789\n[3 more characters]" in text_of([*segment.prompt_ids, *segment.ids])


def arrays(result: EpisodeResult) -> list[list[float]]:
    return [a.tolist() for s in result.segments for a in (s.ids, s.counted, s.logprobs)]


def test_a_tape_gives_the_same_tokens_without_the_code(pool: EpisodePool) -> None:
    said = {0: [call("adds", a=2), bad("raise"), "1"]}
    specs = [spec(0), spec(1, kind="branches"), spec(2, kind="two_rewards")]
    # a limit that one conversation reaches while another has asked for a turn
    specs += [spec(3 + i, kind="at_once", in_group=bool(i)) for i in range(2)]

    def script(request: TurnRequest) -> str:
        return said.get(request.episode, ["hello"] * 8)[request.turn]

    asked: list[TurnRequest] = []
    live = play(pool, specs, script, seen=asked)
    behind = {number: live.pop(number) for number in (3, 4)}
    program = EpisodeProgram("/nowhere.py")
    with EpisodePool(program, format_of("Qwen2.5"), LIMITS, num_workers=0) as replays:
        taped = [each._replace(tape=live[each.number].tape, row={}) for each in specs[:3]]
        asked_again: list[TurnRequest] = []
        again = play(replays, taped, script, seen=asked_again)
        assert sorted(asked_again) == sorted(r for r in asked if r.episode in live)
        for number, result in live.items():
            other = again[number]
            assert arrays(result) == arrays(other)
            assert result._replace(segments=[]) == other._replace(segments=[])
        # a turn that had not come when its episode ended is not waited for
        late = {"op": "reply", "s": 1, "turn": 3}
        tapes = {number: [e for e in one.tape if e != late] for number, one in behind.items()}
        unheard = [spec(number)._replace(tape=tape) for number, tape in tapes.items()]
        for results in (behind, play(replays, unheard, script)):
            ended = {(r.finish, r.score, r.failed, r.reason) for r in results.values()}
            assert ended == {("max_turns", 0.75, None, "")}
        # another policy, which needs another observation, is not answered with the old one
        odd = play(replays, taped[:1], lambda request: "x" * 990)[0]
        assert odd.failed == "error" and "the tape does not fit" in odd.reason


def test_a_file_that_cannot_be_had_is_said_at_the_start(tmp_path: Path) -> None:
    def opened(text: str, name: str = "episode") -> str:
        path = tmp_path / "mine.py"
        path.write_text(text)
        with (
            pytest.raises(EpisodeError) as caught,
            EpisodePool(EpisodeProgram(str(path), name), format_of("Qwen3"), LIMITS, num_workers=1),
        ):
            pass
        return str(caught.value)

    assert "defines no 'episode'; it has other" in opened("def other(): pass")
    assert "must be `async def episode(row, policy)`" in opened("def episode(row, policy): pass")
    assert "episode(row) must take (row, policy)" in opened("async def episode(row): pass")
    named = "async def episode(row, policy, *, tool): pass"
    assert "episode(row, policy, *, tool) must take (row, policy)" in opened(named)
    by_place = "async def episode(row, policy, /, *, tool=3): pass"
    (tmp_path / "mine.py").write_text(by_place)
    check_program(EpisodeProgram(str(tmp_path / "mine.py")))
    assert "Game has no method reset" in opened("class Game:\n    pass", "Game")
    level = "class Game:\n    def __init__(self, level): pass\n    def reset(self): pass"
    assert "Game.__init__ needs level: an environment is made without" in opened(level, "Game")
    assert "Game.reset must take self" in opened("class Game:\n    def reset(): pass", "Game")
    assert "no such module_of_nobody" in opened(
        "raise RuntimeError('no such module_of_nobody')\nasync def episode(row, policy): pass"
    )
    found = opened("episode = 3")
    assert "it is int" in found and found.count("rollout.episode") == 1
