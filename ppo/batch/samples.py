"""Samples as they are made, and the rollout batch that the trainer computes with.

Owns the shape legend and what a step knows of its samples. Knows no model and no process group:
ppo/batch/shares.py brings samples from the ranks that made them to those that compute with them.

Shape legend (the whole project): B sequences, b of them on this rank, P prompt tokens, T response
tokens, S = P + T, N packed tokens, K scored (response) tokens of one micro-batch, V vocabulary,
H hidden. One alignment: index t of logprobs, values, rewards and response_mask speaks of response
token t.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ppo.batch.conversations import Conversation
from ppo.batch.overview import Overview
from ppo.data.dataset import Prompt
from ppo.engines.contract import Completions


class Row(NamedTuple):
    """What a row is made of."""

    prompt_ids: Sequence[int]
    length: int  # response tokens
    num_learned: int  # of these, tokens that the policy has sampled, and that no other row counts


@dataclass(kw_only=True)
class Samples:
    """n responses to each prompt, as far as this rank's engine has made them.

    Of B = prompts x n samples, number i is sample i % n of prompt i // n. A rank that leads no
    engine holds none. An episode is one sample with a row for each of its segments, whose tokens
    follow each other in its completion.
    """

    prompts: Sequence[Prompt]  # all of them, on every rank
    n: int
    numbers: list[int]  # b, ascending: which samples these are
    completions: Completions  # b
    texts: list[str]  # b, the responses without special tokens, valid Unicode
    conversations: list[Conversation] | None = None  # b, where samples are episodes
    scores: Tensor = field(init=False)  # [b] float32, from the rewards
    failed: Tensor = field(init=False)  # [b] bool, the reward raised, timed out, was not finite
    failures: list[str | None] = field(init=False)  # b, what went wrong with a failed sample's
    are_scored: bool = True  # false: nothing scores, all scores are 0
    components: list[dict[str, float]] = field(init=False)
    """b, what the score is made of: function, model, extra/NAME"""
    answers: list[str | None] = field(init=False)  # b, as far as the function says
    scores_to_come: Any = None  # of samples that are being scored since they were made
    greedy: "Samples | None" = None  # one response per prompt, for estimators that compare
    greedy_scores: Tensor | None = None  # [prompts], known to every rank once they are scored

    def __post_init__(self) -> None:
        self.scores = torch.zeros(len(self))
        self.failed = torch.zeros(len(self), dtype=torch.bool)
        self.failures = [None] * len(self)
        self.components = [{} for _ in range(len(self))]
        self.answers = [None] * len(self)

    def __len__(self) -> int:
        """b."""
        return len(self.numbers)

    def total_score(self, index: int) -> float:
        """The score, with the rewards of an episode's turns; those alone of a failed one."""
        turns = 0.0 if self.conversations is None else self.conversations[index].turn_rewards
        return self.scores[index].item() + turns

    @property
    def total(self) -> int:
        """B, over all ranks."""
        return len(self.prompts) * self.n

    def prompt(self, index: int) -> Prompt:
        """What the sample with this index here answers."""
        return self.prompts[self.numbers[index] // self.n]

    def rows(self, index: int) -> list[Row]:
        """The rows of the sample with this index here: one, or one for each segment."""
        if self.conversations is None:
            length = self.completions.lengths[index]
            return [Row(self.prompt(index).prompt_ids, length, length)]
        return [
            Row(segment.prompt_ids, segment.length, int(segment.learned.sum()))
            for segment in self.conversations[index].segments
        ]


def of_prompts(samples: Samples, chosen: Sequence[int]) -> Samples:
    """The scored samples of some prompts alone, numbered anew. `chosen`: ascending."""
    place, n = {prompt: new for new, prompt in enumerate(chosen)}, samples.n
    here = [i for i, number in enumerate(samples.numbers) if number // n in place]
    completions, borders = samples.completions, samples.completions.borders()
    found = Samples(
        prompts=[samples.prompts[prompt] for prompt in chosen],
        n=n,
        numbers=[place[samples.numbers[i] // n] * n + samples.numbers[i] % n for i in here],
        completions=Completions(
            _pieces(completions.ids, [borders[i] for i in here]),
            _pieces(completions.logprobs, [borders[i] for i in here]),
            [completions.lengths[i] for i in here],
            [completions.finish_reasons[i] for i in here],
        ),
        texts=[samples.texts[i] for i in here],
        conversations=None
        if samples.conversations is None
        else [samples.conversations[i] for i in here],
        are_scored=samples.are_scored,
    )
    found.scores, found.failed = samples.scores[here], samples.failed[here]
    found.failures = [samples.failures[i] for i in here]
    found.components = [samples.components[i] for i in here]
    found.answers = [samples.answers[i] for i in here]
    if samples.greedy_scores is not None:
        found.greedy_scores = samples.greedy_scores[list(chosen)]
    return found


def joined(parts: Sequence[Samples]) -> Samples:
    """Scored samples of several batches as those of one, prompts in this order."""
    if len(parts) == 1:
        return parts[0]
    firsts = np.cumsum([0, *(part.total for part in parts)]).tolist()
    found = Samples(
        prompts=[prompt for part in parts for prompt in part.prompts],
        n=parts[0].n,
        numbers=[
            first + i for first, part in zip(firsts, parts, strict=False) for i in part.numbers
        ],
        completions=Completions(
            np.concatenate([part.completions.ids for part in parts]),
            np.concatenate([part.completions.logprobs for part in parts]),
            [length for part in parts for length in part.completions.lengths],
            [reason for part in parts for reason in part.completions.finish_reasons],
        ),
        texts=[text for part in parts for text in part.texts],
        conversations=None
        if parts[0].conversations is None
        else [one for part in parts for one in part.conversations or ()],
        are_scored=parts[0].are_scored,
    )
    found.scores = torch.cat([part.scores for part in parts])
    found.failed = torch.cat([part.failed for part in parts])
    found.failures = [failure for part in parts for failure in part.failures]
    found.components = [components for part in parts for components in part.components]
    found.answers = [answer for part in parts for answer in part.answers]
    greedy = [part.greedy_scores for part in parts if part.greedy_scores is not None]
    found.greedy_scores = torch.cat(greedy) if greedy else None
    return found


def _pieces(flat: np.ndarray, borders: Iterable[tuple[int, int]]) -> np.ndarray:
    return np.concatenate([flat[:0], *(flat[start:end] for start, end in borders)])


class Scale(NamedTuple):
    """Units of a number: mean + std x number is in those of rewards."""

    mean: float = 0.0
    std: float = 1.0

    def normalised(self, x: Tensor) -> Tensor:
        """From the units of rewards."""
        return x if self == OF_REWARDS else (x - self.mean) / self.std

    def denormalised(self, x: Tensor) -> Tensor:
        """To the units of rewards."""
        return x if self == OF_REWARDS else x * self.std + self.mean


OF_REWARDS = Scale()


@dataclass(kw_only=True)
class RolloutBatch:
    """The b rows of a batch that this rank computes with; host tensors.

    The ranks of an sp group hold the same rows. response_mask [b, T] bool, True = the token counts:
    a padding position, any token of a sample whose reward failed, one that an episode observed, or
    one that the rollout correction rejects, does not. Optional tensors are filled as the step goes
    on.
    """

    all: Overview
    owners: Tensor  # [B] dp rank that holds each sample
    rows: Tensor  # [b] the samples here, ascending
    tokens: Tensor  # int32, prompts and responses of all rows, one after the other
    response_mask: Tensor  # [b, T] bool
    bypasses_old: bool = False  # old_logprobs are the engine's
    value_scale: Scale = OF_REWARDS  # of what the critic gave; `values` are in those of rewards
    return_scale: Scale = OF_REWARDS  # of what the critic learns to give
    rollout_logprobs: Tensor  # [b, T] float32, from the engine; 0 where it sampled nothing
    learned: Tensor | None = None  # [b, T] bool, see Segment; None: all response tokens are
    turn_rewards: Tensor | None = None  # [b, T] float32, of turns of episodes
    old_logprobs: Tensor | None = None  # [b, T] trainer, before the update
    ref_logprobs: Tensor | None = None  # [b, T]
    values: Tensor | None = None  # [b, T] critic, before the update
    rewards: Tensor | None = None  # [b, T] per token, KL penalty included
    advantages: Tensor | None = None  # [b, T]
    returns: Tensor | None = None  # [b, T]
    loss_weights: Tensor | None = None  # [b, T] rollout correction
    selected: Tensor | None = None  # [b, T] bool, of the mini-batch that is computed
    ref_hidden: Tensor | None = None  # [response tokens of the rows, H'], see ppo/batch/states.py

    def __len__(self) -> int:
        """b."""
        return len(self.rows)

    @property
    def prompt_lengths(self) -> Tensor:
        """[b]."""
        return self.all.prompt_lengths[self.rows]

    @property
    def lengths(self) -> Tensor:
        """[b] prompt plus response tokens."""
        return self.all.lengths[self.rows]

    @property
    def is_response(self) -> Tensor:
        """[b, T] bool: no padding; counted or not."""
        return positions_up_to(self.all.response_lengths[self.rows])

    @property
    def is_scored(self) -> Tensor:
        """[b, T] bool: sampled tokens of samples that have a score, also those rejected since."""
        return self.is_sampled & ~self.all.failed[self.rows, None]

    @property
    def is_sampled(self) -> Tensor:
        """[b, T] bool: response tokens that are learned from, if their samples count."""
        return self.is_response if self.learned is None else self.learned

    def documents(self, indices: Sequence[int]) -> list[Tensor]:
        """Token ids of prompt and response of some rows, int32."""
        ends = self.lengths.cumsum(0)
        starts = (ends - self.lengths).tolist()
        return [self.tokens[starts[i] : ends[i]] for i in indices]

    def per_token(self) -> dict[str, Tensor]:
        """The tensors [b, T] that there are, the mask apart, by name."""
        names = [f.name for f in fields(self)]
        names = names[names.index("rollout_logprobs") : names.index("ref_hidden")]
        return {name: x for name in names if (x := getattr(self, name)) is not None}


def positions_up_to(lengths: Tensor) -> Tensor:
    """bool [len(lengths), longest]: True at the first `lengths` positions of each row."""
    longest = int(lengths.max()) if len(lengths) else 0
    return torch.arange(longest) < lengths[:, None]


def mini_batches(group_ids: Tensor, *, num_prompts: int, seed: int | None = None) -> list[Tensor]:
    """Cut the batch into mini-batches of `num_prompts` prompts, all samples of a prompt together.

    Args:
        group_ids: [B], ascending.
        num_prompts: prompts of one mini-batch over all ranks; the last one may be smaller.
        seed: None keeps the order, else prompts are shuffled with it.

    Returns:
        Numbers of the samples of each. They never depend on the number of ranks.
    """
    groups, sizes = group_ids.unique_consecutive(return_counts=True)
    samples = list(torch.arange(len(group_ids)).split(sizes.tolist()))
    order = torch.arange(len(groups))
    if seed is not None:
        order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed))
    return [torch.cat([samples[g] for g in part.tolist()]) for part in order.split(num_prompts)]
