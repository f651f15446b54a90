"""What has happened in one episode, token by token, as the side of the engine writes it down.

Owns the segments: sampled ids and log-probs come from the engine's replies alone, an episode's
process can only append what was observed. Also the tape, and its replay. Must not know processes.

An event is a JSON object. `op` and `s` (segment) are in all:

    open     ids or null (the spec's prompt)  a segment begins
    fork     parent                            a segment goes on from where another one is
    observe  ids                               appended
    sample   max, stop                         a turn is asked for
    reply    turn                              it has been answered (only on the tape)
    reward   value                             at the last sampled token
    tool     name, arguments, status, result   a tool was called (the tokens come by `observe`)
    end      score, extra, finish, messages, failed, reason
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ppo.episodes.chat import Chat
from ppo.episodes.contract import (
    COUNTS,
    MOST_SEGMENTS,
    EpisodeResult,
    EpisodeSpec,
    Finish,
    Limits,
    Segment,
    TapeEvent,
    TurnReply,
    TurnRequest,
    segment_uid,
)

MOST_EXTRA = 64
"""numbers beside a score that become metrics"""
COUNT_OF_STATUS = {"timeout": "tool_timeout", "error": "tool_error", "parse_error": "parse_error"}


class BadEvent(Exception):
    """An event that an episode's process of ours would not send: it is not the one that speaks."""


@dataclass
class _Segment:
    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    counted: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rewards: list[tuple[int, float]] = field(default_factory=list)
    spans: list[tuple[int, int, Finish]] = field(default_factory=list)
    """where each of its turns lies in ids, and why it ended"""
    asked: tuple[int, tuple[str, ...]] | None = None
    """the most tokens and the stop texts of the turn that is asked for"""

    def observe(self, ids: Sequence[int]) -> None:
        self.ids += ids
        for flags in (self.sampled, self.counted):
            flags += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def add(self, reply: TurnReply) -> None:
        start = len(self.ids)
        self.ids += reply.ids.tolist()
        self.spans.append((start, len(self.ids), reply.finish))
        for flags in (self.sampled, self.counted):
            flags += [True] * len(reply.ids)
        self.logprobs += reply.logprobs.tolist()
        self.asked = None

    def fork(self) -> "_Segment":
        """One that goes on from here and counts nothing of what is here."""
        return _Segment(
            *(self.prompt_ids, list(self.ids), list(self.sampled)),
            counted=[False] * len(self.ids),
            logprobs=list(self.logprobs),
        )

    def finished(self) -> Segment:
        return Segment(
            self.prompt_ids,
            np.array(self.ids, np.int32),
            np.array(self.sampled, bool),
            np.array(self.logprobs, np.float32),
            list(self.rewards),
            np.array(self.counted, bool),
        )


class Transcript:
    """One episode, from its events and the engine's replies."""

    def __init__(self, spec: EpisodeSpec, limits: Limits) -> None:
        self.spec, self.limits = spec, limits
        self.tape: list[TapeEvent] = []
        self.counts: dict[str, int] = dict.fromkeys(COUNTS, 0)
        self.ending: TapeEvent | None = None
        self._segments: dict[int, _Segment] = {}

    @property
    def waits(self) -> bool:
        """Whether the engine owes it a turn."""
        return any(segment.asked is not None for segment in self._segments.values())

    def read(self, event: Mapping[str, Any]) -> TurnRequest | None:
        """Write an event down; the turn that it asks for. Raises BadEvent for nonsense."""
        try:
            request = self._read(dict(event))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise BadEvent(f"{error!r} in {str(event)[:200]}") from error
        self.tape.append(dict(event))
        return request

    def _read(self, event: dict[str, Any]) -> TurnRequest | None:
        op, number = event["op"], int(event["s"])
        if op == "end":
            self.ending = event
        elif op == "open":
            self._open(number, event["ids"])
        elif op == "fork":
            self._add(number, self._segments[event["parent"]].fork())
            self.counts["branches"] += 1
        elif op == "observe":
            self._observe(number, _ids(event["ids"]))
        elif op == "sample":
            return self._ask(number, int(event["max"]), [str(text) for text in event["stop"]])
        elif op == "reward":
            segment = self._segments[number]
            last = max(i for i, is_counted in enumerate(segment.counted) if is_counted)
            segment.rewards.append((last, float(event["value"])))
        elif op == "tool":
            self.counts["tool_calls"] += 1
            if event["status"] in COUNT_OF_STATUS:
                self.counts[COUNT_OF_STATUS[event["status"]]] += 1
        elif op != "reply":
            raise ValueError(f"unknown op {op!r}")
        return None

    def _open(self, number: int, ids: list[int] | None) -> None:
        ids = self.spec.prompt_ids if ids is None else _ids(ids)
        most = self.limits.max_prompt_length
        if len(ids) - most > self.limits.max_response_length:
            raise ValueError(f"a beginning of {len(ids)} tokens")
        segment = _Segment(list(ids[:most]))
        segment.observe(ids[most:])
        self._add(number, segment)
        if number > 0:
            self.counts["branches"] += 1

    def _add(self, number: int, segment: _Segment) -> None:
        if number in self._segments or not 0 <= number < MOST_SEGMENTS or not segment.prompt_ids:
            raise ValueError(f"segment {number} cannot begin")
        self._segments[number] = segment

    def _observe(self, number: int, ids: list[int]) -> None:
        segment = self._segments[number]
        if segment.asked is not None or len(ids) >= self._left(segment):
            raise ValueError(f"{len(ids)} tokens do not fit")
        segment.observe(ids)
        self.counts["observation_tokens"] += len(ids)

    def _ask(self, number: int, most: int, stop: list[str]) -> TurnRequest:
        segment = self._segments[number]
        if segment.asked is not None or not 1 <= most <= self._left(segment):
            raise ValueError(f"cannot sample {most} tokens")
        segment.asked = most, tuple(stop)
        return self._request(number, segment)

    def _request(self, number: int, segment: _Segment) -> TurnRequest:
        assert segment.asked is not None
        return TurnRequest(
            episode=self.spec.number,
            segment=number,
            turn=len(segment.spans),
            uid=segment_uid(self.spec.uid, number),
            prompt_ids=segment.prompt_ids + segment.ids,
            sampled_before=sum(segment.counted),
            max_tokens=segment.asked[0],
            stop=segment.asked[1],
        )

    def _left(self, segment: _Segment) -> int:
        return self.limits.max_response_length - len(segment.ids)

    def asks(self, request: TurnRequest) -> bool:
        """Whether it waits for the reply to this very request."""
        segment = self._segments.get(request.segment)
        return (
            segment is not None
            and segment.asked is not None
            and self._request(request.segment, segment) == request
        )

    def answer(self, reply: TurnReply) -> None:
        """Write down what the engine has sampled."""
        segment = self._segments[reply.segment]
        assert segment.asked is not None and len(segment.spans) == reply.turn, reply
        assert len(reply.ids) == len(reply.logprobs) <= segment.asked[0], (reply, segment.asked)
        segment.add(reply)
        self.counts["turns"] += 1
        self.tape.append({"op": "reply", "s": reply.segment, "turn": reply.turn})

    def recall(self, request: TurnRequest) -> TurnReply | None:
        """The reply to a request of another transcript of this episode, if it is the same here."""
        segment = self._segments.get(request.segment)
        if segment is None or request.turn >= len(segment.spans):
            return None
        start, end, finish = segment.spans[request.turn]
        known = segment.prompt_ids + segment.ids[:start]
        if known != request.prompt_ids or end - start > request.max_tokens:
            return None
        ids = np.array(segment.ids[start:end], np.int32)
        logprobs = np.array(segment.logprobs[start:end], np.float32)
        return TurnReply(*request[:3], ids, logprobs, finish)

    def result(self, chat: Chat, *, failed: str | None = None, reason: str = "") -> EpisodeResult:
        """What is to be said of it now.

        failed, reason: of an episode whose process cannot say it.
        """
        ending = self.ending or {}
        failed = failed or ending.get("failed")
        if failed == "error":
            self.counts["env_error"] += 1
        score = ending.get("score")
        first = next(iter(self._segments.values()), None)
        return EpisodeResult(
            number=self.spec.number,
            uid=self.spec.uid,
            segments=[segment.finished() for _, segment in sorted(self._segments.items())],
            score=None if score is None else float(score),
            extra=dict(list(ending.get("extra", {}).items())[:MOST_EXTRA]),
            text=chat.decode(first.ids) if first is not None else "",
            messages=ending.get("messages", []),
            finish=failed or str(ending.get("finish")),
            counts=self.counts,
            tape=self.tape,
            failed=failed,
            reason=reason or ending.get("reason", ""),
        )


def replay(transcript: Transcript, tape: Sequence[TapeEvent]) -> Iterator[list[TurnRequest]]:
    """Feed a tape: turns to sample, until it waits for a reply that has not come; then go on.

    A turn that its code has given up, or left behind, has no reply there: nobody waits for it.

    Raises BadEvent: the tape is not of this episode (other limits, another policy that said more).
    """
    asked: list[TurnRequest] = []
    for event in tape:
        if event.get("op") != "reply":
            request = transcript.read(event)
            asked += [request] if request is not None else []
            continue
        while {"op": "reply", "s": event["s"], "turn": event["turn"]} not in transcript.tape:
            yield asked
            asked = []
    if transcript.ending is None:
        raise BadEvent("the tape ends before its episode")


def as_line(event: Mapping[str, Any]) -> bytes:
    """An event as it travels."""
    return json.dumps(event).encode()


def _ids(given: Any) -> list[int]:
    if not isinstance(given, list) or not all(type(i) is int and i >= 0 for i in given):
        raise ValueError("token ids must be a list of numbers")
    return given
