"""What every rank knows of all rows of a batch: numbers, no tokens.

Owns how samples and rows are counted. Must not know models or ranks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Overview:
    """What every rank knows of all B rows; host tensors, the same everywhere.

    A row is a sample, or one segment of it: the rows of a sample follow each other, and share its
    score.
    """

    group_ids: Tensor  # [B] index of the prompt in this batch, ascending
    prompt_lengths: Tensor  # [B]
    response_lengths: Tensor  # [B]
    scores: Tensor  # [B] float32, 0 for a failed sample
    failed: Tensor  # [B] bool, the sample has no score, or no token to learn from
    cut: Tensor  # [B] bool, the response ended by its length
    greedy_scores: Tensor | None = None  # [prompts] of the greedy responses, where sampled
    are_scored: bool = True  # false: nothing scores, all scores are 0
    rejected: Tensor | None = None  # [B] response tokens that the rollout correction takes out
    observed: Tensor | None = None  # [B] response tokens that are not learned; None: there are none
    samples: Tensor | None = None  # [B] sample of each row, ascending; None: each is one
    turn_rewards: Tensor | None = None  # [B] float32, of all turns of the row's sample

    def __len__(self) -> int:
        """B."""
        return len(self.group_ids)

    @property
    def total_scores(self) -> Tensor:
        """[B] the score of each row's sample with the rewards of its turns: what it has earned."""
        return self.scores if self.turn_rewards is None else self.scores + self.turn_rewards

    @property
    def num_sampled(self) -> int:
        """Response tokens that the policy has sampled, counted or not."""
        observed = 0 if self.observed is None else int(self.observed.sum())
        return int(self.response_lengths.sum()) - observed

    @property
    def sample_ids(self) -> Tensor:
        """[B] number of the sample that each row belongs to."""
        return torch.arange(len(self)) if self.samples is None else self.samples

    @property
    def is_last(self) -> Tensor:
        """[B] bool: the last row of its sample, which stands for it where samples are counted."""
        following = torch.full((len(self),), -1)
        following[:-1] = self.sample_ids[1:]
        return self.sample_ids != following

    @property
    def num_samples(self) -> int:
        """Samples, of one row or several."""
        return int(self.is_last.sum())

    @property
    def has_score_again(self) -> Tensor:
        """[B] bool: a row that counts and has the score of its sample, as a later one has too."""
        numbers = torch.arange(len(self))
        counts = self.counted > 0
        last = torch.full((len(self),), -1).scatter_reduce(
            0, self.sample_ids, torch.where(counts, numbers, -1), "amax"
        )
        return counts & (last[self.sample_ids] != numbers)

    @property
    def lengths(self) -> Tensor:
        """[B] prompt plus response tokens."""
        return self.prompt_lengths + self.response_lengths

    @property
    def counted(self) -> Tensor:
        """[B] response tokens that count: none of a failed sample, nor a rejected or observed
        one."""
        counted = self.response_lengths
        for left_out in (self.rejected, self.observed):
            counted = counted if left_out is None else counted - left_out
        return torch.where(self.failed, 0, counted)

    @property
    def alone(self) -> Tensor:
        """[B] bool: of samples with a score that have siblings, none of which has one."""
        counts = self.is_last
        size = self.group_ids[counts].bincount()[self.group_ids]
        scored = self.group_ids[counts & ~self.failed].bincount(minlength=len(self))
        return ~self.failed & (size > 1) & (scored[self.group_ids] == 1)
