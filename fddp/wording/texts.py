"""Names of leaves, tables, and the refusal of a number that is none."""

from collections.abc import Sequence
from html import escape
from numbers import Integral, Real
from typing import Any

import jax
import numpy as np


def leaf_name(path: Sequence[Any]) -> str:
    """The name of a leaf of a tree.

    Args:
      path: its path, as `jax.tree_util.tree_leaves_with_path` gives it.

    Returns:
      Its keys with slashes between them; empty where the tree is this leaf alone.

    Example:
      >>> [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path({"dense": {"bias": 1.0}})]
      ['dense/bias']
    """
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def printable(text: str) -> str:
    """What another program says, without the codes that would change a terminal."""
    return "".join(x if x.isprintable() else "?" for x in text)


def preformatted(shown: object) -> str:
    """What a notebook shows of an object whose text is a table; a class has it as `_repr_html_`."""
    return f"<pre>{escape(str(shown))}</pre>"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lays cells out in columns.

    Args:
      rows: cells of each row, equally many.

    Returns:
      A line for each row.

    Example:
      >>> table([("bucket", "MiB"), ("0", "25")])
      ['bucket  MiB', '0       25']
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def check_has(attribute: str, name: str, value: Any, wanted: str) -> None:
    """Refuses a value of another kind: one without an attribute for which it is used.

    Raises:
      TypeError: says what is wanted, and what it is.
    """
    if not hasattr(value, attribute):
        raise TypeError(f"{name} must be {wanted}, got {type(value).__name__} {value!r:.60}.")


def check_number(name: str, value: Any) -> None:
    """Refuses a value that is no real number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r:.60}.")


def check_switch(name: str, value: Any) -> None:
    """Refuses a value that is neither True nor False."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}.")


def check_whole(name: str, value: Any, least: int) -> int:
    """Checks that a value is a whole number.

    Args:
      name: what the user calls it.
      value: what was given.
      least: the smallest number that it may be.

    Returns:
      The value, as an `int` of Python.

    Raises:
      ValueError: it is no whole number, or less.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ValueError(f"{name} must be a whole number of {least} or more, got {value!r}.")
    return int(value)


def check_seconds(name: str, value: Any) -> None:
    """Checks that a value is a positive number of seconds.

    Args:
      name: what the user calls it.
      value: the seconds.

    Raises:
      ValueError: it is no number, or not above 0.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) > 0:
        raise ValueError(f"{name} must be more than 0 seconds, got {value!r}.")
