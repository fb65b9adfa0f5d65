"""Groups of leaves that travel together whatever the caps say: the user's function maps a leaf's name to a key.

Source: `groups` of `DistributedOptimizer` in Horovod.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

# Maps the name of a leaf ("layers/0/kernel") to the key of its group; None: it is in none.
Groups: TypeAlias = Callable[[str], Hashable | None]


def group_keys(names: Sequence[str], groups: Groups | None) -> list[Hashable | None]:
    """Asks the user's function for the group of each leaf.

    Args:
      names: names of the leaves.
      groups: the function; None: there are no groups.

    Returns:
      The key of each leaf.

    Raises:
      TypeError: `groups` is no function, or a key is not hashable.
    """
    if groups is None:
        return [None] * len(names)
    if not callable(groups):
        raise TypeError(
            "groups must be a function from a leaf's path to the key of its group, or None, "
            f"got {type(groups).__name__}."
        )
    return [_hashable(name, groups(name)) for name in names]


def described_groups(names: Sequence[str], groups: Groups | None) -> list[str]:
    """Describes the groups for a comparison between ranks: a line for each leaf that is in a group.

    A line names the first leaf of its group and not the key: the user's own keys may print differently on each rank.

    Args:
      names: names of the leaves.
      groups: the function; None: there are no groups.

    Returns:
      The lines.

    Raises:
      TypeError: as in `group_keys`.

    Example:
      >>> described_groups(["a/bias", "a/kernel", "b"], lambda name: "a" if name.startswith("a/") else None)
      ['group of a/bias: a/bias', 'group of a/bias: a/kernel']
    """
    keys = group_keys(names, groups)
    return [f"group of {names[keys.index(key)]}: {name}" for name, key in zip(names, keys) if key is not None]


def _hashable(name: str, key: Hashable | None) -> Hashable | None:
    try:
        hash(key)
    except TypeError:
        raise TypeError(
            f"groups must give a hashable key, such as a string, or None; for {name!r} it gave {key!r}."
        ) from None
    return key
