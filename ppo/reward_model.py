"""A reward model scores conversations, which its own tokenizer and chat template read.

Owns how a conversation becomes the documents of a forward pass and its scores one number each.
Must not know engines, advantages or what else scores a sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from ppo.batch import make_batch
from ppo.data.dataset import Prompt
from ppo.engines.contract import Completion
from ppo.errors import InputError
from ppo.learner import Frozen
from ppo.run import Run
from ppo.scoring import Batcher, response_values
from sharding.mesh import Mesh

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class RewardModel:
    """A frozen sequence classifier with one label; it rests on the host between uses."""

    model: Frozen
    tokenizer: "PreTrainedTokenizerBase"
    batcher: Batcher

    def score(self, prompts: Sequence[Prompt], texts: Sequence[str], run: Run) -> Tensor:
        """The logit of each conversation, prompt and response: [B] float32 on every rank's host.

        A document is scored at its last token, as transformers' classifiers do. That is the value
        of the state before one more token, so one is put behind it; attention is causal.

        A stop request ends the pass. Collective.
        """
        documents = self._documents(prompts, texts, run.mesh)
        ended = Completion([self.batcher.pad_id], [0.0], "stop")
        batch = make_batch(
            [
                prompt._replace(prompt_ids=ids)
                for prompt, ids in zip(prompts, documents, strict=True)
            ],
            [ended] * len(documents),
        )
        with self.model.on_device() as module:
            values = response_values(module, batch, batcher=self.batcher, run=run)  # [B, 1]
        return values[:, 0]

    def _documents(
        self, prompts: Sequence[Prompt], texts: Sequence[str], mesh: Mesh
    ) -> list[list[int]]:
        """Token ids of every conversation on every rank; each rank tokenizes its share."""
        world_size = mesh.dims.world_size
        mine, error = [], None
        try:
            for prompt, text in zip(
                prompts[mesh.rank :: world_size], texts[mesh.rank :: world_size], strict=True
            ):
                mine.append(np.array(conversation_ids(self.tokenizer, prompt, text), np.int32))
        except InputError as problem:
            error = problem
        parts: list[tuple[list[Any], InputError | None]] = [([], None)] * world_size
        dist.all_gather_object(parts, (mine, error), group=mesh.host_group)
        for _, problem in parts:
            if problem is not None:
                raise problem
        return [parts[i % world_size][0][i // world_size].tolist() for i in range(len(prompts))]


def conversation_ids(tokenizer: "PreTrainedTokenizerBase", prompt: Prompt, text: str) -> list[int]:
    """The prompt's messages and the response as one conversation. Raises InputError."""
    from jinja2 import TemplateError

    messages = prompt.messages
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    conversation = [*messages, {"role": "assistant", "content": text}]
    try:
        rendered = tokenizer.apply_chat_template(conversation, tokenize=False)
    except TemplateError as error:
        raise InputError(
            f"reward.model: its chat template refuses prompt {prompt.uid}: {error}"
        ) from error
    ids: list[int] = tokenizer(rendered, add_special_tokens=False)["input_ids"]  # pyright: ignore
    if not ids:
        raise InputError(f"reward.model: its chat template makes nothing of prompt {prompt.uid}")
    return ids
