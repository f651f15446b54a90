"""The prompts of a split in a file without a name, which the processes of a machine share.

Owns how rows and token ids lie in the file, and how another process maps it. Must not know how a
row is read or becomes tokens.

    rows, pickled | token ids, int32 | int64: ends of rows and prompts, rows and kinds of prompts

The file is in the folder for temporary files (TMPDIR), so the memory that it takes is page cache,
which the system takes back when memory is short. Without a name nothing is left of it when the last
process that maps it ends, in whatever way. Rows are pickled because any value of a parquet file
must come back as it was; nobody but this run can write to the file.
"""

import itertools
import mmap
import os
import pickle
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BufferedRandom, RawIOBase
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np

from ppo.data.columns import Sample
from ppo.data.facts import Facts
from ppo.errors import InputError

BUFFER_BYTES = 2**20


class Place(NamedTuple):
    """Where the processes of this machine find a table, and what lies where in it."""

    process: int
    file: int
    """descriptor, in that process"""
    num_rows: int
    ids_at: int
    """byte of the file at which the token ids begin"""
    arrays_at: int
    """byte of the file at which the arrays begin"""
    facts: Facts


class Table:
    """Rows and token ids of prompts, mapped."""

    def __init__(self, place: Place, file: RawIOBase | BinaryIO) -> None:
        """file: of `place`, opened in this process."""
        self.place = place
        self.file = file
        """stays open where the table was written, so that other processes can open it"""
        self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        num_ids = (place.arrays_at - place.ids_at) // 4
        self._ids = np.frombuffer(self._bytes, np.int32, num_ids, place.ids_at)
        arrays = np.frombuffer(self._bytes, np.int64, offset=place.arrays_at)
        number = place.facts.num_prompts
        ends = np.cumsum([place.num_rows + 1, number + 1, number])
        self._row_ends, self._ends, self._rows, self.kinds = np.split(arrays, ends)

    @classmethod
    def at(cls, place: Place) -> "Table":
        """The table of another process of this machine.

        Raises InputError where that process cannot be seen.
        """
        try:
            with open(f"/proc/{place.process}/fd/{place.file}", "rb") as file:
                return cls(place, file)
        except OSError as error:
            raise InputError(
                f"the prompts that process {place.process} has read cannot be shared: {error}; the "
                "ranks of a node must see each other in /proc"
            ) from error

    def number(self, index: int) -> int:
        """Which of all rows a prompt is."""
        return int(self._rows[index])

    def row(self, index: int) -> Any:
        """The row of a prompt, as it was added."""
        number = self._rows[index]
        return pickle.loads(self._bytes[self._row_ends[number] : self._row_ends[number + 1]])

    def ids(self, index: int) -> list[int]:
        """Token ids of a prompt."""
        return self._ids[self._ends[index] : self._ends[index + 1]].tolist()


class TableWriter:
    """Writes a table: first all rows, then the token ids of those that are prompts.

    Raises InputError: the file cannot be written.
    """

    def __init__(self) -> None:
        with _naming_folder():
            file = tempfile.TemporaryFile(prefix="prompts-", buffering=BUFFER_BYTES)  # noqa: SIM115
        self._file = cast(BufferedRandom, file)
        self._size = self._ids_at = 0
        self._row_ends, self._ends = array("q", [0]), array("q", [0])
        self._rows, self._kinds = array("q"), array("q")
        self._facts = Facts()

    @property
    def num_rows(self) -> int:
        """Rows that were added."""
        return len(self._row_ends) - 1

    @property
    def num_prompts(self) -> int:
        """Prompts that were added."""
        return len(self._rows)

    def add_row(self, row: Any) -> None:
        """The next row: anything that survives pickling."""
        self._write(pickle.dumps(row, pickle.HIGHEST_PROTOCOL))
        self._row_ends.append(self._size)

    def rows(self) -> Iterator[Any]:
        """All rows, once no more are added; meanwhile prompts may be."""
        with _naming_folder():
            self._file.flush()
        self._ids_at = self._size
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as written:
            for start, end in itertools.pairwise(self._row_ends):
                yield pickle.loads(written[start:end])

    def add_prompt(self, row: int, sample: Sample, ids: Sequence[int], file: str) -> None:
        """This row, of that file, is the next prompt."""
        self._write(array("i", ids))
        self._ends.append(self._ends[-1] + len(ids))
        self._rows.append(row)
        self._kinds.append(self._facts.add(sample, len(ids), file))

    def finish(self) -> Table:
        """The table, with a prompt at least."""
        arrays_at = self._size
        for part in (self._row_ends, self._ends, self._rows, self._kinds):
            self._write(part)
        place = Place(
            process=os.getpid(),
            file=self._file.fileno(),
            num_rows=self.num_rows,
            ids_at=self._ids_at,
            arrays_at=arrays_at,
            facts=self._facts,
        )
        with _naming_folder():
            return Table(place, self._file.detach())  # without its buffer

    def _write(self, data: bytes | array) -> None:
        with _naming_folder():
            self._file.write(data)
        self._size += len(data) * (data.itemsize if isinstance(data, array) else 1)


@contextmanager
def _naming_folder() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{tempfile.tempdir or 'temporary files'}: the prompts cannot be kept there: "
            f"{error.strerror}; TMPDIR names another folder, on a disk of each node"
        ) from error
