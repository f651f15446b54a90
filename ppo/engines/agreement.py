"""Do engine and trainer compute the same? Asked once with a prompt of our own, and of each step.

Owns the question and when a difference is an error: in float32 on both sides there is no rounding
to explain it. Must not know how an engine computes.
"""

import logging
from collections.abc import Generator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ppo.config import Config
from ppo.engines.contract import Completion, Engine, Request, SamplingParams
from ppo.errors import InputError
from ppo.models.forward import is_packable, num_ids_of
from ppo.models.learner import Model
from sharding.agree import gather
from sharding.fsdp import without_gradients
from sharding.mesh import Mesh

logger = logging.getLogger(__name__)

PROMPT, BEYOND, RESPONSE = 32, 8, 8
"""tokens of the prompt, or how many more than an attention window has; tokens that are sampled"""
MOST_NATS = {"cpu": 0.01, "cuda": 0.1}
"""largest difference of log-probs in float32; kernels of a GPU may multiply in TF32"""
MOST_PROBABILITY = {"cpu": 1e-3, "cuda": 2e-2}
"""largest training/rollout_probs_diff_max of a first step in float32"""
ODD_NATS = 0.5
"""mean difference of log-probs in half precision that is warned about"""
ALL_THE_SAME = "model.verify_forward=false starts all the same"
_WINDOWS = ("sliding_window", "attention_chunk_size")


def is_float32(config: Config) -> bool:
    """Whether engine and trainer compute in float32."""
    trains = config.actor.fsdp.mixed_precision.param_dtype
    return trains == config.rollout.dtype == "float32"


class Probe:
    """One prompt, longer than the model's attention windows, that the engine answers when it is
    first awake, and the trainer scores when it has its memory again."""

    def __init__(self, config: Config, mesh: Mesh, actor: Model) -> None:
        self._config, self._mesh, self._actor = config, mesh, actor
        module: Any = actor.module
        length = probe_length(module.config.get_text_config(), config.rollout.max_model_len)
        ids = torch.randint(
            num_ids_of(module), (length,), generator=torch.Generator().manual_seed(1)
        )
        self._prompt: list[int] = ids.tolist()
        self._answer: Completion | None = None
        self._done = False

    def ask(self, engine: Engine) -> Generator[None, None, None]:
        """Let every engine, awake, answer; the first one's is kept. Nothing the second time.

        Every rank yields at the same times.
        """
        if self._done or self._answer is not None:
            return
        params = SamplingParams(max_new_tokens=RESPONSE, ignore_eos=True)
        generation = engine.begin(params, longest_prompt=len(self._prompt), most=1)
        leads, group = self._mesh.rollout_tp_rank == 0, self._mesh.host_group
        mine: Completion | None = None
        try:
            yield
            generation.submit([Request(0, self._prompt)])
            # the exchange first: a rank that fails behind it still comes to the poll that follows
            while not all(gather(mine is not None or not leads, group)):
                for ended in generation.advance():
                    mine = ended.completion
                yield
            generation.metrics()  # which ends it; a rank that fails in it comes to the next poll
            yield
        finally:
            generation.close()
        self._answer = gather(mine, group)[0]

    def check(self) -> None:
        """Score the answer and compare; does nothing before there is one, or twice. Collective.

        Raises InputError on all ranks where both sides compute in float32 and differ.
        """
        if self._done or self._answer is None:
            return
        self._done, mesh = True, self._mesh
        tokens = np.asarray(self._answer.response_ids).tolist()
        with self._actor.on_device() as module, without_gradients(module):
            own = score(module, self._prompt, tokens, mesh).cpu()
        theirs = torch.as_tensor(np.asarray(self._answer.logprobs))
        difference = (own - theirs).abs()
        worst = (difference.max().item(), difference.mean().item())
        most, mean = gather(worst, mesh.host_group)[0]
        kind = self._config.rollout.engine_kind(cuda=mesh.device.type == "cuda")
        found = (
            f"rollout.engine = {kind}: its log-probs of {RESPONSE} tokens after a prompt of "
            f"{len(self._prompt)} differ from the trainer's by up to {most:.3g} nats"
        )
        if is_float32(self._config) and not most <= MOST_NATS[mesh.device.type]:
            raise InputError(
                f"{found}, and both compute in float32: it does not compute this family as "
                f"transformers does; use rollout.engine=torch ({ALL_THE_SAME})"
            )
        if not mean <= ODD_NATS:
            logger.warning("%s, %.3g in the mean: rounding does not explain that", found, mean)


def probe_length(text: Any, most: int) -> int:
    """Tokens of the prompt: more than the windows of a model's text configuration, where a
    sequence of `most` tokens reaches them."""
    windows = [w for key in _WINDOWS if isinstance(w := getattr(text, key, None), int)]
    reached = [window + BEYOND for window in windows if window + BEYOND + RESPONSE <= most]
    return max(1, *(reached or [min(PROMPT, most - RESPONSE)]))


@torch.no_grad()
def score(module: Any, prompt: list[int], response: list[int], mesh: Mesh) -> Tensor:
    """The trainer's log-probs [T] of a response, the same on every rank. Collective."""
    sp, rank = mesh.dims.sp, mesh.sp_rank
    ids = [*prompt, *response]
    ids += [0] * (-len(ids) % sp)  # a document of its own
    places = torch.arange(len(prompt) - 1, len(prompt) + len(response) - 1)
    size = len(ids) // sp
    own = (places >= size * rank) & (places < size * (rank + 1))
    whole, end = torch.tensor(ids), len(prompt) + len(response)
    positions = torch.cat([torch.arange(end), torch.arange(len(ids) - end)])
    part = slice(size * rank, size * (rank + 1))
    inputs: dict[str, Any] = {"attention_mask": torch.ones(1, size, dtype=torch.long)}
    if is_packable(module):
        inputs = {"cu_seqlens": torch.tensor([0, end] + ([len(ids)] if len(ids) > end else []))}
    inputs |= {"input_ids": whole[part][None], "position_ids": positions[part][None]}
    inputs |= {"positions": places[own] - size * rank, "labels": whole[places[own] + 1]}
    device = mesh.device
    moved = {name: x if name == "cu_seqlens" else x.to(device) for name, x in inputs.items()}
    found = torch.zeros(len(response), device=device)
    found[own.to(device)] = module(**moved).logprobs
    if sp > 1:
        dist.all_reduce(found, group=mesh.sp_group)
    return found


def check_agreement(config: Config, values: Mapping[str, float], mesh: Mesh) -> None:
    """Raise InputError where a first step in float32 shows that engine and trainer differ.

    values: the step's metrics, equal on all ranks.
    """
    most, kind = values.get("training/rollout_probs_diff_max", 0.0), mesh.device.type
    # what is not finite is left to the guards
    if is_float32(config) and config.model.verify_forward and most > MOST_PROBABILITY[kind]:
        raise InputError(
            f"training/rollout_probs_diff_max = {most:.3g} after the first step: engine and "
            "trainer give the same tokens other probabilities, though both compute in float32; "
            f"use another rollout.engine ({ALL_THE_SAME})"
        )
