"""Rules about settings that save memory: which of them exclude each other.

Owns what cannot work together. What has no effect is said in ppo/check/warnings.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from ppo.config import Config, Problem


def sparing_problems(config: Config) -> Iterator[Problem]:
    """Settings of which one has to go."""
    model = config.model
    if model.enable_activation_offload and model.policy == "selective":
        yield Problem(
            "model.enable_activation_offload",
            True,
            "moves the inputs of layers, and selective keeps more than those on the device",
            "set model.checkpoint_policy=full",
        )
    if model.compile == "layers" and (model.policy == "selective" or model.mlp_block_rows):
        key = "mlp_block_rows" if model.mlp_block_rows else "checkpoint_policy"
        yield Problem(
            f"model.{key}",
            getattr(model, key),
            "cannot look into compiled layers (model.compile = layers)",
            "set one of them otherwise",
        )
    codes = [
        name
        for name in ("actor", "critic")
        if name in config.models and getattr(config, name).optim.state_dtype == "8bit"
    ]
    if codes and config.parallel.align_to_rollout:
        yield Problem(
            f"{codes[0]}.optim.state_dtype",
            "8bit",
            "has a scale for 256 numbers of a row, and parallel.align_to_rollout cuts rows",
            "set one of them otherwise",
        )
