"""Wrong input of the user, wherever it is found: one message instead of a traceback, exit code 2.

Owns the base class. Must not import anything: reward processes and `--check` use it too.
"""


class InputError(ValueError):
    """Configuration, data, weights or files are not as they must be; the message says it all."""
