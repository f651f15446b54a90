"""Builds the engine that rollout.engine asks for."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ppo.config import Config
from ppo.engines.contract import Engine
from ppo.engines.sglang.stall import end_process
from ppo.errors import InputError
from ppo.model_shapes import rope_problem, sglang_problem
from ppo.models.wrapped import language_model_folder
from sharding.agree import together
from sharding.mesh import Mesh

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)


def build_engine(
    config: Config,
    mesh: Mesh,
    module: nn.Module,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    model_path: Path,
    run_dir: Path,
    give_up: Callable[[str], object] = end_process,
) -> Engine:
    """The engine of `rollout.engine` for the weights of `module`, asleep. Collective.

    `module` is the sharded actor with its Hugging Face `config`; model_path is the folder that has
    this configuration as a file, run_dir takes the engine's log, and give_up is called from another
    thread, told why, when an engine in this process hangs: it ends the process.
    Raises InputError where engine and trainer would not see a sequence alike.
    """
    kind = config.rollout.engine_kind(cuda=mesh.device.type == "cuda")
    hf_config: Any = module.config
    keys, longest = hf_config.to_dict(), config.data.longest_sampled
    if problem := rope_problem(keys, longest):
        raise InputError(f"model.path = {config.model.path}: {problem}")
    on_cpu = mesh.device.type == "cpu"
    if kind == "sglang" and (problem := sglang_problem(keys, longest, on_cpu=on_cpu)):
        raise InputError(f"rollout.engine = {kind}: {problem}")
    if config.rollout.engine == "auto":
        logger.info("rollout.engine=auto: %s", kind)
    match kind:  # an engine is imported where it is asked for
        case "sglang":
            logger.info("importing and starting SGLang; logs/ of the run has what it says")
            from ppo.engines.sglang.engine import SGLangEngine

            logs = run_dir / "logs"
            if getattr(module, "wrapper", None) is not None:
                model_path = _language_model(model_path, hf_config, run_dir, mesh)
            return SGLangEngine(
                *(config, mesh, module),
                model_path=str(model_path),
                log_dir=logs,
                give_up=give_up,
            )
        case "torch":
            from ppo.engines.embedded.engine import TorchEngine
            from ppo.engines.embedded.verify import CacheKind, choose_cache

            trust = config.model.trust_remote_code

            def ask() -> CacheKind | None:
                if mesh.rank != 0:
                    return None
                return choose_cache(
                    module.config,
                    compare=config.model.verify_forward,
                    num_ranks=mesh.dims.rollout_tp,
                    trust_remote_code=trust,
                )

            kinds = together(
                ask, mesh.host_group, InputError, expected=InputError, name_ranks=False
            )
            assert kinds[0] is not None
            return TorchEngine(
                module, mesh, tokenizer, config.rollout, cache=kinds[0], trust_remote_code=trust
            )


def _language_model(whole: Path, hf_config: Any, run_dir: Path, mesh: Mesh) -> Path:
    """The folder in which an engine finds the language model of a multimodal one. Collective."""
    folder = run_dir / "language_model"

    def write() -> None:
        if mesh.rank == 0:
            language_model_folder(whole, hf_config, folder)

    together(write, mesh.host_group)
    return folder
