"""Compares what ranks must agree on, before anything depends on it.

Source: `_verify_param_shape_across_processes` in PyTorch's `distributed.py`. Unlike there, names, dtypes and options
are compared too, and every rank raises the same error.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np
from jax.sharding import PartitionSpec

from fddp.comm.allgatherv import gather_bytes
from fddp.wording import leaf_name

if TYPE_CHECKING:  # a group compares, too
    from fddp.comm.group import Group

Found = TypeVar("Found")

ERRORS: dict[str, type[Exception]] = {error.__name__: error for error in (ValueError, TypeError)}
BESIDE = 16  # bytes that each rank may send along with the description, and that are not compared


def verify(
    group: "Group", what: str, find: Callable[[], Found], describe: Callable[[Any], Iterable[str]] = list
) -> Found:
    """Finds something on every rank and compares the descriptions; where they differ, or one rank fails, all fail.

    All messages have a fixed size until every rank knows the length of the longest description.

    Args:
      group: the ranks that compare.
      what: name of the thing described, for the message: "parameters", say.
      find: finds it; may raise an error about this rank's input.
      describe: describes what was found, line by line, and may raise as well. Left out: what was found is the lines.

    Returns:
      This rank's finding.

    Raises:
      ValueError: the descriptions differ; the message says where, by rank.
      Exception: the error of `find`, on every rank: its own error where all agree, else its message by rank.
      RuntimeError: an earlier error has left the ranks at different places.
    """
    found, _ = verify_beside(group, what, find, describe, lambda found: b"")
    return found


def verify_beside(
    group: "Group",
    what: str,
    find: Callable[[], Found],
    describe: Callable[[Any], Iterable[str]],
    beside: Callable[[Any], bytes],
) -> tuple[Found, list[bytes]]:
    """Does what `verify` does, and carries a few bytes of each rank to all ranks in the same message.

    Args:
      group: as for `verify`.
      what: likewise.
      find: likewise.
      describe: likewise.
      beside: gives at most `BESIDE` bytes of what was found, which may differ between ranks.

    Returns:
      This rank's finding; and the bytes that each rank sent along, padded with zeros, in order of rank.

    Raises:
      Exception: as for `verify`.
    """
    group.recovery.resume()
    failure = None
    found: Any = None
    told = b""
    try:
        found = find()
        lines = list(describe(found))
        told = beside(found)
    except Exception as error:  # whatever it is, the other ranks must hear of it
        failure = error
        lines = [f"{type(error).__name__}: {error}"]
    text = json.dumps({"failed": failure is not None, "lines": lines}).encode()
    mine = sha256(text).digest() + told.ljust(BESIDE, b"\0")
    every = [row.tobytes() for row in group.all_gather(np.frombuffer(mine, np.uint8))]
    if len({row[:-BESIDE] for row in every}) == 1:
        if failure is not None:
            raise failure
        return found, [row[-BESIDE:] for row in every]
    raise _disagreement(what, [json.loads(report) for report in gather_bytes(group, text)]) from failure


def nothing_to_compare(found: Any) -> tuple[str, ...]:
    """Describes a finding that may differ between ranks, by no lines: then `verify` compares only whether all could."""
    del found
    return ()


def described(title: str, tree: Any) -> list[str]:
    """Describes a tree by one line for each leaf: title, path, dtype and shape."""
    named = jax.tree_util.tree_leaves_with_path(tree)
    words = [(title, leaf_name(path), _form(x)) for path, x in named]
    return [" ".join(filter(None, line)) for line in words]


def shortened(lines: Sequence[str], between: str = "; ", most: int = 6) -> str:
    """Joins the first `most` lines into one, and counts the others."""
    more = f", and {len(lines) - most} more" if len(lines) > most else ""
    return between.join(lines[:most]) + more


def _form(x: Any) -> str:
    if isinstance(x, PartitionSpec):
        return str(x)
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else type(x).__name__


def _disagreement(what: str, reports: list[dict[str, Any]], most: int = 6) -> Exception:
    failed = [rank for rank, report in enumerate(reports) if report["failed"]]
    if failed:
        texts = [f"rank {rank}: {reports[rank]['lines'][0]}" for rank in failed]
        kind = ERRORS.get(reports[failed[0]]["lines"][0].split(":")[0], RuntimeError)
        return kind(f"{what}: {len(failed)} of {len(reports)} ranks failed.\n" + "\n".join(texts[:most]))
    everywhere = set.intersection(*(set(report["lines"]) for report in reports))
    texts = []
    for rank, report in enumerate(reports):
        own = [line for line in report["lines"] if line not in everywhere]
        texts.append(f"rank {rank}: {shortened(own) or 'nothing more'}")
    return ValueError(f"ranks differ in their {what}.\n" + "\n".join(texts))
