"""python -m sharding.checkpoint export CHECKPOINT_OR_RUN OUT"""

import argparse
import logging
from pathlib import Path

import torch

from sharding.checkpoint.export import export_hf
from sharding.checkpoint.files import CheckpointError


def main() -> None:
    """Command line; see the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m sharding.checkpoint")
    export = parser.add_subparsers(required=True).add_parser(
        "export", help="write a Hugging Face folder"
    )
    export.add_argument("checkpoint", type=Path)
    export.add_argument("out", type=Path)
    export.add_argument("--model", default="actor")
    export.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        export_hf(
            arguments.checkpoint,
            arguments.out,
            model=arguments.model,
            dtype=getattr(torch, arguments.dtype) if arguments.dtype else None,
        )
    except (CheckpointError, OSError) as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
