"""Scored groups as JSON, and back: what of an iteration's samples a checkpoint holds.

Owns the form. Must not know why groups are kept, or where the JSON goes.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ppo.batch.conversations import Conversation, Segment
from ppo.batch.samples import Samples
from ppo.data.dataset import Prompt
from ppo.engines.contract import Completion, Completions
from sharding.agree import gather_to_first
from sharding.mesh import Mesh


def encoded(parts: Sequence[Samples], mesh: Mesh) -> dict[str, Any] | None:
    """The samples of all ranks, in order, on the first rank; None elsewhere, and where there are
    none. Collective, if there are any."""
    if not parts:
        return None
    own = [
        (part, samples.numbers[index], _encoded(samples, index, border))
        for part, samples in enumerate(parts)
        for index, border in enumerate(samples.completions.borders())
    ]
    told = gather_to_first(own, mesh.host_group)
    if told is None:
        return None
    rows = sorted((row for rows in told for row in rows), key=lambda row: row[:2])
    return {"n": parts[0].n, "samples": [sample for _, _, sample in rows]}


def decoded(state: Mapping[str, Any] | None, n: int, *, holds: bool) -> Samples | None:
    """Samples of `encoded`; None where there are none, or not n of a prompt.

    holds: whether this rank gets them; another one knows their prompts alone.
    """
    if state is None or state["n"] != n or not state["samples"]:
        return None
    whole = state["samples"]
    rows = whole if holds else []
    samples = Samples(
        prompts=[Prompt(*row["prompt"]) for row in whole[::n]],
        n=n,
        numbers=list(range(len(rows))),
        completions=Completions.of(
            [Completion(_array(row["ids"]), _array(row["logprobs"]), row["ended"]) for row in rows]
        ),
        texts=[row["text"] for row in rows],
        conversations=[_conversation(row["conversation"]) for row in rows]
        if whole[0].get("conversation") is not None
        else None,
    )
    samples.scores = torch.tensor([row["score"] for row in rows], dtype=torch.float32)
    samples.failed = torch.tensor([row["failed"] for row in rows], dtype=torch.bool)
    samples.failures = [row["failure"] for row in rows]
    samples.components = [dict(row["components"]) for row in rows]
    samples.answers = [row["answer"] for row in rows]
    greedy = [row["greedy_score"] for row in whole[::n]]
    samples.greedy_scores = None if None in greedy else torch.tensor(greedy, dtype=torch.float32)
    return samples


def _encoded(samples: Samples, index: int, border: tuple[int, int]) -> dict[str, Any]:
    prompt, greedy, (start, end) = (
        samples.numbers[index] // samples.n,
        samples.greedy_scores,
        border,
    )
    return {
        "prompt": json.loads(json.dumps(samples.prompt(index), default=str)),
        "ids": _text(samples.completions.ids[start:end]),
        "logprobs": _text(samples.completions.logprobs[start:end]),
        "ended": samples.completions.finish_reasons[index],
        "text": samples.texts[index],
        "score": samples.scores[index].item(),
        "failed": bool(samples.failed[index]),
        "failure": samples.failures[index],
        "components": samples.components[index],
        "answer": samples.answers[index],
        "greedy_score": None if greedy is None else greedy[prompt].item(),
        "conversation": None
        if samples.conversations is None
        else _of_conversation(samples.conversations[index]),
    }


def _of_conversation(one: Conversation) -> dict[str, Any]:
    plain = one._replace(segments=[])._asdict()
    segments = [(s.prompt_ids, _text(s.learned), _text(s.rewards)) for s in one.segments]
    return json.loads(json.dumps(plain | {"segments": segments}, default=str))


def _conversation(state: Mapping[str, Any]) -> Conversation:
    segments = [
        Segment(ids, _array(learned), _array(rewards))
        for ids, learned, rewards in state["segments"]
    ]
    return Conversation(**{**state, "segments": segments})


def _text(array: np.ndarray) -> list[str]:
    return [array.dtype.str, base64.b64encode(array.tobytes()).decode("ascii")]


def _array(text: Sequence[str]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text[1]), np.dtype(text[0]))
