"""Checksums of a file block by block: a part of it can be read and checked at once.

Owns the CRC-32 of every BLOCK_BYTES of a file and how they are stored. Must not know what the files
hold.
"""

import zlib
from typing import BinaryIO

from sharding.checkpoint.files import CheckpointError
from sharding.progress import PROGRESS

BLOCK_BYTES = 1 << 20
_DIGITS = 8
"""of one checksum in hexadecimal"""


class BlockChecksums:
    """The checksums of what passes, from the beginning of a file to its end."""

    def __init__(self) -> None:
        self._done: list[int] = []
        self._crc32 = 0
        self._left = BLOCK_BYTES

    def add(self, data: bytes | bytearray | memoryview) -> None:
        """The next bytes of the file."""
        view = memoryview(data).cast("B")
        while len(view) > 0:
            part, view = view[: self._left], view[self._left :]
            self._crc32 = zlib.crc32(part, self._crc32)
            self._left -= len(part)
            if self._left == 0:
                self._done.append(self._crc32)
                self._crc32, self._left = 0, BLOCK_BYTES

    def hex(self) -> str:
        """Eight digits for each block, that of the last, shorter one included."""
        last = [self._crc32] if self._left < BLOCK_BYTES else []
        return "".join(f"{crc32:08x}" for crc32 in [*self._done, *last])


def fits(checksums: str, num_bytes: int) -> bool:
    """Whether these may be the checksums of a file of that size."""
    return len(checksums) == _DIGITS * -(-num_bytes // BLOCK_BYTES)


class CheckedFile:
    """Reads ranges of a file: nothing of it that is not as it was written."""

    def __init__(self, checksums: str):
        self._checksums = checksums
        self._last: tuple[int, bytes] = (-1, b"")

    def read(self, file: BinaryIO, offset: int, length: int) -> bytes:
        """Bytes of a range that lies inside the file.

        Raises:
            CheckpointError: a block of them is not as it was written.
        """
        first, end = offset // BLOCK_BYTES, -(-(offset + length) // BLOCK_BYTES)
        blocks = [memoryview(self._block(file, index)) for index in range(first, end)]
        if blocks:
            blocks[-1] = blocks[-1][: offset + length - (end - 1) * BLOCK_BYTES]
            blocks[0] = blocks[0][offset - first * BLOCK_BYTES :]
        return b"".join(blocks)

    def _block(self, file: BinaryIO, index: int) -> bytes:
        """One block; the last one is kept, since ranges that follow each other share it."""
        if self._last[0] != index:
            file.seek(index * BLOCK_BYTES)
            data = file.read(BLOCK_BYTES)
            PROGRESS.tick()
            written = self._checksums[_DIGITS * index : _DIGITS * (index + 1)]
            if f"{zlib.crc32(data):08x}" != written:
                raise CheckpointError(f"wrong checksum in MiB {index} of the file")
            self._last = index, data
        return self._last[1]
