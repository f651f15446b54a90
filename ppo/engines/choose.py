"""The engine that rollout.engine asks for."""

import importlib.util
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ppo.config import Config
from ppo.engines.contract import Engine
from sharding.mesh import Mesh

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)


def build_engine(
    config: Config,
    mesh: Mesh,
    model_path: Path,
    tokenizer: "PreTrainedTokenizerBase",
    run_dir: Path,
    *,
    module: Any,
) -> Engine:
    """The engine of `rollout.engine`; auto is SGLang where there are CUDA and sglang.

    `module` is the sharded actor with its Hugging Face `config`; model_path is the folder that has
    this configuration as a file, and run_dir takes the engine's log. Collective.
    """
    rollout = config.rollout
    kind = rollout.engine
    if kind == "auto":
        found = mesh.device.type == "cuda" and importlib.util.find_spec("sglang") is not None
        kind = "sglang" if found else "torch"
        logger.info("rollout.engine=auto: %s", kind)
    if kind == "sglang":
        from ppo.engines.sglang.engine import SGLangEngine

        logs = run_dir / "logs"
        return SGLangEngine(config, mesh, module, model_path=str(model_path), log_dir=logs)
    from ppo.engines.embedded.engine import TorchEngine

    return TorchEngine(
        module.config,
        mesh,
        tokenizer,
        dtype=getattr(torch, rollout.dtype),
        max_model_len=rollout.max_model_len,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        reshard_bucket_mib=rollout.reshard_bucket_mib,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        verify_weights=_verify_every(rollout.verify_weights),
        trust_remote_code=config.model.trust_remote_code,
    )


def _verify_every(verify_weights: str | int) -> int:
    """rollout.verify_weights as a number of wakes; "first" is once in any run."""
    words = {"never": 0, "first": sys.maxsize}
    return words[verify_weights] if isinstance(verify_weights, str) else verify_weights
