"""The engine's side of a pool of episodes, as tests need it: it says what a script tells it to."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ppo.episodes.contract import (
    EpisodeResult,
    EpisodeSpec,
    Finish,
    Limits,
    Segment,
    TurnReply,
    TurnRequest,
)
from ppo.episodes.pool import EpisodePool
from tests.ppo.episodes.shapes import core, id_of

LIMITS = Limits(
    max_prompt_length=200, max_response_length=1000, tool_timeout_s=20.0, timeout_s=60.0
)
END = "<|im_end|>"
Script = Callable[[TurnRequest], str | tuple[str, Finish]]


def ids_of(text: str) -> list[int]:
    return core().encode(text, add_special_tokens=False).ids


def text_of(ids: Sequence[int] | np.ndarray) -> str:
    return core().decode([int(i) for i in ids], skip_special_tokens=False)


def spec(number: int, text: str = "Go.", **row: Any) -> EpisodeSpec:
    prompt = f"<|im_start|>user\n{text}{END}\n<|im_start|>assistant\n"
    messages = [{"role": "user", "content": text}]
    return EpisodeSpec(number, 1000 + number, row, messages, ids_of(prompt))


def reply_to(request: TurnRequest, said: str | tuple[str, Finish]) -> TurnReply:
    """As the engine would: letters one by one, so that "hello" is never the token hello."""
    text, finish = said if isinstance(said, tuple) else (said, "stop")
    pieces = text.replace("hello", "he\0llo").split("\0")
    ids = [i for piece in pieces for i in ids_of(piece)]
    if finish == "stop":
        ids.append(id_of(END))
    if len(ids) > request.max_tokens:
        ids, finish = ids[: request.max_tokens], "length"
    logprobs = [-(len(request.prompt_ids) + i + 1) / 1024 for i in range(len(ids))]
    named = np.array(ids, np.int32), np.array(logprobs, np.float32)
    return TurnReply(request.episode, request.segment, request.turn, *named, finish)


def play(
    pool: EpisodePool,
    specs: Sequence[EpisodeSpec],
    script: Script,
    *,
    within_s: float = 60.0,
    seen: list[TurnRequest] | None = None,
) -> dict[int, EpisodeResult]:
    """Run episodes to their ends."""
    end = time.monotonic() + within_s
    pool.begin(specs)
    results: dict[int, EpisodeResult] = {}
    while pool.unfinished:
        assert time.monotonic() < end, f"{pool.unfinished} episodes have not ended"
        requests, ended = pool.poll(1.0)
        results |= {result.number: result for result in ended}
        if seen is not None:
            seen += requests
        pool.answer([reply_to(request, script(request)) for request in requests])
    return results


def check_segment(segment: Segment) -> None:
    """What holds for every segment."""
    lengths = {len(each) for each in segment[1:4]} | {len(segment.counted)}
    assert len(lengths) == 1
    assert not (segment.counted & ~segment.sampled).any()
    assert (segment.logprobs[~segment.sampled] == 0).all()
    assert (segment.logprobs[segment.sampled] < 0).all()
    assert all(segment.counted[position] for position, _ in segment.turn_rewards)
