"""Checksums of blocks: a range of a file is what was written, or an error."""

import io
import zlib
from itertools import pairwise

import pytest

from sharding.checkpoint.blocks import BLOCK_BYTES, BlockChecksums, CheckedFile, fits
from sharding.checkpoint.files import CheckpointError

CONTENT = bytes(range(256)) * (BLOCK_BYTES // 256 * 2) + b"the end"


def checksums_of(content: bytes, piece: int) -> str:
    checksums = BlockChecksums()
    for start in range(0, len(content), piece):
        checksums.add(content[start : start + piece])
    return checksums.hex()


@pytest.mark.parametrize("piece", [BLOCK_BYTES // 3, BLOCK_BYTES, len(CONTENT)])
def test_there_is_a_checksum_for_every_mib_however_it_was_written(piece: int):
    starts = range(0, len(CONTENT), BLOCK_BYTES)
    blocks = [CONTENT[start : start + BLOCK_BYTES] for start in starts]
    assert checksums_of(CONTENT, piece) == "".join(f"{zlib.crc32(b):08x}" for b in blocks)
    assert checksums_of(CONTENT[:BLOCK_BYTES], piece) == f"{zlib.crc32(blocks[0]):08x}"
    assert checksums_of(b"", piece) == ""


def test_checksums_fit_a_file_of_as_many_blocks():
    assert fits("", 0) and fits("0" * 8, 1) and fits("0" * 8, BLOCK_BYTES)
    assert not fits("", 1) and not fits("0" * 8, BLOCK_BYTES + 1) and not fits("0" * 7, 1)


def test_any_range_is_read_and_what_follows_it_needs_no_block_again():
    class Counted(io.BytesIO):
        num_read = 0

        def read(self, size: int | None = -1) -> bytes:
            data = super().read(size)
            Counted.num_read += len(data)
            return data

    file, checked = Counted(CONTENT), CheckedFile(checksums_of(CONTENT, 1000))
    ends = [0, 1, 700, BLOCK_BYTES, BLOCK_BYTES + 5, 2 * BLOCK_BYTES + 3, len(CONTENT)]
    for start, end in pairwise(ends):
        assert checked.read(file, start, end - start) == CONTENT[start:end]
    assert Counted.num_read == len(CONTENT)
    assert checked.read(file, 5, BLOCK_BYTES) == CONTENT[5 : BLOCK_BYTES + 5]
    assert checked.read(file, 5, 0) == b""


@pytest.mark.parametrize("where", [0, BLOCK_BYTES, len(CONTENT) - 1])
def test_a_range_with_one_wrong_bit_or_an_end_too_soon_is_an_error(where: int):
    wrong = bytearray(CONTENT)
    wrong[where] ^= 1
    checksums = checksums_of(CONTENT, len(CONTENT))
    for content in (bytes(wrong), CONTENT[:where]):
        with pytest.raises(CheckpointError, match=f"wrong checksum in MiB {where // BLOCK_BYTES}"):
            CheckedFile(checksums).read(io.BytesIO(content), max(where - 3, 0), 4)
