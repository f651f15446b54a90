"""Episodes written by hand, as samples and as a batch."""

from collections.abc import Sequence

import numpy as np
import torch

from ppo.batch.conversations import Conversation, Segment
from ppo.batch.samples import RolloutBatch, Samples
from ppo.batch.shares import overview_of, share_out
from ppo.data.dataset import Prompt
from ppo.engines.contract import Completion, Completions
from sharding.mesh import Mesh

Tokens = Sequence[tuple[int, bool, float]]
"""of a segment: id, whether it is learned, what its turn was rewarded with"""


def segment(tokens: Tokens, prompt_ids: Sequence[int] = (7,)) -> tuple[Segment, list[int]]:
    """A row, and its ids."""
    ids, learned, rewards = zip(*tokens, strict=True) if tokens else ((), (), ())
    return (
        Segment(list(prompt_ids), np.array(learned, bool), np.array(rewards, np.float32)),
        list(ids),
    )


def make_episodes(
    episodes: Sequence[Sequence[tuple[Segment, list[int]]]],
    scores: Sequence[float | None],
    *,
    n: int,
) -> Samples:
    """n episodes of each prompt; a score None: it has failed. The log-prob of a learned token is
    -id / 100."""
    completions = []
    for parts in episodes:
        ids = [i for _, own in parts for i in own]
        learned = [bool(x) for one, _ in parts for x in one.learned]
        logprobs = [-i / 100 if known else 0.0 for i, known in zip(ids, learned, strict=True)]
        completions.append(Completion(ids, logprobs, "done"))
    samples = Samples(
        prompts=[Prompt(uid, [7], "", None, {}, "") for uid in range(len(episodes) // n)],
        n=n,
        numbers=list(range(len(episodes))),
        completions=Completions.of(completions),
        texts=["" for _ in episodes],
        conversations=[Conversation([one for one, _ in parts]) for parts in episodes],
    )
    samples.failed = torch.tensor([score is None for score in scores])
    samples.scores = torch.tensor([score or 0.0 for score in scores])
    return samples


def batch_of(samples: Samples, mesh: Mesh) -> RolloutBatch:
    """All rows on this rank, which is the only one."""
    overview, holders = overview_of(samples, mesh)
    return share_out(samples, overview, holders, torch.zeros(len(overview), dtype=torch.long), mesh)
