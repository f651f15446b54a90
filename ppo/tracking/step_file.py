"""A file of JSON lines, each of a step: appended to whole, cut back, read again after a crash.

Owns the lines. Must not know what they say.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ppo.files import new_file


class Line(NamedTuple):
    """One line of the file."""

    number: int
    """from 1"""
    content: bytes
    step: int | None
    """None: no line of ours"""


class StepFile:
    """Lines {"step": 3, ...}; what finds no room on the disk waits for the next one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: list[bytes] = []
        """lines that could not be written yet"""

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row, after those that wait; all or none. Raises OSError, and it waits too."""
        self.waiting.append(json_line(row))
        self.write_waiting()

    def amend(self, row: Mapping[str, Any]) -> None:
        """Add to what the last row says of the same step; where it is of another, append.

        Raises OSError.
        """
        lines = list(lines_of(self.read()))
        if not lines or lines[-1].step != row["step"]:
            return self.add(row)
        last = json.loads(lines.pop().content)
        self.rewrite(b"".join([*(line.content for line in lines), json_line(last | dict(row))]))

    def write_waiting(self) -> None:
        """Append what waits. Raises OSError."""
        with self.path.open("ab", buffering=0) as file:
            size, rest = file.seek(0, os.SEEK_END), memoryview(b"".join(self.waiting))
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                file.truncate(size)  # half a row would be glued to the next one
                raise
        self.waiting.clear()

    def mark(self, after: int, entry: tuple[str, Any]) -> None:
        """Add the entry to the rows of all steps after that one. Raises OSError."""
        if self.waiting:
            self.write_waiting()
        lines = lines_of(self.read())
        self.rewrite(b"".join(_marked(line, after, entry) for line in lines))

    def rewrite(self, content: bytes) -> None:
        """Replace the file, unless it is this already."""
        if content != self.read():
            with new_file(self.path) as beside:
                beside.write_bytes(content)

    def read(self) -> bytes:
        """The whole file; empty where there is none."""
        return self.path.read_bytes() if self.path.exists() else b""


def lines_of(content: bytes) -> Iterator[Line]:
    """The lines, but for a last one that a crash has cut off."""
    for number, line in enumerate(content.splitlines(keepends=True), 1):
        try:
            row = json.loads(line)
            step = row["step"] if isinstance(row, dict) else None
        except (ValueError, KeyError, RecursionError):
            step = None
        step = step if type(step) is int else None
        if line.endswith(b"\n"):
            yield Line(number, line, step)
        elif step is not None:
            yield Line(number, line + b"\n", step)


def _marked(line: Line, after: int, entry: tuple[str, Any]) -> bytes:
    if line.step is None or line.step <= after:
        return line.content
    return json_line(json.loads(line.content) | dict([entry]))


def json_line(row: Mapping[str, Any]) -> bytes:
    """One line of JSON; half of a surrogate pair, which UTF-8 does not know, is escaped."""
    try:
        return json.dumps(dict(row), ensure_ascii=False, default=str).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(dict(row), default=str).encode() + b"\n"
