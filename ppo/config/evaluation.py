"""The command line of rollout.py.

Owns its options and what --help says. Must not import torch: it is read before.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ppo.config.cli import build_parser, join_values, path

ALL = "all"
"""every complete step of a run"""
DESCRIPTION = """\
Generate from checkpoints, score the samples and write them; every rank runs this program.

    python rollout.py --config ppo.yaml --data data/gsm8k/test.parquet --out untrained.parquet
    torchrun --nproc_per_node=8 rollout.py --config ppo.yaml --checkpoint runs/ppo/first \\
        --data data/gsm8k/test.parquet --out samples.parquet rollout.val_kwargs.n=8
    torchrun --nproc_per_node=8 rollout.py --config ppo.yaml --checkpoint runs/ppo/first \\
        --steps 50,100,150 --data data/gsm8k/test.parquet --out steps.parquet

Prints and writes mean score, pass@k, maj@n and lengths, by data source. Without --checkpoint it is
the untrained model.path that is evaluated.
"""


class Options(NamedTuple):
    """What the command line says."""

    config: str
    overrides: list[str]
    checkpoint: list[Path]
    """run folders, step folders, Hugging Face folders or peft's adapters; none = model.path"""
    steps: list[int] | str | None
    """of the one run folder; `all`; None = its newest checkpoint"""
    data: str
    out: Path
    pass_score: float
    """a sample passes with this score or more"""

    def samples_file(self, label: str | None) -> Path:
        """--out, and for one of several targets the file beside it that has its label."""
        return self.out if label is None else self.out.with_stem(f"{self.out.stem}.{label}")


def parse_options(argv: Sequence[str]) -> Options:
    """Options of rollout.py; what is not an option is an override. Raises ConfigError."""
    parser = build_parser(DESCRIPTION)
    parser.usage = "%(prog)s --config FILE --data FILE --out FILE [options] [key.sub=value ...]"
    checkpoint = "run, step, Hugging Face or peft folder; may be given several times"
    parser.add_argument("--checkpoint", type=path, action="append", default=[], help=checkpoint)
    parser.add_argument("--steps", type=steps, help="steps of a run: all, or 10,20,30")
    parser.add_argument("--data", required=True, help="prompts: parquet or JSONL, or a glob")
    parser.add_argument("--out", required=True, type=path, help="samples: .parquet or .jsonl")
    parser.add_argument("--pass_score", type=float, default=1.0, help="score that counts as passed")
    known, rest = parser.parse_known_args(list(argv))
    return Options(overrides=join_values(rest), **vars(known))


def steps(text: str) -> list[int] | str:
    """The type of --steps."""
    return text if text == ALL else [int(step) for step in text.split(",")]
