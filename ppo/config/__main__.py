"""python -m ppo.config reference > configs/ppo.yaml: every key, as the dataclasses have them."""

import argparse
import sys

from ppo.config.reference import reference


def main() -> int:
    """Print what is asked for; exit code 0."""
    parser = argparse.ArgumentParser(prog="python -m ppo.config", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("reference", help="configs/ppo.yaml, from the dataclasses, to stdout")
    parser.parse_args()
    sys.stdout.write(reference())
    return 0


if __name__ == "__main__":
    sys.exit(main())
