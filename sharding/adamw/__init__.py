"""AdamW with its moments in fewer bits, and on the host."""

from sharding.adamw.host import HostAdamW
from sharding.adamw.narrow import EIGHT_BITS, SCALE, NarrowAdamW, round_to_bfloat16

__all__ = ["EIGHT_BITS", "SCALE", "HostAdamW", "NarrowAdamW", "round_to_bfloat16"]
