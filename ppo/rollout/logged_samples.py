"""The few samples of a training step that people read: which ones, and what is known of each token.

Owns the choice and the form; every rank has the scores of all samples, and the per-token values of
its own rows alone. Must not know who shows them (ppo/report/).
"""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch

from ppo.batch.overview import Overview
from ppo.batch.samples import RolloutBatch, Samples
from ppo.data.tokenizer import token_texts
from ppo.rollout.samples import sample_rows
from ppo.rollout.scoring import Scorer
from ppo.tracking.tracker import Tracker
from sharding.agree import gather_to_first

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_RANDOM = 2
"""samples of a step that are logged besides the best and the worst one"""
MOST_TOKENS = 512
"""tokens of a logged sample whose values are kept: its first ones"""


def log_samples(
    tracker: Tracker,
    scorer: Scorer,
    samples: Samples,
    batch: RolloutBatch,
    tokenizer: "PreTrainedTokenizerBase",
    step: int,
) -> None:
    """A few training samples as text; lengths and scores as histograms; a warning if all agree.

    Collective.
    """
    mesh, overview = scorer.run.mesh, batch.all
    chosen = sorted(chosen_rows(overview, step))
    rows = sample_rows(samples, mesh, only=overview.sample_ids[chosen].tolist())
    mine = _token_details(batch, chosen, tokenizer) if mesh.sp_rank == 0 else {}
    parts = gather_to_first(mine, mesh.host_group)
    if rows is None or parts is None:
        return
    details = {number: detail for part in parts for number, detail in part.items()}
    for number, row in zip(chosen, rows, strict=True):
        row["tokens"] = details.get(number)
    scorer.warn_of_equal_scores(overview, rows)
    tracker.samples(step, rows, split="train", num_text=len(rows))
    tracker.histogram(step, "response_length", overview.response_lengths.double().tolist())
    if overview.are_scored:
        scored = overview.is_last & ~overview.failed
        tracker.histogram(step, "score", overview.total_scores[scored].tolist())


def chosen_rows(overview: Overview, step: int) -> set[int]:
    """Rows of the samples that are logged: the best, the worst, and NUM_RANDOM others; of an
    episode the last one.

    The same on every rank. Of equal ones another is taken in each step.
    """
    order = torch.randperm(len(overview), generator=torch.Generator().manual_seed(step))
    order = order[overview.is_last[order]]
    scores = overview.total_scores[order]
    scored = ~overview.failed[order]
    found = order[:NUM_RANDOM].tolist()
    if scored.any():
        found.append(int(order[torch.where(scored, scores, -torch.inf).argmax()]))
        found.append(int(order[torch.where(scored, scores, torch.inf).argmin()]))
    return set(found)


def _token_details(
    batch: RolloutBatch, chosen: Collection[int], tokenizer: "PreTrainedTokenizerBase"
) -> dict[int, dict[str, Any]]:
    """Of those of the chosen samples whose rows are here, by number: lists over response tokens.

    `kl` is log pi_old - log pi_ref (k1; the engine's log-prob where there is no old one).
    """
    logprobs = batch.rollout_logprobs if batch.old_logprobs is None else batch.old_logprobs
    tensors = {"advantage": batch.advantages}
    if batch.ref_logprobs is not None:
        tensors["kl"] = logprobs - batch.ref_logprobs
    found = {}
    for index, number in enumerate(batch.rows.tolist()):
        if number not in chosen:
            continue
        length = min(MOST_TOKENS, int(batch.all.response_lengths[number]))
        start = int(batch.all.prompt_lengths[number])
        ids = batch.documents([index])[0][start : start + length].tolist()
        found[number] = {"text": token_texts(tokenizer, ids)} | {
            name: [float(f"{x:.3g}") for x in tensor[index, :length].tolist()]
            for name, tensor in tensors.items()
            if tensor is not None
        }
    return found
