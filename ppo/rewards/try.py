"""python -m ppo.rewards.try FUNCTION_FILE --data FILE: a reward on real rows, before training.

A program that nobody imports; what it does is in ppo/check/try_reward.py.
"""

import sys

from ppo.check.try_reward import main

if __name__ == "__main__":
    sys.exit(main())
