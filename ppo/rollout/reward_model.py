"""A reward model scores conversations, which its own tokenizer and chat template read.

Owns how a conversation becomes the documents of a forward pass and its scores one number each.
Must not know engines, advantages or what else scores a sample.
"""

import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ppo.batch.packing import PAD_ID, Batcher, make_batcher
from ppo.batch.samples import Samples
from ppo.batch.shares import overview_of, owners_of, share_out
from ppo.config import Config
from ppo.data.dataset import Prompt
from ppo.data.tokenizer import load_tokenizer, render_chat, token_ids
from ppo.engines.contract import Completion, Completions
from ppo.errors import InputError
from ppo.forward_passes import response_values
from ppo.models.build import build_value_model
from ppo.models.folder import model_folder
from ppo.models.learner import Model
from ppo.models.roles import build_options
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

    def score(self, samples: Samples, run: Run) -> Tensor:
        """The logit of each conversation here, prompt and response: [b] float32 on the host.

        A document is scored at its last token, as transformers' classifiers do. That is the value
        of the state before one more token, so one is put behind it; attention is causal. NaN for a
        conversation that leaves it no position (max_position_embeddings), or with a token that the
        model does not know.

        A stop request ends the pass. Collective.
        """
        mesh = run.mesh
        documents, unfit = self._fitting(self._documents(samples, mesh))
        prompts = [samples.prompts[number // samples.n] for number in range(samples.total)]
        for number, ids in zip(samples.numbers, documents, strict=True):
            prompts[number] = prompts[number]._replace(prompt_ids=ids)
        ended = Samples(
            prompts=prompts,
            n=1,
            numbers=samples.numbers,
            completions=Completions.of([Completion([PAD_ID], [0.0], "stop")] * len(samples)),
            texts=samples.texts,
        )
        overview, holders = overview_of(ended, mesh)
        owners = owners_of(overview, [list(range(samples.total))], self.batcher.budget)
        batch = share_out(ended, overview, holders, owners, mesh)
        with self.model.on_device() as module:
            values = response_values(module, batch, batcher=self.batcher, run=run)  # [b', 1]
        scores = torch.zeros(samples.total)
        scores[batch.rows] = values.reshape(-1)
        dist.all_reduce(scores, group=mesh.dp_group)  # one rank has each score, others zeros
        return scores[samples.numbers].masked_fill(unfit, torch.nan)

    def _fitting(self, documents: list[list[int]]) -> tuple[list[list[int]], Tensor]:
        """Documents that the model can take, one token for those that it cannot, and which.

        The token behind a document has a position too.
        """
        limit = getattr(self.model.hf_config, "max_position_embeddings", None) or sys.maxsize
        num_ids = self.model.hf_config.vocab_size
        unfit = torch.tensor(
            [len(ids) >= limit or max(ids) >= num_ids for ids in documents], dtype=torch.bool
        )
        if unfit.any():
            logger.warning(
                "%d of %d conversations leave none of the reward model's %d positions, or have "
                "tokens beyond its %d ids: no score",
                *(int(unfit.sum()), len(documents), limit, num_ids),
                extra={"every_rank": True},
            )
        pairs = zip(documents, unfit.tolist(), strict=True)
        return [[PAD_ID] if is_unfit else ids for ids, is_unfit in pairs], unfit

    def _documents(self, samples: Samples, mesh: Mesh) -> list[list[int]]:
        """Token ids of the conversations here. Raises InputError on every rank."""
        pad_token_id = getattr(self.model.hf_config, "pad_token_id", None)
        found = []

        def tokenize() -> None:
            for index, text in enumerate(samples.texts):
                ids = conversation_ids(self.tokenizer, samples.prompt(index), text)
                found.append(until_scored(ids, pad_token_id))

        together(tokenize, mesh.host_group, InputError, expected=InputError, name_ranks=False)
        return found


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
    module = build_value_model(folder, run.mesh, needs_head=True, **options)
    model = Model(module=module, device=run.mesh.device, param_offload=True)
    model.rest()
    batcher = make_batcher(config, run.mesh, model, tokens=section.max_token_len_per_gpu)
    return RewardModel(model=model, tokenizer=tokenizer, batcher=batcher)
