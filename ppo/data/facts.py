"""What is known of all prompts of a split without going through them again.

Owns what a start asks about every prompt. Must not know where prompts are kept.
"""

import glob
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import NamedTuple

from ppo.data.columns import Sample
from ppo.data.rows import DataError


class Kind(NamedTuple):
    """Where prompts come from."""

    file: str
    """empty: of a dataset class of the user"""
    source: str

    def is_meant_by(self, name: str) -> bool:
        """Whether a name of data.mix is its data source, or names its file."""
        if name == self.source:
            return True
        name = os.path.expanduser(name)
        if not self.file:
            return False
        return os.path.realpath(name) == os.path.realpath(self.file) or (
            glob.has_magic(name) and fnmatch(self.file, name)
        )

    def __str__(self) -> str:
        where = f" in {self.file}" if self.file else ""
        return f"data source {self.source!r}{where}"


def kinds_by_name(kinds: Sequence[Kind], names: Iterable[str]) -> dict[str, list[int]]:
    """The numbers of the kinds that each name of data.mix means.

    Raises DataError: a name means none, two mean the same, or a kind has no name.
    """
    owner: dict[int, str] = {}
    for name in names:
        found = [number for number, kind in enumerate(kinds) if kind.is_meant_by(name)]
        if not found:
            sources = ", ".join(map(repr, sorted({kind.source for kind in kinds})))
            problem = "neither a data source nor a file of the training prompts"
            raise DataError(f"data.mix.{name}", f"{problem}; the data sources are {sources}")
        for number in found:
            if number in owner:
                problem = f"means {kinds[number]}, as data.mix.{owner[number]} does"
                raise DataError(f"data.mix.{name}", problem)
            owner[number] = name
    left = [kind for number, kind in enumerate(kinds) if number not in owner]
    if left:
        problem = f"has no weight for {left[0]}; 0 leaves prompts out"
        raise DataError("data.mix", problem)
    return {name: [number for number in owner if owner[number] == name] for name in names}


@dataclass
class Facts:
    """Prompts are counted from 0, in their order."""

    num_prompts: int = 0
    num_tokens: int = 0
    checksum: int = 0
    """CRC-32 of what the prompts ask and of their answers, in their order"""
    columns: set[str] = field(default_factory=set)
    """keys of extra_info, of any prompt"""
    first_of_source: dict[str, int] = field(default_factory=dict)
    """the first prompt of each data source"""
    kinds: dict[Kind, int] = field(default_factory=dict)
    """the kinds of prompts there are, numbered from 0"""
    num_null_truths: int = 0
    first_null_truth: int = 0
    """of prompts without a ground truth, where there are any"""

    def add(self, sample: Sample, num_tokens: int, file: str = "") -> int:
        """Take note of the next prompt; the number of its kind."""
        text = repr((sample.messages, sample.ground_truth))
        self.checksum = zlib.crc32(text.encode("utf-8", "backslashreplace"), self.checksum)
        self.columns |= sample.extra_info.keys()
        self.first_of_source.setdefault(sample.data_source, self.num_prompts)
        if sample.ground_truth is None:
            if self.num_null_truths == 0:
                self.first_null_truth = self.num_prompts
            self.num_null_truths += 1
        self.num_prompts += 1
        self.num_tokens += num_tokens
        return self.kinds.setdefault(Kind(file, sample.data_source), len(self.kinds))
