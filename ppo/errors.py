"""What ends a run and is no fault of the program: wrong input of the user, a request to stop.

Owns the classes that every room knows. Must not import anything: reward processes and `--check` use
it too.
"""


class InputError(ValueError):
    """Configuration, data, weights or files are not as they must be; the message says it all,
    instead of a traceback, and the exit code is 2."""


class StopRequested(Exception):
    """The run is to stop now and be resumed later; raised on every rank at once."""
