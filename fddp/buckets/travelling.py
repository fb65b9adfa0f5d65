"""The forms in which a leaf travels: whole, as a slice, in rounds, or as table rows."""

from typing import NamedTuple


class Rows(NamedTuple):
    """Capacity of a message of table rows: at most `most` of the leaf's `of` rows."""

    most: int
    of: int


class Slice(NamedTuple):
    """Rounds `begin` to `end` of a loop over layers: a slice of a stack along its first dim."""

    begin: int
    end: int

    def __str__(self) -> str:
        return f"[{self.begin}:{self.end}]"

    def dims(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of this slice of an array."""
        return self.end - self.begin, *shape[1:]


class Travelling(NamedTuple):
    """A leaf, or a slice of it, that is sent in one message."""

    leaf: int
    """Index of the leaf in the plan."""
    slice: Slice | None = None
    """The slice. None: the whole leaf."""
    loop: int = 0
    """Number of the loop that computes the slice, or computes the leaf round by round."""
    rounds: int = 1
    """Number of equal parts along the first dim, summed one by one as the loop computes them."""
