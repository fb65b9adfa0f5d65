"""The forms in which a leaf travels: whole, in rounds, or as table rows."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias


class Rows(NamedTuple):
    """Capacity of a message of table rows: at most `most` of the leaf's `of` rows."""

    most: int
    of: int


class SentLeaf(NamedTuple):
    """A leaf that is sent."""

    leaf: int
    """Index of the leaf in the plan."""
    loop: int = 0
    """Number of the loop that computes it round by round."""
    rounds: int = 1
    """Number of equal parts along the first dim, summed one by one as the loop computes them."""


MiB = 2**20
# In MiB: one cap for all buckets, or one per bucket; the last cap holds for all further buckets.
Caps: TypeAlias = float | Sequence[float]


def check_caps(bucket_cap_mb: Any, first_bucket_mb: object, last_bucket_mb: object) -> None:
    """Raises ValueError for a cap that is not a number of 0 or more, and for an empty sequence."""
    is_sequence = isinstance(bucket_cap_mb, Sequence) and not isinstance(bucket_cap_mb, str)
    if is_sequence and not (bucket_cap_mb and all(map(_is_cap, bucket_cap_mb))):
        raise ValueError(
            f"bucket_cap_mb must be one cap or more, of 0 or more MiB each, got {bucket_cap_mb!r}."
        )
    caps = {"first_bucket_mb": first_bucket_mb, "last_bucket_mb": last_bucket_mb}
    if not is_sequence:
        caps = {"bucket_cap_mb": bucket_cap_mb} | caps
    for name, cap in caps.items():
        if not _is_cap(cap):
            raise ValueError(f"{name} must be 0 or more MiB, got {cap!r}.")


def _is_cap(value: object) -> bool:
    # NaN compares false.
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
