"""A ragged batch, and the updates' losses and gradients by a loop over its tokens.

Plain transformers on padded rows, unsharded, formulas written out token by token; shares nothing
with ppo/losses.py.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ppo.batch.samples import RolloutBatch
from ppo.data.dataset import Prompt
from ppo.engines.contract import Completion
from ppo.selection import noise
from tests.ppo.batches import make_batch
from tests.ppo.models.hf_models import VOCAB

N = 2  # samples of a prompt
PROMPTS = [3, 1, 2, 1, 3, 2, 1, 2, 3, 2, 4, 1, 6]  # tokens; mini-batches of 10 and 3
# Dealt out in turn, rank 0 of 4 gets every long sequence. The first, of 70 tokens, is longer than
# ROW; sequence 3 is 1 token after 1; sequence 18 has no response.
RESPONSES = [67, 1, 1, 1, 43, 4, 2, 5, 37, 1, 3, 1, 32, 2, 1, 4, 27, 2, 0, 9, 20, 5, 3, 8, 1, 7]
FAILED = [19, 21, 22, 23, 24]  # leaves 2 sequences in the second mini-batch: not one for each rank
MINI_BATCHES = [range(20), range(20, 26)]
SCALE = 80  # data.max_response_length, longer than any response
TEMPERATURE, CLIP_LOW, CLIP_HIGH, CLIP_C, CLIP_VALUE = 0.8, 0.2, 0.28, 3.0, 0.5
ENTROPY_COEFF, KL_LOSS_COEF = 0.05, 0.3
COV_LOW, COV_HIGH, COV_SHARE, SEED = 0.0, 5.0, 0.15, 42
TOKEN_BOUNDS, MEAN_BOUNDS, VETO, LARGEST_WEIGHT = (0.4, 2.5), (0.7, 1.4), 0.2, 1.5


def make_data() -> RolloutBatch:
    """Tokens and noise; what does not count is NaN. `with_scores` puts the models' outputs in."""
    g = torch.Generator().manual_seed(5)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, VOCAB, (count,), generator=g).tolist()

    prompts = [Prompt(uid, tokens(n), "", None, {}, "") for uid, n in enumerate(PROMPTS)]
    completions = [Completion(tokens(n), [0.0] * n, "stop") for n in RESPONSES]
    batch = make_batch(prompts, completions, failed=FAILED)

    def noise(scale: float) -> Tensor:
        values = scale * torch.randn(batch.response_mask.shape, generator=g)
        return torch.where(batch.response_mask, values, torch.nan)

    batch.old_logprobs, batch.ref_logprobs, batch.values = noise(0.8), noise(0.3), noise(0.6)
    batch.advantages, batch.returns = noise(1.0), noise(1.0)
    batch.loss_weights = noise(1.0).abs()
    batch.rollout_logprobs = noise(0.4)
    return batch


def padded_forward(model: Any, batch: RolloutBatch, indices: list[int]) -> tuple[Tensor, Tensor]:
    """Token ids [b, S] and what plain transformers gives for them at once: [b, S, V] or [b, S]."""
    rows = [document.tolist() for document in batch.documents(indices)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    if hasattr(model, "score"):
        hidden = model.model(input_ids=ids, attention_mask=mask).last_hidden_state
        return ids, model.score(hidden)[:, :, 0]
    return ids, (model(input_ids=ids, attention_mask=mask).logits / TEMPERATURE).log_softmax(-1)


def with_scores(batch: RolloutBatch, actor: Any, critic: Any) -> RolloutBatch:
    """Old and reference log-probs and values near those of the models."""
    everything = list(range(len(RESPONSES)))
    with torch.no_grad():
        ids, logprobs = padded_forward(actor, batch, everything)
        _, values = padded_forward(critic, batch, everything)
    for i, prompt_length in enumerate(batch.prompt_lengths.tolist()):
        for t in range(RESPONSES[i]):
            at = prompt_length + t
            now = logprobs[i, at - 1, ids[i, at]]
            for tensor in (batch.old_logprobs, batch.ref_logprobs, batch.rollout_logprobs):
                assert tensor is not None
                tensor[i, t] += now
            assert batch.values is not None
            batch.values[i, t] += values[i, at - 1]
    return batch


def are_kept(log_ratios: list[float]) -> list[bool]:
    """Which tokens of a sequence the rules of rejection above leave in, worked out one by one."""
    ratios = [math.exp(d) for d in log_ratios]
    mean = math.exp(sum(log_ratios) / len(log_ratios))
    if not MEAN_BOUNDS[0] <= mean <= MEAN_BOUNDS[1] or min(ratios) < VETO:
        return [False] * len(ratios)
    return [TOKEN_BOUNDS[0] <= r <= TOKEN_BOUNDS[1] for r in ratios]


def kept_tokens(batch: Any) -> list[list[int]]:
    """Tokens of each sequence that old and rollout log-probs leave in."""
    kept = []
    for i, length in enumerate(RESPONSES):
        d = (batch.old_logprobs[i, :length] - batch.rollout_logprobs[i, :length]).tolist()
        keeps = are_kept(d) if d and i not in FAILED else []
        kept.append([t for t, keep in enumerate(keeps) if keep])
    return kept


def bypassed(outputs: Tensor, ids: Tensor, batch: Any, i: int) -> list[tuple[Tensor, Tensor]]:
    """The policy gradient's loss of each token of sequence i, weighed by its own log-probs."""
    first, rows = int(batch.prompt_lengths[i]), range(RESPONSES[i])
    logprobs = [outputs[first + t - 1, ids[first + t]] for t in rows]
    d = [(x.detach() - batch.rollout_logprobs[i, t]).item() for t, x in enumerate(logprobs)]
    weight = min(math.exp(sum(d)), LARGEST_WEIGHT)
    losses = [
        -batch.advantages[i, t].double() * x * (weight if keep else 0.0)
        for t, x, keep in zip(rows, logprobs, are_kept(d), strict=True)
    ]
    return [(loss, loss) for loss in losses]


def one_token_of_policy(
    logprobs: Tensor, token: int, batch: Any, at: tuple[int, int], regularised: bool, seen: set[str]
) -> tuple[Tensor, Tensor]:
    """The policy's loss of one token without and with its entropy bonus and KL, in float64."""
    ratio = (logprobs[token] - batch.old_logprobs[at]).exp()
    advantage = batch.advantages[at].double()
    limited = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    gain = min(ratio * advantage, limited * advantage)
    seen.add("free" if gain == ratio * advantage else "clipped")
    if advantage < 0 and gain < CLIP_C * advantage:
        gain = CLIP_C * advantage
        seen.add("dual")
    if not regularised:
        return -gain, -gain
    policy = -gain * batch.loss_weights[at]
    entropy = -(logprobs.exp() * logprobs).sum()
    x = batch.ref_logprobs[at] - logprobs[token]
    return policy, policy - ENTROPY_COEFF * entropy + KL_LOSS_COEF * (x.exp() - x - 1)


def one_token_of_value(value: Tensor, batch: Any, at: tuple[int, int], seen: set[str]) -> Tensor:
    old, target = batch.values[at].double(), batch.returns[at].double()
    limited = min(max(value, old - CLIP_VALUE), old + CLIP_VALUE)
    terms = (value - target) ** 2, (limited - target) ** 2
    seen.add("free" if terms[0] >= terms[1] else "clipped")
    return 0.5 * max(terms)


def whole(sequences: list[list[Tensor]], mode: str) -> Tensor:
    """One number from the losses of every token of every sequence."""
    sums = [torch.stack(tokens).sum() for tokens in sequences]
    means = [torch.stack(tokens).mean() for tokens in sequences]
    return {
        "token-mean": sum(sums) / sum(map(len, sequences)),
        "token-sum": sum(sums),
        "seq-mean-token-sum": sum(sums) / len(sums),
        "seq-mean-token-mean": sum(means) / len(means),
        "seq-mean-token-sum-norm": sum(sums) / len(sums) / SCALE,
    }[mode]  # type: ignore[return-value]


def chosen_tokens(loss_mode: str, batch: Any, part: range) -> set[tuple[int, int]]:
    """Tokens of a mini-batch that Clip-Cov or KL-Cov treats apart."""
    at = [(i, t) for i in part if not batch.all.failed[i] for t in range(RESPONSES[i])]
    a = [batch.advantages[x].item() for x in at]
    p = [batch.old_logprobs[x].item() for x in at]
    mean_a, mean_p = sum(a) / len(a), sum(p) / len(p)
    found = {x: (u - mean_a) * (v - mean_p) for x, u, v in zip(at, a, p, strict=True)}
    if loss_mode == "kl_cov":
        ranked = sorted(at, key=lambda x: -found[x])
    else:
        lots = {x: noise((SEED, 1, 0), [x[0]], x[1] + 1)[0, -1].item() for x in at}
        inside = [x for x in at if COV_LOW < found[x] < COV_HIGH]
        ranked = sorted(inside, key=lambda x: -lots[x])
    return set(ranked[: int(COV_SHARE * len(at))])


def one_token_of_covariance(
    loss_mode: str, logprob: Tensor, batch: Any, at: tuple[int, int], is_chosen: bool
) -> Tensor:
    d = logprob - batch.old_logprobs[at]
    advantage = batch.advantages[at].double()
    if loss_mode == "kl_cov":
        return -advantage * d.exp() + (0.1 * d.abs() if is_chosen else 0.0)
    limited = d.exp().clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    return 0.0 * d if is_chosen else -min(d.exp() * advantage, limited * advantage)


def tokens_of_sequence(
    loss_mode: str, outputs: Tensor, ids: Tensor, batch: Any, i: int, rows: list[int]
) -> list[tuple[Tensor, Tensor]]:
    """The loss of each of these tokens of sequence i, whose ratio is that of all of them."""
    first = int(batch.prompt_lengths[i])
    d = [outputs[first + t - 1, ids[first + t]] - batch.old_logprobs[i, t] for t in rows]
    losses = []
    for number, t in enumerate(rows):
        advantage = batch.advantages[i, t].double()
        if loss_mode == "geo_mean":
            signs = [batch.advantages[i, u].sign() for u in rows]
            low, high = torch.tensor(-CLIP_LOW).double(), torch.tensor(CLIP_HIGH).double()
            kept = [min(x, high) if s > 0 else max(x, low) for x, s in zip(d, signs, strict=True)]
            mean = torch.stack(kept).detach().mean()
            own = kept[number]
            losses.append(-advantage * mean.exp() * (1 + own - own.detach()))
        else:
            mean = torch.stack(d).detach().mean()
            ratio = mean.exp() * (d[number] - d[number].detach()).exp()
            limited = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
            losses.append(-min(ratio * advantage, limited * advantage))
    return [(loss, loss) for loss in losses]


def reference(
    model: Any,
    batch: RolloutBatch,
    part: range,
    mode: str,
    regularised: bool,
    seen: set[str],
    loss_mode: str = "vanilla",
    rejecting: bool = False,
    full_kl: tuple[str | None, Any] = (None, None),
) -> tuple[float, dict[str, Tensor]]:
    """Logged loss and gradients of one mini-batch.

    rejecting: `kept_tokens` alone count; with gpg, what the update's log-probs reject is weighed 0.
    full_kl: its kind, and the reference.
    """
    counted = [list(range(0 if i in FAILED else length)) for i, length in enumerate(RESPONSES)]
    if rejecting and loss_mode != "gpg":
        counted = kept_tokens(batch)
    indices = [i for i in part if not batch.all.failed[i] and counted[i]]
    ids, outputs = padded_forward(model, batch, indices)
    ref_outputs = None
    if full_kl[0] is not None:
        with torch.no_grad():
            _, ref_outputs = padded_forward(full_kl[1], batch, indices)
    chosen = chosen_tokens(loss_mode, batch, part)
    logged, complete = [], []
    for row, i in enumerate(indices):
        pairs = []
        for t in counted[i]:
            at = int(batch.prompt_lengths[i]) + t
            output, token = outputs[row, at - 1], int(ids[row, at])
            if hasattr(model, "score"):
                pairs.append((one_token_of_value(output, batch, (i, t), seen),) * 2)
            else:
                pairs.append(one_token_of_policy(output, token, batch, (i, t), regularised, seen))
        if loss_mode in ("gspo", "geo_mean"):
            pairs = tokens_of_sequence(loss_mode, outputs[row], ids[row], batch, i, counted[i])
        elif loss_mode == "gpg":
            pairs = bypassed(outputs[row], ids[row], batch, i)
        elif loss_mode != "vanilla":
            first = int(batch.prompt_lengths[i])
            losses = [
                one_token_of_covariance(
                    loss_mode,
                    outputs[row, first + t - 1, ids[row, first + t]],
                    batch,
                    (i, t),
                    (i, t) in chosen,
                )
                for t in range(RESPONSES[i])
            ]
            pairs = [(loss, loss) for loss in losses]
        if ref_outputs is not None:
            first, last = int(batch.prompt_lengths[i]) - 1, int(batch.lengths[i]) - 1
            p = outputs[row, first:last]  # log-probs [T, V]
            q = ref_outputs[row, first:last, :VOCAB].log_softmax(-1)
            if full_kl[0] == "full_forward":
                p, q = q, p
            kl = [sum(a.exp() * (a - b)) for a, b in zip(p, q, strict=True)]
            pairs = [(x, y + KL_LOSS_COEF * k) for (x, y), k in zip(pairs, kl, strict=True)]
        logged.append([pair[0] for pair in pairs])
        complete.append([pair[1] for pair in pairs])
    model.zero_grad()
    whole(complete, mode).backward()
    named = model.named_parameters()
    return whole(logged, mode).item(), {n: p.grad.clone() for n, p in named if p.grad is not None}
