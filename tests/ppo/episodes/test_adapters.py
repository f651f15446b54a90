"""Environments that were written for others, from their public documentation, run unchanged."""

import json
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ppo.episodes.contract import (
    EpisodeError,
    EpisodeProgram,
    EpisodeResult,
    EpisodeSpec,
    TurnRequest,
)
from ppo.episodes.pool import EpisodePool
from ppo.episodes.program import load_program
from tests.ppo.episodes.scripted import END, LIMITS, check_segment, ids_of, play, spec, text_of
from tests.ppo.episodes.shapes import format_of

# as the page on OpenEnv in TRL's documentation has its environments
TRL = '''
SECRET = "crane"

class WordleEnv:
    def __init__(self):
        self.client = {"word": SECRET}

    def reset(self, **kwargs) -> str | None:
        self.reward = 0.0
        self.done = False
        self.ground_truth = kwargs["answer"]
        return f"Guess a word of {len(self.ground_truth)} letters."

    def guess(self, guess: str) -> str:
        """
        Make a guess in the Wordle environment.

        Args:
            guess: The guessed word, formatted as '[abcde]'

        Returns:
            The feedback message from the environment.
        """
        if self.done:
            raise ValueError("Game over.")
        self.done = guess.strip("[]") == self.ground_truth
        self.reward = 1.0 if self.done else 0.1
        return "right" if self.done else "wrong"

    def _private(self):
        pass
'''
# as TRL 1.16.0 takes them: it owns its reward
OWNS_REWARD = '''
class Counter:
    def __init__(self):
        self.count = 0

    def reset(self, **kwargs):
        return [{"type": "text", "text": " Count "}, {"type": "text", "text": "on."}]

    def add(self, number: int) -> int:
        """Add.

        Args:
            number: what
        """
        self.count += number
        return self.count

    async def get_reward(self) -> float:
        return self.count / 10
'''
# as those are that need one thread, and with other names than tools in the class
BOUND = '''
import dataclasses, threading, time

class Seen:
    def look(self) -> str:
        """Looks about."""

@dataclasses.dataclass
class Bound(Seen):
    made: object = dict

    class Settings:
        """Settings."""

    @staticmethod
    def helper(x: int) -> int:
        """Helps."""

    def __post_init__(self):
        time.sleep(0.02)
        self._idents = [threading.get_ident()]

    def reset(self):
        self._idents.append(threading.get_ident())
        return " Bound"

    def same(self) -> bool:
        """Whether it is the thread in which it was made."""
        time.sleep(0.02)
        self._idents.append(threading.get_ident())
        return len(set(self._idents)) == 1

    def wait(self):
        """Takes too long."""
        time.sleep(600)

    def look(self) -> str:
        return type(self).__name__

    @property
    def reward(self) -> float:
        return float(self._idents[-1] == threading.get_ident() and len(set(self._idents)) == 2)
'''
# as the page on agent loops in verl's documentation has its tools
VERL = '''
from verl.tools.function_tool import function_tool
from verl.tools.schemas import ToolResponse

@function_tool
def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: one
        b: other
    """
    return str(a + b)

@function_tool("look_up")
async def search(query: str):
    """Search.

    Args:
        query: what for
    """
    return ToolResponse(text=f"about {query}"), 0.5, {"hits": 1}

@function_tool
def pair(a: str):
    """Two texts, or a reward that is none.

    Args:
        a: what
    """
    return (ToolResponse(text=a), a) if a == "odd" else (a, a)

@function_tool("raw", schema={"type": "function", "function": {"name": "raw", "parameters": {}}})
def anything(**kwargs):
    return {"got": sorted(kwargs), "from": __name__}
'''
OPENAI = """
import asyncio
from ppo.episodes.openai_client import OpenAIClient

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]

async def load(row, policy):
    client = OpenAIClient(policy)
    create = client.chat.completions.create
    messages = [{"role": "user", "content": "Look."}]
    said = await create(model="m", messages=messages, tools=TOOLS, temperature=0.3, n=1)
    choice = said.choices[0]
    assert choice.finish_reason == "tool_calls" and said.usage.completion_tokens > 3
    (call,) = choice.message.tool_calls
    messages.append(choice.message)
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "wall"}]
    messages.append({"role": "tool", "tool_call_id": call.id, "name": "look", "content": parts})
    asked = {"model": "m", "messages": messages, "tools": TOOLS, "max_completion_tokens": 3}
    said = await client.post("/chat/completions", body=asked)
    assert said.choices[0].finish_reason == "length" and said.choices[0].message.tool_calls is None
    other = await create(model="m", messages=[{"role": "user", "content": "Judge."}])
    # two that go on from the same turn at once, and one with a turn that is not the policy's
    said = [{"role": "user", "content": "Judge."}, other.choices[0].message]
    more = [*said, {"role": "user", "content": "Why?"}]
    await asyncio.gather(create(messages=more), create(messages=more))
    await create(messages=[*more, {"role": "assistant", "content": "so"}, *more[2:]])
    return float(other.choices[0].message.content)
"""


def run(
    tmp_path: Path,
    text: str,
    name: str,
    specs: Sequence[EpisodeSpec],
    script: Callable[[TurnRequest], str],
    seen: list[TurnRequest] | None = None,
    **changes: float,
) -> dict[int, EpisodeResult]:
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(text))
    program = EpisodeProgram(str(path), name)
    limits = LIMITS._replace(max_prompt_length=2000, max_response_length=2000, **changes)
    with EpisodePool(program, format_of("Qwen2.5"), limits, num_workers=1) as pool:
        results = play(pool, specs, script, seen=seen)
    for result in results.values():
        assert result.failed is None, result.reason
        for segment in result.segments:
            check_segment(segment)
    return results


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_an_environment_class_of_trl(tmp_path: Path) -> None:
    guesses = [
        [call("guess", guess="[slate]"), call("guess", guess="[crane]"), "I won."],
        [call("guess", guess="[crane]"), call("guess", guess="[crane]"), "Oh."],
        ["I do not play."],
        [call("_private"), call("reset"), "Oh."],
        [call("guess", guess="[slate]")] * 8,
    ]
    specs = [spec(i, "Play. ", answer="crane") for i in range(len(guesses))]
    asked: list[TurnRequest] = []
    results = run(tmp_path, TRL, "WordleEnv", specs, lambda r: guesses[r.episode][r.turn], asked)
    assert [results[i].score for i in range(5)] == [1.0, 1.0, 0.0, 0.0, 0.1]
    assert [results[i].finish for i in range(5)] == ["done"] * 4 + ["max_turns"]
    assert [results[i].counts["tool_calls"] for i in range(5)] == [2, 2, 0, 2, 8]
    assert [results[i].counts["parse_error"] for i in range(5)] == [0, 0, 0, 2, 0]
    said = [m["content"] for m in results[1].messages if m["role"] == "tool"]
    assert said == ["right", "Error: Game over."]
    begun = text_of(next(request for request in asked if request.episode == 0).prompt_ids)
    assert "Make a guess in the Wordle environment." in begun and "_private" not in begun
    assert begun.endswith(f"user\nPlay. Guess a word of 5 letters.{END}\n<|im_start|>assistant\n")


def test_an_environment_that_owns_its_reward(tmp_path: Path) -> None:
    turns, asked = [call("add", number=3), call("get_reward"), "3"], []
    (result,) = run(
        tmp_path, OWNS_REWARD, "Counter", [spec(0, "Go.")], lambda r: turns[r.turn], asked
    ).values()
    assert result.score == 0.3 and result.counts["parse_error"] == 1  # no tool of the policy
    begun = text_of(asked[0].prompt_ids)
    assert '"name": "add"' in begun and "get_reward" not in begun
    assert begun.endswith(f"user\nGo. Count on.{END}\n<|im_start|>assistant\n")


def test_an_environment_has_one_thread_while_others_have_theirs(tmp_path: Path) -> None:
    turns = [call("same") + call("wait") + call("look"), call("same") + call("look"), "1"]
    specs, asked = [spec(number) for number in range(6)], []
    results = run(
        tmp_path, BOUND, "Bound", specs, lambda r: turns[r.turn], asked, tool_timeout_s=0.5
    )
    for result in results.values():
        told = [m["content"] for m in result.messages if m["role"] == "tool"]
        too_slow = "Error: wait took longer than 0.5 s"
        assert told == ["true", too_slow, "Bound", "false", "Bound"]  # it has kept that thread
    assert sum(result.score == 1.0 for result in results.values()) == len(specs)
    begun = text_of(asked[0].prompt_ids)
    assert '"look"' in begun and "Looks about." in begun and "user\nGo. Bound" in begun
    assert not [name for name in ("Settings", "helper", "made") if f'"{name}"' in begun]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def __init__(self, *, n): pass\n    def reset(self): pass", "needs n"),
        ("def reset(self, x, /): pass", "does not take x by name"),
        ("def reset(): pass", "reset"),
        ("def reset(self): pass\n    def go(self, a: int): pass", "public method go"),
        ("def reset(self): pass\n    def go(self, a):\n        'Go.'", "a has no type"),
    ],
)
def test_an_environment_that_cannot_work_is_refused_when_it_is_loaded(
    tmp_path: Path, text: str, problem: str
) -> None:
    path = tmp_path / "odd.py"
    path.write_text(f"class Base:\n    {text}\n\nclass Odd(Base):\n    pass\n")
    with pytest.raises(EpisodeError, match=rf"odd\.py: Odd .*{problem}"):
        load_program(EpisodeProgram(str(path), "Odd"))


def test_a_file_of_function_tools_of_verl(tmp_path: Path) -> None:
    turns = [
        call("add", a=2, b=3) + call("look_up", query="x"),
        call("raw", b=1, a=2) + call("pair", a="x") + call("pair", a="odd"),
        "5",
    ]
    (result,) = run(tmp_path, VERL, "episode", [spec(0)], lambda r: turns[r.turn]).values()
    said = [m["content"] for m in result.messages if m["role"] == "tool"]
    assert said[:2] == ["5", "about x"]
    assert said[2:4] == ['{"got": ["a", "b"], "from": "mine"}', '["x", "x"]']
    assert said[4] == "Error: its reward is 'odd', not a finite number"
    (segment,) = result.segments
    assert segment.turn_rewards == [(len(ids_of(turns[0])), 0.5)]
    assert result.score is None  # reward.* scores its text
    assert result.text.endswith("assistant\n5")


@pytest.mark.parametrize("has_openai", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_client_as_openai_has_it(tmp_path: Path, has_openai: bool) -> None:
    if has_openai:
        pytest.importorskip("openai")
    text = "import openai.types.chat\n" * has_openai + OPENAI

    def script(request: TurnRequest) -> str:
        return "7" if request.segment else [call("look"), "A wall it is."][request.turn]

    asked: list[TurnRequest] = []
    (result,) = run(tmp_path, text, "load", [spec(0)], script, asked).values()
    main, other, *more = result.segments
    assert result.score == 7.0
    # the second request goes on with the tokens of the first; the third is a branch
    first, second, third, *rest = asked
    assert len(more) == 2 and sorted(request.segment for request in rest) == [1, 2, 3]
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    assert main.prompt_ids == first.prompt_ids and other.prompt_ids == third.prompt_ids
    assert second.max_tokens == 3 and "a wall" in text_of(second.prompt_ids)
    assert "Judge." in text_of(third.prompt_ids) and third.segment == 1
    assert "look" in text_of(first.prompt_ids) and "look" not in text_of(third.prompt_ids)


# as verifiers' documentation has them, up to 0.3
VERIFIERS = '''
import verifiers as vf
from datasets import Dataset
from ppo.episodes.openai_client import OpenAIClient

def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one
        b: other
    """
    return a + b

class Again(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "again"}]

async def exact(completion, answer) -> float:
    return float(completion[-1]["content"] == answer)

def num_turns(state) -> float:
    return float(len(state["trajectory"]))

data = Dataset.from_list([{"question": "Copy b.", "answer": "b"}])
ENVS = {
    "single": vf.SingleTurnEnv(dataset=data, system_prompt="Hi.", rubric=vf.Rubric(funcs=[exact])),
    "multi": Again(dataset=data, rubric=vf.Rubric(funcs=[num_turns]), max_turns=3),
    "tool": vf.ToolEnv(dataset=data, tools=[add], rubric=vf.Rubric(funcs=[num_turns, exact])),
}

async def episode(row, policy):
    env = ENVS[row["env"]]
    client = vf.OpenAIChatCompletionsClient(OpenAIClient(policy))
    asked = env.get_dataset()[0]
    if "messages" in row:
        asked = {"prompt": row["messages"], "answer": "b", "example_id": 0}
    said = await env.run_rollout(asked, client, "policy", {"temperature": 0.1})
    return {"score": said["reward"], **said["metrics"]}
'''


@pytest.mark.full
def test_environments_of_verifiers(tmp_path: Path) -> None:
    """`pip install "verifiers<0.4"` has them; run with 0.3.1 on 2026-11-30."""
    pytest.importorskip("verifiers.legacy")
    turns = [["b"], ["one", "two", "three"], [call("add", a=2, b=3), "b"], [""], ["b"]]
    specs = [spec(i, env=env) for i, env in enumerate(["single", "multi", "tool", "single"])]
    specs.append(spec(4, env="single", messages=[{"role": "user", "content": "Say b."}]))
    asked: list[TurnRequest] = []
    results = run(tmp_path, VERIFIERS, "episode", specs, lambda r: turns[r.episode][r.turn], asked)
    assert [results[i].score for i in range(5)] == [1.0, 3.0, 3.0, 0.0, 1.0]
    assert [len(results[i].segments) for i in range(5)] == [1, 1, 1, 1, 1]
    last = max((r for r in asked if r.episode == 2), key=lambda r: r.turn)
    assert "<tool_response>\n5\n</tool_response>" in text_of(last.prompt_ids)
    begun = text_of(next(request for request in asked if request.episode == 0).prompt_ids)
    assert "system\nHi." in begun and "user\nCopy b." in begun
