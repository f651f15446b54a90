"""A reward model scores conversations, which its own tokenizer and chat template read.

Owns how a conversation becomes the documents of a forward pass and its scores one number each.
Must not know engines, advantages or what else scores a sample.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ppo.batch import make_batch
from ppo.config import Config
from ppo.data.dataset import Prompt
from ppo.data.tokenizer import load_tokenizer, render_chat, token_ids
from ppo.engines.contract import Completion
from ppo.errors import InputError
from ppo.forward_passes import response_values
from ppo.models.build import build_value_model
from ppo.models.folder import model_folder
from ppo.models.learner import Model
from ppo.models.roles import build_options
from ppo.packing import PAD_ID, Batcher, make_batcher
from ppo.run.run import Run
from sharding.agree import together
from sharding.mesh import Mesh

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RewardModel:
    """A frozen sequence classifier with one label; it rests on the host between uses."""

    model: Model
    tokenizer: "PreTrainedTokenizerBase"
    batcher: Batcher

    def score(self, prompts: Sequence[Prompt], texts: Sequence[str], run: Run) -> Tensor:
        """The logit of each conversation, prompt and response: [B] float32 on every rank's host.

        A document is scored at its last token, as transformers' classifiers do. That is the value
        of the state before one more token, so one is put behind it; attention is causal. NaN for a
        conversation with more tokens than the model has positions, or with one that it does not
        know.

        A stop request ends the pass. Collective.
        """
        documents = self._documents(prompts, texts, run.mesh)
        limit = getattr(self.model.hf_config, "max_position_embeddings", None) or sys.maxsize
        num_ids = self.model.hf_config.vocab_size
        unfit = torch.tensor([len(ids) >= limit or max(ids) >= num_ids for ids in documents])
        if unfit.any():
            logger.warning(
                "%d of %d conversations have more tokens than the reward model's %d positions, or "
                "tokens beyond its %d ids: no score",
                *(int(unfit.sum()), len(documents), limit, num_ids),
                extra={"every_rank": True},
            )
            pairs = zip(documents, unfit.tolist(), strict=True)
            documents = [[PAD_ID] if is_unfit else ids for ids, is_unfit in pairs]
        ended = Completion([PAD_ID], [0.0], "stop")
        batch = make_batch(
            [
                prompt._replace(prompt_ids=ids)
                for prompt, ids in zip(prompts, documents, strict=True)
            ],
            [ended] * len(documents),
        )
        with self.model.on_device() as module:
            values = response_values(module, batch, batcher=self.batcher, run=run)  # [B, 1]
        return values[:, 0].masked_fill(unfit, torch.nan)

    def _documents(
        self, prompts: Sequence[Prompt], texts: Sequence[str], mesh: Mesh
    ) -> list[list[int]]:
        """Token ids of every conversation on every rank; each rank tokenizes its share."""
        world_size = mesh.dims.world_size
        pad_token_id = getattr(self.model.hf_config, "pad_token_id", None)

        def share() -> list[np.ndarray]:
            return [
                np.array(
                    until_scored(
                        conversation_ids(self.tokenizer, prompts[i], texts[i]), pad_token_id
                    ),
                    np.int32,
                )
                for i in range(mesh.rank, len(prompts), world_size)
            ]

        parts = together(share, mesh.host_group, InputError, expected=InputError, name_ranks=False)
        return [parts[i % world_size][i // world_size].tolist() for i in range(len(prompts))]


def conversation_ids(tokenizer: "PreTrainedTokenizerBase", prompt: Prompt, text: str) -> list[int]:
    """The prompt's messages and the response as one conversation. Raises InputError."""
    messages = prompt.messages
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    try:
        rendered = render_chat(tokenizer, [*messages, {"role": "assistant", "content": text}])
    except InputError as error:
        raise InputError(f"reward.model, prompt {prompt.uid}: {error}") from error
    [ids] = token_ids(tokenizer, [rendered])
    if not ids:
        raise InputError(f"reward.model, prompt {prompt.uid}: its tokenizer makes no token of it")
    return ids


def until_scored(ids: list[int], pad_token_id: int | None) -> list[int]:
    """The ids up to the token that is scored: the last one that is not the model's padding.

    transformers' classifiers cannot tell padding from a conversation that ends with that token, as
    one does whose end-of-sequence token pads; they are trained and published with that rule.
    """
    end = len(ids)
    while end > 1 and ids[end - 1] == pad_token_id:
        end -= 1
    return ids[:end]


def build_reward_model(config: Config, run: Run) -> RewardModel | None:
    """The reward model, resting on the host; None where functions score alone."""
    role, section = config.models.get("reward model"), config.reward.model
    if role is None:
        return None
    folder = model_folder(role.path, run.mesh, run.dir, classifier=True)
    tokenizer = load_tokenizer(
        folder,
        trust_remote_code=config.model.trust_remote_code,
        custom_chat_template=section.chat_template,
        template_key="reward.model.chat_template",
    )
    options = build_options(config, role)
    options["model_config"] = replace(config.model, path=role.path, override_config={})
    module = build_value_model(folder, run.mesh, needs_head=True, **options)
    model = Model(module=module, device=run.mesh.device, param_offload=True)
    model.rest()
    batcher = make_batcher(config, run.mesh, model, tokens=section.max_token_len_per_gpu)
    return RewardModel(model=model, tokenizer=tokenizer, batcher=batcher)
