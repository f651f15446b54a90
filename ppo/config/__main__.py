"""python -m ppo.config reference > configs/ppo.yaml: every key, as the dataclasses have them.
python -m ppo.config from-verl run.sh > mine.yaml: the same configuration, as it is written here.
"""

import argparse
import sys
from collections.abc import Sequence

from ppo.config.fields import ConfigError, Problem
from ppo.config.migrate import from_openrlhf, from_trl, from_verl
from ppo.config.migrate.given import read_given
from ppo.config.migrate.show import show
from ppo.config.migrate.translate import translate
from ppo.config.reference import reference

FROM = {
    "from-verl": from_verl.dialect,
    "from-trl": from_trl.dialect,
    "from-openrlhf": from_openrlhf.dialect,
}
EPILOG = """\
  python -m ppo.config from-verl run_qwen2-7b.sh > configs/mine.yaml
  python -m ppo.config from-verl base.yaml run.sh NNODES=2 actor.optim.lr=2e-6 > mine.yaml
  python -m ppo.config from-trl --learning_rate 1e-6 --beta 0.04 check.nproc_per_node=8 > mine.yaml
  python -m ppo.config from-openrlhf train_ppo_llama.sh > mine.yaml
  python train_ppo.py --config mine.yaml --check

Words are files (YAML, shell scripts; - is a script on stdin), key=value, --flag value, and
NAME=value in capitals for variables that a script expects; of TRL also the Python file that calls
GRPOConfig(...). Later words win. What has no counterpart is said in comments at the top.
ppo/config/migrate/README.md has the differences.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is asked for; exit code 0, or 2 for a file that cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m ppo.config",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=["reference", *FROM])
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="FILE | key=value | --flag")
    options = parser.parse_args(arguments)
    if options.command == "reference":
        sys.stdout.write(reference())
        return 0
    try:
        given = read_given(options.words, config_classes=from_trl.CONFIG_CLASSES)
        dialect = FROM[options.command](given)
        if not given.keys:
            raise ConfigError(
                [Problem("", None, f"nothing of {dialect.name} is given", "name a file")]
            )
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    found = translate(dialect, given)
    sys.stdout.write(show(found, dialect.name))
    for key, reason in found.gaps.items():
        sys.stderr.write(f"{key}: {reason}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
