"""Which cache the embedded engine takes for a family, so that it generates as transformers would.

Owns the question for prefill and decoding, which a small copy answers, as ppo/models/verify.py does
for training's forward. Must not know sharded weights or requests.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ppo.engines.embedded.model import CacheKind, LocalModel, own_cache_problem
from ppo.errors import InputError
from ppo.models.small_copy import NoSmallCopy, build_small_copy

logger = logging.getLogger(__name__)

PROMPTS, COPIES, RESPONSE = (3, 6, 6), (1, 2, 2), 8
"""tokens of the prompts that are prefilled together, rows of each of them, and tokens that a row
decodes then"""
ENDED = 2
"""a row that ends at once: cohorts and caches are cut, and prompts are shared, without it too"""
TOLERANCE = 3e-3
"""largest difference of log-probs, in their standard deviations"""
HOST = torch.device("cpu")


def choose_cache(
    hf_config: Any, *, compare: bool, num_ranks: int = 1, trust_remote_code: bool = False
) -> CacheKind:
    """The fastest cache with which a family is right. One core, no device.

    compare: whether a small copy is asked (`model.verify_forward`); where none can be made, and
    without, what its class says decides.
    num_ranks: T, over which only our own cache can be split.
    Raises InputError that names the family: whatever the cache, the engine fails on it or its
    log-probs differ.
    """
    family = hf_config.model_type
    problem = _class_problem(hf_config, trust_remote_code)
    if problem is None and compare:
        problem = _compared(hf_config, "own", trust_remote_code)
    if problem is None:
        return "own"
    if num_ranks > 1:
        raise InputError(
            f"rollout.engine=torch has no cache for {family} that can be split over {num_ranks} "
            f"ranks ({problem}): set rollout.tensor_model_parallel_size=1"
        )
    other = _compared(hf_config, "transformers", trust_remote_code) if compare else None
    if other is None:
        logger.info(
            "rollout.engine=torch: transformers' own cache serves %s, slower, since rows run "
            "together only where their prompts have one length: %s",
            family,
            problem,
        )
        return "transformers"
    if _compared(hf_config, "none", trust_remote_code) is None:
        logger.warning(
            "rollout.engine=torch: no cache serves %s: each token reads all before it, which is "
            "slow: with ours %s; with transformers' %s",
            family,
            problem,
            other,
        )
        return "none"
    raise InputError(
        f"rollout.engine=torch cannot generate with {family}: with its cache {problem}; with "
        f"transformers' {other}; use rollout.engine=sglang (model.verify_forward=false starts all "
        "the same)"
    )


def _class_problem(hf_config: Any, trust_remote_code: bool) -> str | None:
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=trust_remote_code)
    return own_cache_problem(module)


@torch.no_grad()
def _compared(hf_config: Any, cache: CacheKind, trust_remote_code: bool) -> str | None:
    """What is wrong with a small copy's prefill and decoding, against its forward."""
    try:
        small = build_small_copy(hf_config, trust_remote_code=trust_remote_code)
    except NoSmallCopy:  # training's own comparison has said so
        return None
    number = small.get_input_embeddings().weight.shape[0] - 1
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(number, (n + RESPONSE,), generator=generator) for n in PROMPTS]
    # the last prompt goes on in two ways
    rows.append(torch.cat([rows[-1][: PROMPTS[-1]], rows[0][-RESPONSE:]]))
    try:
        got = _logits(small, rows, cache, trust_remote_code).log_softmax(-1)  # [R, n, V]
    except Exception as error:  # whatever the code of a family does with what it is not made for
        return f"it fails ({type(error).__name__}: {error})"
    small.set_attn_implementation("eager")
    plain = [small(input_ids=row[None], use_cache=False).logits[0] for row in rows]
    want = torch.stack([logits[-RESPONSE - 1 :] for logits in plain]).log_softmax(-1)
    difference = (got - want).abs().max()
    if difference <= TOLERANCE * want.std():  # NaN is no rounding
        return None
    return f"its log-probs differ from transformers' own by {difference:.3g} nats"


def _logits(small: Any, rows: Sequence[Tensor], kind: CacheKind, trust_remote_code: bool) -> Tensor:
    """Logits [R, RESPONSE + 1, V] after each row's prompt, and after each token that follows."""
    weights = dict(small.named_parameters())
    model = LocalModel(
        small.config,
        device=HOST,
        dtype=torch.float32,
        tp_mesh=None,
        num_ids=small.get_output_embeddings().weight.shape[0],
        buffers=dict(small.named_buffers()),
        cache=kind,
        trust_remote_code=trust_remote_code,
    )
    model.allocate()
    for name, parameter in model.parameters().items():
        parameter.copy_(weights[name])
    cache = model.make_cache(rows=sum(COPIES), columns=max(PROMPTS) + RESPONSE)
    lengths = torch.tensor(PROMPTS)
    step = cache.prefill(PROMPTS, COPIES, HOST)
    prompts = [row[:length] for row, length in zip(rows, PROMPTS, strict=False)]
    padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    first = model.logits(padded, step, cache, last=lengths - 1)  # [prompts, V]
    running = [row for row in range(sum(COPIES)) if row != ENDED]
    # what each running row goes on with, in the cache's order: a number of `rows`
    order = [running.index(old) for old in cache.keep(running)]
    lengths, back = lengths[[0, 1, 2, 2]][order], torch.tensor(order).argsort()
    logits = [first[[0, 1, 2, 2]]]
    for count in range(RESPONSE):
        positions = lengths + count
        step = cache.decode(positions, int(positions.max()) + 1)
        tokens = torch.stack([rows[r][p] for r, p in zip(order, positions.tolist(), strict=True)])
        logits.append(model.logits(tokens[:, None], step, cache)[back])
    return torch.stack(logits, 1)
