"""Whether the embedded engine generates from a family as transformers would: asked of a small copy.

Owns the question for prefill and KV cache, as ppo/models/verify.py does for training's forward.
Must not know sharded weights or requests.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ppo.engines.embedded.kv_cache import KVCache
from ppo.engines.embedded.model import LocalModel
from ppo.errors import InputError
from ppo.models.small_copy import NoSmallCopy, build_small_copy
from sharding.names import persistent_buffers

PROMPTS, RESPONSE = (6, 3), 8
"""tokens of the prompts that are prefilled together, and tokens that each row decodes then"""
TOLERANCE = 3e-3
"""largest difference of log-probs, in their standard deviations"""
HOST = torch.device("cpu")


@torch.no_grad()
def check_generation(hf_config: Any, *, trust_remote_code: bool = False) -> None:
    """Compare a small copy's prefill and decoding with its forward; one core, no device.

    Where no copy can be made nothing is compared: training's own comparison has said so.
    Raises InputError that names the family: the engine fails on it, or its log-probs differ.
    """
    try:
        small = build_small_copy(hf_config, trust_remote_code=trust_remote_code)
    except NoSmallCopy:
        return
    number = small.get_input_embeddings().weight.shape[0] - 1
    ids = torch.randint(
        number, (PROMPTS[0] + RESPONSE,), generator=torch.Generator().manual_seed(1)
    )
    rows = [ids, ids[PROMPTS[0] - PROMPTS[1] :]]
    try:
        got = _logits(small, rows, trust_remote_code).log_softmax(-1)  # [2, RESPONSE + 1, V]
    except InputError:
        raise
    except Exception as error:  # whatever the code of a family does with what it is not made for
        problem = f"it fails ({type(error).__name__}: {error})"
    else:
        small.set_attn_implementation("eager")
        plain = [small(input_ids=row[None], use_cache=False).logits[0] for row in rows]
        want = torch.stack([logits[-RESPONSE - 1 :] for logits in plain]).log_softmax(-1)
        difference = (got - want).abs().max()
        if difference <= TOLERANCE * want.std():  # NaN is no rounding
            return
        problem = f"its log-probs differ from transformers' own by {difference:.3g} nats"
    raise InputError(
        f"rollout.engine=torch cannot generate with {hf_config.model_type}: {problem}; use "
        "rollout.engine=sglang (model.verify_forward=false starts all the same)"
    )


def _logits(small: Any, rows: Sequence[Tensor], trust_remote_code: bool) -> Tensor:
    """Logits [R, RESPONSE + 1, V] after each row's prompt, and after each token that follows."""
    weights = dict(small.named_parameters())
    model = LocalModel(
        small.config,
        device=HOST,
        dtype=torch.float32,
        tp_mesh=None,
        num_ids=small.get_output_embeddings().weight.shape[0],
        buffers=persistent_buffers(small),
        trust_remote_code=trust_remote_code,
    )
    model.allocate()
    for name, parameter in model.parameters().items():
        parameter.copy_(weights[name])
    cache, lengths = KVCache(rows=len(rows), columns=len(rows[0])), torch.tensor(PROMPTS)
    step = cache.prefill(PROMPTS, [1] * len(rows), HOST)
    prompts = [row[:length] for row, length in zip(rows, PROMPTS, strict=True)]
    padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    logits = [model.logits(padded, step, cache, last=lengths - 1)]
    for count in range(RESPONSE):
        positions = lengths + count
        step = cache.decode(positions, int(positions.max()) + 1)
        tokens = torch.stack([row[p] for row, p in zip(rows, positions.tolist(), strict=True)])
        logits.append(model.logits(tokens[:, None], step, cache))
    return torch.stack(logits, 1)
