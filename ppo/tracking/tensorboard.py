"""TensorBoard: event files in the run folder, with a layout of the charts that matter first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ppo.tracking.board import About, Bins

LAYOUT = {
    "1 learning": {
        "reward": ["Multiline", ["critic/score/mean", "critic/rewards/mean"]],
        "validation": ["Multiline", [r"val-core/.*/mean@\d+"]],
        "pass@k": ["Multiline", [r"val-core/.*/pass@\d+"]],
        "response length": ["Margin", [f"response_length/{x}" for x in ("mean", "min", "max")]],
    },
    "2 stability": {
        "KL to the reference": ["Multiline", ["actor/ref_kl", "actor/reward_kl_penalty"]],
        "KL of the update": ["Multiline", ["actor/ppo_kl", "actor/ppo_kl_k3"]],
        "clip share": ["Multiline", ["actor/pg_clipfrac", "critic/vf_clipfrac"]],
        "entropy": ["Multiline", ["actor/entropy"]],
        "explained variance": ["Multiline", ["critic/vf_explained_var"]],
        "gradient norm": ["Multiline", ["actor/grad_norm", "critic/grad_norm"]],
        "trainer against engine": ["Multiline", ["training/rollout_probs_diff_mean"]],
        "guards": ["Multiline", ["guard/.*"]],
    },
    "3 speed": {
        "seconds by phase": ["Multiline", ["timing_s/.*"]],
        "memory by phase, GiB": ["Multiline", ["memory_gib/.*"]],
        "throughput": ["Multiline", ["perf/throughput"]],
        "utilisation": ["Multiline", ["perf/mfu/.*"]],
    },
}
"""charts of the tab Custom Scalars; names of metrics are regular expressions"""


class TensorBoard:
    """Written at once, by the training's own thread: an error is an OSError of the disk."""

    run_id = None

    def __init__(self, about: About) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, one rank needs it

        folder = str(about.folder / "tensorboard")
        self._writer = SummaryWriter(folder, purge_step=about.first_step)
        self._writer.add_custom_scalars(LAYOUT)
        if about.config:
            lines = (f"    {key}: {value}" for key, value in about.config.items())
            self._writer.add_text("config", _valid("\n".join(lines)), about.first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def samples(self, step: int, split: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Text."""
        text = "\n\n---\n\n".join(_as_markdown(row) for row in rows)
        self._writer.add_text(f"samples/{split}", _valid(text), step)

    def histogram(self, step: int, name: str, bins: Bins) -> None:
        """A histogram with TensorBoard's own bins."""
        import numpy as np

        self._writer.add_histogram(name, np.asarray(bins.values), step)

    def close(self, *, failed: bool) -> None:
        """Close the event file."""
        self._writer.close()


def _as_markdown(row: Mapping[str, Any]) -> str:
    """One sample as TensorBoard shows text: indented blocks, so that nothing is interpreted."""
    blocks = [f"**score** {row['score']}"] if "score" in row else []
    for key in ("prompt", "response", "ground_truth"):
        if key in row:
            indented = "\n".join("    " + line for line in str(row[key]).splitlines())
            blocks.append(f"**{key}**\n\n{indented}")
    return "\n\n".join(blocks)


def _valid(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
