"""What is known of all prompts of a split without going through them again.

Owns what a start asks about every prompt. Must not know where prompts are kept.
"""

import zlib
from dataclasses import dataclass, field
from typing import NamedTuple

from ppo.data.columns import Sample


class Kind(NamedTuple):
    """Where prompts come from."""

    file: str
    """empty: of a dataset class of the user"""
    source: str


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
