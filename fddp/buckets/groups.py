"""Groups of leaves that share a bucket, whatever the caps: a user's function maps names to keys.

Source: `groups` of `DistributedOptimizer` in Horovod.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

# Maps the name of a leaf ("layers/0/kernel") to the key of its group; None: the leaf has no group.
Groups: TypeAlias = Callable[[str], Hashable | None]


def group_keys(names: Sequence[str], groups: Groups | None) -> list[Hashable | None]:
    """Returns the key of each leaf, and raises TypeError for a key that is not hashable."""
    if groups is None:
        return [None] * len(names)
    if not callable(groups):
        raise TypeError(
            "groups must be a function from a leaf's path to the key of its group, or None, "
            f"got {type(groups).__name__}."
        )
    return [_hashable(name, groups(name)) for name in names]


def described_groups(names: Sequence[str], groups: Groups | None) -> list[str]:
    """Returns a line for each grouped leaf, for a comparison between ranks.

    It names the first leaf of the group, since keys may print differently on each rank.

    >>> by_layer = lambda name: "a" if name.startswith("a/") else None
    >>> described_groups(["a/bias", "a/kernel", "b"], by_layer)
    ['group of a/bias: a/bias', 'group of a/bias: a/kernel']
    """
    keys = group_keys(names, groups)
    return [
        f"group of {names[keys.index(key)]}: {name}"
        for name, key in zip(names, keys)
        if key is not None
    ]


def _hashable(name: str, key: Hashable | None) -> Hashable | None:
    try:
        hash(key)
    except TypeError:
        raise TypeError(
            "groups must give a hashable key, such as a string, or None; "
            f"for {name!r} it gave {key!r}."
        ) from None
    return key
