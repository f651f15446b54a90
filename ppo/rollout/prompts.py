"""The prompts of a run, read once on every node.

Owns who reads them, how the ranks of a node come to share them, and what is said meanwhile. Must
not know how a row becomes a prompt.
"""

import logging
import sys
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from ppo.config import Config
from ppo.data.dataset import PromptDataset, Prompts, custom_dataset, facts_of
from ppo.data.prompts import PromptSets, shared_ids
from ppo.data.reading import Split, read_prompts
from ppo.data.table import Table
from ppo.data.tokenizer import (
    PROBE,
    load_tokenizer,
    read_tokenizer,
    token_difference,
    token_ids,
)
from ppo.errors import InputError
from ppo.models.folder import model_folder
from ppo.models.hf_config import vocabulary_of
from ppo.rollout.figures import metric_head
from ppo.run.run import Run
from sharding.agree import gather, raise_everywhere, together

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

T = TypeVar("T")
STEP_S = 0.5
"""seconds of work between two polls"""
TELL_S = 30.0
"""seconds between two lines of the log, where no terminal shows the bar"""


def open_prompts(config: Config, run: Run) -> PromptSets:
    """The prompts of a run for its model: `load_prompts`. Collective."""
    logger.info("importing transformers, and reading the tokenizer and the prompts")
    folder = model_folder(config.model.path, run.mesh, run.dir)
    vocabulary = vocabulary_of(folder, config.model)
    tokenizer_folder = model_folder(config.model.tokenizer_path, run.mesh, run.dir)
    return load_prompts(config, run, tokenizer_folder, vocabulary=vocabulary)


def load_prompts(
    config: Config, run: Run, tokenizer_folder: Path, *, vocabulary: int | None = None
) -> PromptSets:
    """The tokenizer, loaded by every rank, and the prompts, which one rank of each node reads.

    Collective. A dataset class of the user is built by every rank.

    Args:
        vocabulary: token ids of the model, where they are known; a prompt may have no other.

    Raises on all ranks:
        InputError: tokenizer or data are not as they must be, or not the same on every node.
        RuntimeError: a dataset class of the user raised something else.
        StopRequested: a stop is requested.
    """
    tokenizer = _drive(
        run,
        _at_once(
            lambda: load_tokenizer(
                tokenizer_folder,
                trust_remote_code=config.model.trust_remote_code,
                custom_chat_template=config.model.custom_chat_template,
            )
        ),
    )
    train = _load(config, run, "data.train_files", tokenizer, vocabulary)
    val = {
        name: _load(
            config,
            run,
            f"data.val_sets.{name}.files" if name else "data.val_files",
            tokenizer,
            vocabulary,
        )
        for name in config.val_sets
    }
    check_metric_names(val)
    return PromptSets(tokenizer, train, val, shared_ids(tokenizer, vocabulary))


def check_tokenizer_of_ref(config: Config, run: Run, prompts: PromptSets) -> None:
    """Another model as reference must know each id as the token that it is. Collective.

    Raises InputError on all ranks.
    """
    role = config.models.get("ref")
    if role is None or role.path in (config.model.path, config.model.tokenizer_path):
        return
    folder = model_folder(role.path, run.mesh, run.dir)

    def check() -> None:
        if run.mesh.rank != 0:
            return
        trusted = config.model.trust_remote_code
        other = read_tokenizer(folder, trust_remote_code=trusted)
        own = prompts.tokenizer
        problem = token_difference(own.get_vocab(), other.get_vocab(), prompts.num_ids)
        if problem is None and token_ids(own, [PROBE]) != token_ids(other, [PROBE]):
            problem = f"they cut {PROBE!r} differently"
        if problem is not None:
            raise InputError(
                f"{role.path_key} = {role.path}: its tokenizer is not that of "
                f"{config.model.tokenizer_path}: {problem}; use a model with the same tokenizer"
            )

    together(check, run.mesh.host_group, InputError, expected=InputError, name_ranks=False)


def check_metric_names(val: Mapping[str, Prompts]) -> None:
    """Raise InputError where the metrics of two sets would have the same names."""
    found: dict[str, str] = {}
    for name, prompts in val.items():
        for source in facts_of(prompts).first_of_source:
            head = metric_head(name, source)
            if found.setdefault(head, name) != name:
                raise InputError(
                    f"data.val_sets.{name}: its metrics val-core/{head}/... are those of the data "
                    f"source {head!r} of data.val_files too; give the set another name"
                )


def _load(
    config: Config,
    run: Run,
    key: str,
    tokenizer: "PreTrainedTokenizerBase",
    vocabulary: int | None,
) -> Prompts:
    """The prompts of the files that a key names. Collective."""
    data, files = config.data, config.prompt_files[key]
    split: Split = "train" if key == "data.train_files" else "val"
    if data.custom_cls.path is not None:

        def build() -> Prompts:
            prompts = custom_dataset(files, tokenizer, data, split=split, vocabulary=vocabulary)
            if split == "train":
                return prompts
            return [prompts[index] for index in range(len(prompts))]  # the same at every validation

        return _drive(run, _at_once(build))
    steps = read_prompts(
        files,
        tokenizer,
        data,
        split=split,
        need_data_source=config.needs_data_source,
        vocabulary=vocabulary,
    )
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return _read_once(run, steps, key, f"{files[0]}{more}")


def _read_once(
    run: Run, steps: Generator[float, None, Table], key: str, label: str
) -> PromptDataset:
    """The prompts that local rank 0 reads, mapped by each rank of its node. Collective."""
    mesh, start = run.mesh, time.monotonic()
    work = _paced(steps, label) if mesh.local_rank == 0 else _at_once(lambda: None)
    mine = _drive(run, work, "prompts")
    place = gather(mine and mine.place, mesh.node_group)[0]
    assert place is not None
    table = _drive(run, _at_once(lambda: mine or Table.at(place)))
    facts = place.facts
    told = gather((facts.num_prompts, facts.checksum), mesh.host_group)
    if len(set(told)) > 1:
        counts = ", ".join(str(count) for count, _ in told[:: mesh.dims.ranks_per_node])
        raise InputError(
            f"{key}: the nodes have different prompts under these names ({counts}): "
            "every node must read the same files"
        )
    logger.info(
        "%s: %d prompts of %.0f tokens on average, read and tokenized in %.1f s",
        *(label, facts.num_prompts, facts.num_tokens / facts.num_prompts),
        time.monotonic() - start,
    )
    return PromptDataset.of(table)


def _paced(steps: Generator[float, None, T], label: str) -> Generator[float, None, T]:
    """The same steps, but one for STEP_S seconds of them; how far they are goes into the log."""
    yielded = told = time.monotonic()
    while True:
        try:
            done = next(steps)
        except StopIteration as end:
            return end.value
        now = time.monotonic()
        if now - told >= TELL_S and not sys.stderr.isatty():
            told = now
            is_share = isinstance(done, float)
            far = f"{done:.0%} tokenized" if is_share else f"{done} rows read"
            logger.info("%s: %s", label, far)
        if now - yielded >= STEP_S:
            yielded = now
            yield done


def _at_once(call: Callable[[], T]) -> Generator[float, None, T]:
    """One step."""
    return call()
    yield 0.0


def _drive(run: Run, steps: Generator[float, None, T], label: str = "") -> T:
    """What the steps return here; an InputError of any rank is raised on all. Collective."""

    def work() -> Generator[float, None, tuple[T | None, InputError | None]]:
        try:
            return (yield from steps), None
        except InputError as error:
            return None, error

    result, error = run.drive(work(), label=label)
    raise_everywhere(error, run.mesh.host_group, InputError, name_ranks=False)
    return cast("T", result)
