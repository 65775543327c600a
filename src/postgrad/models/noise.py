"""Sampling noise without a random number generator: one uniform per sampled token, a pure function of the token's place.

    u = BLAKE2b(seed, step, prompt, sample, turn, position)  read as a number in [0, 1)

1. Nothing is stored: a resumed run, a smaller batch or another order of requests draws the same numbers.
2. Rollouts, turns and positions get unrelated numbers: a cryptographic hash has no streams that could overlap.
3. One number a token is all that inverse-CDF sampling needs (`torch.multinomial` draws one for every vocabulary entry).
"""

from __future__ import annotations

import struct
from hashlib import blake2b

from postgrad.protocols import SampleKey

_PERSON = b"postgrad-sample"
_UNIT = 2.0**-53
"""Spacing of the 2^53 values a draw can take: every one of them is an exact double below 1."""


class TurnNoise:
    """The uniforms of one turn of one rollout: `at(position)` for the position-th token that the turn samples.

    >>> noise = TurnNoise(SampleKey(seed=0, step=1, prompt=2, sample=3), turn=0)
    >>> noise.at(5) == noise.at(5), noise.at(5) == noise.at(6)
    (True, False)
    """

    __slots__ = ("_keyed",)

    def __init__(self, key: SampleKey, turn: int) -> None:
        identity = struct.pack("<5q", key.seed, key.step, key.prompt, key.sample, turn)
        self._keyed = blake2b(identity, digest_size=8, person=_PERSON)

    def at(self, position: int) -> float:
        """The position-th draw: a multiple of 2^-53 in [0, 1)."""
        place = self._keyed.copy()
        place.update(struct.pack("<q", position))
        return float(int.from_bytes(place.digest(), "little") >> 11) * _UNIT
