"""The environment files of configs/episodes, played by a script."""

import json
from pathlib import Path

from ppo.episodes.contract import EpisodeProgram, TurnRequest
from ppo.episodes.pool import EpisodePool
from tests.ppo.episodes.scripted import LIMITS, check_segment, play, spec, text_of
from tests.ppo.episodes.shapes import format_of

EXAMPLES = Path(__file__).resolve().parents[3] / "configs" / "episodes"


def played(name: str, rows: list[dict], turns: list[list[str]]):
    program = EpisodeProgram(str(EXAMPLES / name))
    limits = LIMITS._replace(max_prompt_length=2000, max_response_length=2000)
    specs = [spec(i, **row) for i, row in enumerate(rows)]

    def script(request: TurnRequest) -> str:
        return turns[request.episode][request.turn]

    with EpisodePool(program, format_of("Qwen2.5"), limits, num_workers=1) as pool:
        results = play(pool, specs, script)
    for result in results.values():
        assert result.failed is None, result.reason
        for segment in result.segments:
            check_segment(segment)
    return [results[i] for i in range(len(rows))]


def call(expression: str) -> str:
    said = {"name": "calculate", "arguments": {"expression": expression}}
    return f"<tool_call>{json.dumps(said)}</tool_call>"


def test_a_calculator() -> None:
    turns = [
        [call("(17 + 4) * -2 / 4"), call("6789 * 6789"), call("0.1 + 0.2"), "It is -10.5."],
        ["42"],
        [call("__import__('os')"), call("2 +"), "I do not know"],
    ]
    rows = [{"ground_truth": "-10.5"}, {"ground_truth": 42}, {"ground_truth": 1}]
    good, direct, bad = played("calculator.py", rows, turns)
    said = [m["content"] for m in good.messages if m["role"] == "tool"]
    assert said == ["-10.5", "46090521", "0.3"]
    assert (good.score, good.extra) == (0.94, {"is_right": 1.0})
    assert (direct.score, bad.score) == (1.0, -0.04)
    said = [m["content"] for m in bad.messages if m["role"] == "tool"]
    assert said[0] == "Error: cannot calculate __import__('os')"
    assert said[1].startswith("Error: invalid syntax") and bad.counts["tool_error"] == 2


def test_another_try() -> None:
    source = {"data_source": "reasoning_gym/chain_sum", "ground_truth": "12"}
    row = {**source, "extra_info": {"method": "last_number"}}
    turns = [["It is 12."], ["11", "12"], ["13", "none", "3"]]
    first, second, never = played("try_again.py", [row] * 3, turns)
    assert (first.score, second.score, never.score) == (1.0, 0.75, 0.0)
    assert [one.counts["turns"] for one in (first, second, never)] == [1, 2, 3]
    assert first.extra == {"first_try": 1.0, "last_try": 1.0}
    assert second.extra == {"first_try": 0.0, "last_try": 1.0}
    (segment,) = second.segments
    assert "That is too low." in text_of(segment.ids)
    said = [message["content"] for message in never.messages if message["role"] == "user"]
    assert [words.partition(".")[0] for words in said[1:]] == [
        "That is too high",
        "That is not right",
    ]
