"""Compares ranks before anything depends on their agreement.

Source: `_verify_param_shape_across_processes` in PyTorch's `distributed.py`. fddp also compares
names, dtypes and options, and raises the same error on every rank.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import FlattenedIndexKey
from jaxtyping import PyTree

from fddp.comm.host_bytes import gather_bytes
from fddp.wording import leaf_name

if TYPE_CHECKING:  # a group compares, too
    from fddp.comm.group import Group

Found = TypeVar("Found")

ERRORS: dict[str, type[Exception]] = {error.__name__: error for error in (ValueError, TypeError)}


def verify(
    group: "Group",
    subject: str,
    find: Callable[[], Found],
    describe: Callable[[Any], Iterable[str]] = list,
) -> Found:
    """Returns the result of `find` if its description is equal on all ranks, else raises on all.

    `find` and `describe` may raise. If all ranks fail alike, each raises its own error. Otherwise
    the error names `subject` ("parameters", for example) and lists the differences by rank.
    """
    group.journal.refuse_broken()
    failure = None
    result: Any = None
    try:
        result = find()
        lines = list(describe(result))
    except Exception as error:  # the other ranks must learn of any error
        failure = error
        lines = [f"{type(error).__name__}: {error}"]
    text = json.dumps({"failed": failure is not None, "lines": lines}).encode()
    # A message of fixed size: ranks at different places would otherwise exchange unequal sizes.
    message = np.frombuffer(sha256(text).digest(), np.uint8)
    if len({row.tobytes() for row in group.all_gather(message)}) == 1:
        if failure is not None:
            raise failure
        return result
    raise _disagreement(
        subject, [json.loads(report) for report in gather_bytes(group, text)]
    ) from failure


def nothing_to_compare(result: object) -> tuple[str, ...]:
    """Describes a result by no lines: `verify` then compares only whether `find` raised."""
    return ()


def described(title: str, tree: PyTree) -> list[str]:
    """Describes a tree by one line for each leaf: title, path, dtype and shape."""
    named = jax.tree_util.tree_leaves_with_path(tree)
    words = [(title, leaf_name(path), _form(x)) for path, x in named]
    if any(isinstance(key, FlattenedIndexKey) for path, _ in named for key in path):
        text = re.sub(r" at 0x[0-9a-f]+", "", str(jax.tree.structure(tree)))
        words += [(title, "in", part.rstrip(")], ")) for part in text.split("CustomNode(")[1:]]
    return [" ".join(filter(None, line)) for line in words]


def shortened(lines: Sequence[str], between: str = "; ", most: int = 6) -> str:
    """Joins the first `most` lines, and counts the remaining ones."""
    text = between.join(lines[:most])
    if len(lines) > most:
        text += f", and {len(lines) - most} more"
    return text


def _form(x: Any) -> str:
    if isinstance(x, PartitionSpec):
        return str(x)
    if hasattr(x, "dtype"):
        return f"{x.dtype}{list(x.shape)}"
    return type(x).__name__


def _disagreement(subject: str, reports: list[dict[str, Any]], most: int = 6) -> Exception:
    failed = [rank for rank, report in enumerate(reports) if report["failed"]]
    if failed:
        texts = [f"rank {rank}: {reports[rank]['lines'][0]}" for rank in failed]
        kind = ERRORS.get(reports[failed[0]]["lines"][0].split(":")[0], RuntimeError)
        return kind(
            f"{subject.split(' (')[0]}: {len(failed)} of {len(reports)} ranks failed.\n"
            + "\n".join(texts[:most])
        )
    common = set.intersection(*(set(report["lines"]) for report in reports))
    in_order = [[line for line in report["lines"] if line in common] for report in reports]
    moved = {line for lines in zip(*in_order) if len(set(lines)) > 1 for line in lines}
    texts = []
    for rank, report in enumerate(reports):
        differences = [line for line in report["lines"] if line not in common]
        if moved:
            order = [line for line in in_order[rank] if line in moved]
            differences.insert(0, f"the order {shortened(order, ', ')}")
        texts.append(f"rank {rank}: {shortened(differences) or 'nothing more'}")
    return ValueError(f"ranks differ in their {subject}.\n" + "\n".join(texts))
