"""What goes between the episodes of a replica and whoever runs the engine: plain data.

Owns the requests, replies and results of episodes and what a pool is opened with. Must not know
the engine, the batch, the configuration's classes or torch.

    pool = EpisodePool(program, chat, limits, num_workers=4)   # ppo/episodes/pool.py
    pool.begin(specs)
    while pool.unfinished:
        requests, results = pool.poll(0.5)      # turns to sample, episodes that have ended
        ...
        pool.answer(replies)                    # as the engine finishes them, in any order
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from ppo.errors import InputError

Finish = Literal["stop", "length", "stop_text"]
ToolFormat = Literal["auto", "hermes", "qwen3_xml", "llama3", "mistral"]
TapeEvent = dict[str, Any]
"""one thing that an episode's code did, or was told, as JSON; see `EpisodeResult.tape`"""

MOST_SEGMENTS = 1 << 10
"""of one episode: a segment's number lies above the 52 bits of a sample's uid"""


class EpisodeError(InputError):
    """The episode cannot work at all: no file, no such name, not of a kind that is known."""


class EpisodeSpec(NamedTuple):
    """One episode to run."""

    number: int
    """of the sample, unique among those in the pool"""
    uid: int
    """below 2**52; the same after a restart and on any number of ranks"""
    row: dict[str, Any]
    """every column of the data row; picklable"""
    messages: list[dict[str, Any]] | str
    """the row's prompt as written, which an episode that is given tools renders again with them"""
    prompt_ids: list[int]
    """the prompt as the data pipeline has rendered it: segment 0 begins with it, unless the episode
    begins a conversation of its own or has tools"""
    tape: Sequence[TapeEvent] | None = None
    """of an earlier run: it is fed instead of the episode's code, in no process; None = run"""


class TurnRequest(NamedTuple):
    """Tokens asked of the engine: one turn of one segment.

    All turns of an episode go to the replica of its pool. A segment has one request at a time, an
    episode may have several segments at once.
    """

    episode: int
    """number of its spec"""
    segment: int
    turn: int
    """of the segment, from 0"""
    uid: int
    """unique per (sample, segment) and stable: `segment_uid`"""
    prompt_ids: list[int]
    """all ids of the segment so far, prompt included"""
    sampled_before: int
    """tokens that were sampled in this segment before this turn: the position of its noise"""
    max_tokens: int
    """at least 1; within what max_response_length leaves"""
    stop: tuple[str, ...]
    """texts that end the turn, besides those of the run"""


class TurnReply(NamedTuple):
    """What the engine has sampled for a request."""

    episode: int
    segment: int
    turn: int
    ids: np.ndarray
    """int32; with the stop token, or the tokens that complete a stop text"""
    logprobs: np.ndarray
    """float32, of each id"""
    finish: Finish


class Segment(NamedTuple):
    """One conversation as the model has seen it, token by token.

    [T] arrays speak of `ids`, the tokens behind the prompt. A branch that goes on from another
    segment has that one's prompt and ids, and counts none of these again.
    """

    prompt_ids: list[int]
    """at most max_prompt_length; what a longer one has more stands first in `ids`, observed"""
    ids: np.ndarray
    """int32 [T], sampled and observed, T <= max_response_length"""
    sampled: np.ndarray
    """bool [T]: the engine has drawn it"""
    logprobs: np.ndarray
    """float32 [T] from the engine; 0 where not sampled"""
    turn_rewards: list[tuple[int, float]]
    """(position in ids, value): at the last sampled token of a turn"""
    counted: np.ndarray
    """bool [T]: sampled, and counted in no other segment: the loss sees these"""


class EpisodeResult(NamedTuple):
    """An episode that has ended."""

    number: int
    uid: int
    segments: list[Segment]
    """segment 0 first; at least one unless it failed; one may have nothing counted"""
    score: float | None
    """what the episode has returned; None: reward.* scores `text`"""
    extra: dict[str, float]
    """other finite numbers that the episode has returned beside its score: metrics"""
    text: str
    """segment 0 behind its prompt, observations included, without special tokens"""
    messages: list[dict[str, Any]]
    """segment 0 as messages, for people"""
    finish: str
    """why it ended: `done` (its code returned), `max_turns`, `length` (max_response_length),
    `timeout` (timeout_s), or `error`"""
    counts: dict[str, int]
    """turns, tool_calls, observation_tokens, tool_timeout, tool_error, parse_error, env_error,
    branches; all of them, 0 included"""
    tape: list[TapeEvent]
    """everything that the episode's code did, in order: replayed by `EpisodeSpec.tape`"""
    failed: str | None = None
    """`error` or `timeout`: its samples are masked out and counted; None = good"""
    reason: str = ""
    """of a failed episode: the traceback of its code, or what became of its process"""


COUNTS = (
    "turns",
    "tool_calls",
    "observation_tokens",
    "tool_timeout",
    "tool_error",
    "parse_error",
    "env_error",
    "branches",
)
"""keys of `EpisodeResult.counts`"""


class EpisodeProgram(NamedTuple):
    """The user's code, in a form that travels."""

    path: str
    """a Python file"""
    name: str = "episode"
    """`async def name(row, policy)`, or an environment class; in a file of verl's `@function_tool`
    it may be missing"""


class Limits(NamedTuple):
    """What bounds an episode."""

    max_prompt_length: int
    """tokens of a segment's prompt; those beyond count as observed"""
    max_response_length: int
    """sampled and observed tokens of a segment together"""
    max_turns: int = 8
    """turns of an episode, over all its segments"""
    tool_timeout_s: float = 30.0
    """one call of a tool; the model is told"""
    timeout_s: float = 600.0
    """an episode, waiting for the engine included; one that is over it is failed"""
    max_observation_tokens: int | None = None
    """of one tool's result or one message of the episode's code, whose text is cut at the end;
    None = only max_response_length"""


class ChatFormat(NamedTuple):
    """Tokenizer and chat template, in a form that travels: `chat_format` makes it."""

    name: str
    """of the tokenizer, for messages"""
    tokenizer: str
    """JSON of the package tokenizers"""
    template: str
    """Jinja"""
    special_tokens: dict[str, str]
    """bos_token, eos_token, ...: names that templates use"""
    stop_token_ids: tuple[int, ...]
    """ids that end a turn in the engine"""
    options: dict[str, Any]
    """passed on to the template (data.apply_chat_template_kwargs)"""
    tool_format: ToolFormat
    """how the model writes tool calls; auto is resolved"""
    num_ids: int | None = None
    """ids from 0 on that the model has; None = all of the tokenizer"""


def segment_uid(uid: int, segment: int) -> int:
    """The engine's uid of a segment: that of its sample for the first."""
    assert 0 <= uid < 1 << 52 and 0 <= segment < MOST_SEGMENTS, (uid, segment)
    return uid + (segment << 52)
