"""The rollout batch and its mini-batches.

Owns the shape legend and what a step knows of its samples. Knows no model and no process group:
every rank holds the whole batch on its host.

Shape legend (the whole project): B sequences, P prompt tokens, T response tokens, S = P + T,
N packed tokens, K scored (response) tokens of one micro-batch, V vocabulary, H hidden.
One alignment: index t of logprobs, values, rewards and response_mask speaks of response token t.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo.data.dataset import Prompt
from ppo.engines.contract import Completion


@dataclass(kw_only=True)
class RolloutBatch:
    """B = prompts x n sequences in prompt-major order; host tensors, the same on every rank.

    response_mask [B, T] bool, True = the token counts: a padding position, or any token of a
    sample whose reward failed, does not. Optional tensors are filled as the step goes on.
    """

    prompts: list[Prompt]  # B entries, the n samples of a prompt share one object
    response_ids: list[list[int]]  # B
    finish_reasons: list[str]  # B
    group_ids: Tensor  # [B] index of the prompt inside this batch
    response_mask: Tensor  # [B, T] bool
    rollout_logprobs: Tensor  # [B, T] float32, from the engine
    scores: Tensor  # [B] float32, from the rewards
    failed: Tensor  # [B] bool, the reward raised, timed out or was not finite
    failures: list[str | None]  # B, what went wrong with the reward of a failed sample
    components: list[dict[str, float]]  # B, what the score is made of: function, model, extra/NAME
    greedy: "RolloutBatch | None" = None  # one response per prompt, for estimators that compare
    old_logprobs: Tensor | None = None  # [B, T] trainer, before the update
    ref_logprobs: Tensor | None = None  # [B, T]
    values: Tensor | None = None  # [B, T] critic, before the update
    rewards: Tensor | None = None  # [B, T] per token, KL penalty included
    advantages: Tensor | None = None  # [B, T]
    returns: Tensor | None = None  # [B, T]
    loss_weights: Tensor | None = None  # [B, T] rollout correction

    def __len__(self) -> int:
        """B."""
        return len(self.prompts)

    @property
    def alone(self) -> Tensor:
        """[B] bool: samples with a score that have siblings, none of which has one."""
        size = self.group_ids.bincount()[self.group_ids]
        scored = self.group_ids[~self.failed].bincount(minlength=len(self))[self.group_ids]
        return ~self.failed & (size > 1) & (scored == 1)

    @property
    def prompt_lengths(self) -> list[int]:
        """Tokens of each prompt, B entries."""
        return [len(p.prompt_ids) for p in self.prompts]

    @property
    def lengths(self) -> list[int]:
        """Prompt plus response tokens, B entries."""
        return [
            len(p.prompt_ids) + len(r) for p, r in zip(self.prompts, self.response_ids, strict=True)
        ]


def make_batch(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> RolloutBatch:
    """Build the batch from completions in prompt-major order (`len(completions) = prompts x n`)."""
    n, remainder = divmod(len(completions), len(prompts))
    assert n > 0 and remainder == 0, (len(completions), len(prompts))
    lengths = torch.tensor([len(c.response_ids) for c in completions])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]  # [B, T]
    logprobs = torch.zeros(mask.shape)
    logprobs[mask] = torch.tensor([x for c in completions for x in c.logprobs])
    return RolloutBatch(
        prompts=[p for p in prompts for _ in range(n)],
        response_ids=[list(c.response_ids) for c in completions],
        finish_reasons=[c.finish_reason for c in completions],
        group_ids=torch.arange(len(prompts)).repeat_interleave(n),
        response_mask=mask,
        rollout_logprobs=logprobs,
        scores=torch.zeros(len(completions)),
        failed=torch.zeros(len(completions), dtype=torch.bool),
        failures=[None] * len(completions),
        components=[{} for _ in completions],
    )


def mini_batches(group_ids: Tensor, *, num_prompts: int, seed: int | None = None) -> list[Tensor]:
    """Cut the batch into mini-batches of `num_prompts` prompts, all samples of a prompt together.

    Args:
        group_ids: [B], ascending.
        num_prompts: prompts of one mini-batch over all ranks; the last one may be smaller.
        seed: None keeps the order, else prompts are shuffled with it.

    Returns:
        Index tensors into the batch. They never depend on the number of ranks.
    """
    groups = group_ids.unique()
    if seed is not None:
        groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed))]
    return [
        torch.cat([(group_ids == g).nonzero()[:, 0] for g in part])
        for part in groups.split(num_prompts)
    ]
