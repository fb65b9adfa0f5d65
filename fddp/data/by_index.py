"""A permutation computed by index: any part of it, in any order, without memory for the rest.

A generalized Feistel network permutes the pairs (left, right) of a grid of a × b ≥ rows cells, with
a and b near √rows: each round adds a hash of one half to the other half, modulo its side. A cell
beyond the rows is passed through the network again until it is a row (cycle walking); less than
one in √rows is.

Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002); the hash is the finalizer
of Steele et al., "Fast Splittable Pseudorandom Number Generators" (2014).
"""

from math import isqrt

import numpy as np
from jaxtyping import Int, UInt

ROUNDS = 16  # 12 show in the orders of five rows


class Shuffled:
    """The numbers 0 … rows − 1 in an order that depends on a seed and an epoch.

    >>> sorted(Shuffled(5, 0, 0)(np.arange(5)).tolist())
    [0, 1, 2, 3, 4]
    """

    def __init__(self, rows: int, seed: int, epoch: int) -> None:
        self.rows = rows
        left = isqrt(rows - 1) + 1
        self.sides = left, -(-rows // left)
        self.keys = np.random.SeedSequence([seed, epoch]).generate_state(ROUNDS, np.uint64)

    def __call__(self, positions: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        cells = self._permuted(positions.astype(np.uint64))
        while (beyond := cells >= self.rows).any():
            cells[beyond] = self._permuted(cells[beyond])
        return cells.astype(np.int64)

    def _permuted(self, cells: UInt[np.ndarray, " n"]) -> UInt[np.ndarray, " n"]:
        side, other_side = map(np.uint64, self.sides)
        half = cells % side
        other = cells // side
        for key in self.keys:
            # 48 bits of a hash and 32 of a half do not overflow.
            half, other = other, (half + (_hash(other ^ key) >> 16)) % side
            side, other_side = other_side, side
        return half + other * side


def _hash(x: UInt[np.ndarray, " n"]) -> UInt[np.ndarray, " n"]:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)
