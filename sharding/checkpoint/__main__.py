"""A checkpoint's model as a folder for transformers, SGLang and vLLM.

python -m sharding.checkpoint export runs/ppo/first models/mine            # the newest
python -m sharding.checkpoint export runs/ppo/first/checkpoints/step_00000100 models/step100
python -m sharding.checkpoint export runs/ppo/first models/value --model critic --dtype float32
python -m sharding.checkpoint export runs/ppo/lora models/adapter --adapter
"""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from sharding.checkpoint.export import export_hf
from sharding.checkpoint.files import CheckpointError


def main(argv: Sequence[str] | None = None) -> None:
    """The command; a problem is one message and exit code 2."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        export_hf(
            arguments.checkpoint,
            arguments.out,
            model=arguments.model,
            dtype=getattr(torch, arguments.dtype) if arguments.dtype else None,
            adapter=arguments.adapter,
            base=arguments.base,
        )
    except (CheckpointError, OSError) as error:
        parser.exit(2, f"{error}\n")


def _parser() -> argparse.ArgumentParser:
    layout = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(prog="python -m sharding.checkpoint", **layout)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    export = commands.add_parser("export", help="write a Hugging Face folder", **layout)
    export.add_argument("checkpoint", type=Path, help="run folder, or one of its checkpoints")
    export.add_argument("out", type=Path, help="new folder")
    export.add_argument("--model", default="actor", help="actor or critic (actor)")
    dtypes = ["float32", "bfloat16", "float16"]
    export.add_argument("--dtype", choices=dtypes, help="of the weights (as saved)")
    export.add_argument("--adapter", action="store_true", help="adapters alone, as peft has them")
    around = "folder of the model under adapters, or around the trained one (as trained)"
    export.add_argument("--base", type=Path, help=around)
    return parser


if __name__ == "__main__":
    main()
