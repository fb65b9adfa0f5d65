"""Names of leaves, tables, and checks of arguments."""

from collections.abc import Callable, Sequence
from html import escape
from numbers import Integral, Real
from typing import Any

import jax
import numpy as np


def leaf_name(path: Sequence[Any]) -> str:
    """Joins the keys of a leaf's path with slashes; empty if the tree is a single leaf.

    >>> leaves = jax.tree_util.tree_leaves_with_path({"dense": {"bias": 1.0}})
    >>> [leaf_name(path) for path, _ in leaves]
    ['dense/bias']
    """
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def leaf_names(tree: Any) -> list[str]:
    """The names of all leaves of a tree, in order."""
    return [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def printable(text: str) -> str:
    """Replaces the control codes in another program's output, which could change a terminal."""
    return text.translate({ord(x): "?" for x in text if not x.isprintable()})


def preformatted(value: object) -> str:
    """Formats an object whose text is a table for notebooks; classes use it as `_repr_html_`."""
    return f"<pre>{escape(str(value))}</pre>"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Formats rows of equally many cells as lines with aligned columns.

    >>> table([("bucket", "MiB"), ("0", "25")])
    ['bucket  MiB', '0       25']
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    ]


def check_has(attribute: str, name: str, value: object, expected: str) -> None:
    """Raises TypeError if a value lacks the attribute that identifies the expected kind."""
    if not hasattr(value, attribute):
        raise TypeError(f"{name} must be {expected}, got {type(value).__name__} {value!r:.60}.")


def check_number(name: str, value: object) -> None:
    """Raises TypeError if a value is not a real number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r:.60}.")


def check_range(name: str, value: Any, expected: str, within: Callable[[Any], bool]) -> float:
    """Returns a real number as a `float`; raises TypeError for other values.

    Raises ValueError if the number is not `within` the range, which `expected` describes.
    """
    check_number(name, value)
    if not within(value):
        raise ValueError(f"{name} must be {expected}, got {value!r}.")
    return float(value)


def check_switch(name: str, value: object) -> None:
    """Raises TypeError if a value is neither True nor False."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}.")


def check_whole(name: str, value: object, least: int) -> int:
    """Returns an integer of `least` or more as an `int`; raises ValueError for other values."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ValueError(f"{name} must be a whole number of {least} or more, got {value!r:.60}.")
    return int(value)


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raises ValueError unless a value is one of the choices, and of its type: 1 is not True."""
    if (type(value), value) not in [(type(choice), choice) for choice in choices]:
        *more, last = map(repr, choices)
        raise ValueError(f"{name} must be {', '.join(more)} or {last}, got {value!r:.60}.")


def check_seconds(name: str, value: object) -> None:
    """Raises ValueError if a value is not a positive number."""
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) > 0:
        raise ValueError(f"{name} must be more than 0 seconds, got {value!r}.")
