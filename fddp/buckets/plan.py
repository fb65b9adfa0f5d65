"""The bucket plan: integers and names that assign gradients to buckets, and buckets to messages.

A plan is computed once, from shapes and from the order in which gradients become ready. Packing,
schedules and the audit follow it. Replicas whose plans have equal digests send equal messages.

Source: Li et al., "PyTorch Distributed" (VLDB 2020), section 4.2; PyTorch's `reducer.cpp`.
"""

import hashlib
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from fddp.buckets.sent_leaves import MiB, Rows
from fddp.buckets.shards import leaf_layout
from fddp.wording import preformatted, table


@dataclass(frozen=True)
class Leaf:
    """One array of the tree: its path, shape and dtype."""

    name: str
    """Path in the tree: "Dense_0/kernel"."""
    shape: tuple[int, ...]
    """Length of each dim."""
    dtype: np.dtype
    """Dtype in which it is sent."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Bucket:
    """Leaves of one dtype that are sent together, in the order of the bucket."""

    leaves: tuple[int, ...]
    """Indices of the leaves in the plan."""
    names: tuple[str, ...]
    """Names of the leaves."""
    dtype: np.dtype
    """Dtype of all leaves."""
    size: int
    """Number of elements."""
    rows: Rows | None = None
    """Capacity of its message, if its only leaf is sent as (row number, row). The leaf is sent
    whole if a replica touches more rows. None: the bucket is dense."""
    rounds: int = 1
    """Number of consecutive parts, summed one by one, each with an equal part of every leaf."""

    @property
    def nbytes(self) -> int:
        """Bytes to send; for a bucket in rows, the bytes of its message of rows."""
        if self.rows is None:
            return self.size * self.dtype.itemsize
        width = self.size // self.rows.of
        return self.rows.most * (width * self.dtype.itemsize + 4) + 1


class Message(NamedTuple):
    """One message of a step: a bucket, or only the scalars."""

    bucket: int | None
    """Index of its bucket. None: it carries only the scalars."""
    scalars: bool = False
    """True if it ends with loss, metrics and buffers."""

    @property
    def name(self) -> str:
        return "tail" if self.bucket is None else f"bucket {self.bucket}"


@dataclass(frozen=True)
class BucketPlan:
    """The buckets of a tree in launch order, and the messages that carry them.

    Leaves outside all buckets are not sent: `pack` skips them and `unpack` returns `None` for them.
    """

    leaves: tuple[Leaf, ...]
    """All leaves of the tree, in its order."""
    buckets: tuple[Bucket, ...]
    """The buckets, in launch order."""
    treedef: Any
    """Structure of the tree."""
    messages: tuple[Message, ...]
    """One per bucket, and one for scalars that no bucket carries."""
    parts: int = 1
    """Number of equal shards of each leaf, one per replica. 1: leaves are summed whole."""
    collectives: tuple[str, ...] = ()
    """JAX's names of the loss's own collectives, which run in addition to the messages."""

    def leaves_of(self, bucket: Bucket) -> tuple[Leaf, ...]:
        """Returns the leaves of a bucket.

        Args:
          bucket: a bucket of this plan.

        Returns:
          Its leaves, in its order.
        """
        return tuple(self.leaves[i] for i in bucket.leaves)

    @property
    def padding(self) -> int:
        """Bytes of zeros that pad leaves, or the layers of stacks, to a multiple of `parts`."""
        leaves = [self.leaves[i] for i in {i for bucket in self.buckets for i in bucket.leaves}]
        return sum(leaf_layout(x.shape, self.parts).padding * x.dtype.itemsize for x in leaves)

    @property
    def carrier(self) -> Message:
        """The message that carries loss, metrics and buffers."""
        return next(message for message in self.messages if message.scalars)

    @property
    def summary(self) -> str:
        """The plan in a few words: "2 of 2 leaves in 1 bucket, 0.001 MiB"."""
        count = len({i for b in self.buckets for i in b.leaves})
        total = sum(b.nbytes for b in self.buckets) / MiB
        return (
            f"{count} of {len(self.leaves)} leaves "
            f"in {_counted(len(self.buckets), 'bucket')}, {total:.3f} MiB"
        )

    @cached_property
    def digest(self) -> str:
        """A hash of names, shapes, dtypes and layout. Equal digests mean equal messages."""
        buckets = (f"{b.leaves} {b.rows or ''}{rounds_text(b)}".rstrip() for b in self.buckets)
        text = [*map(str, self.leaves), *buckets, *map(str, self.messages)]
        if self.parts > 1:
            text.append(f"in {self.parts} parts")
        return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        rows = [("bucket", "leaves", "MiB", "dtype", "names, in the order they become ready")]
        for k, bucket in enumerate(self.buckets):
            size = f"{bucket.nbytes / MiB:.3f}"
            names = _abridged(bucket.names) + _how_sent(bucket)
            rows.append((str(k), str(len(bucket.leaves)), size, str(bucket.dtype), names))
        lines = [*table(rows), self.summary]
        if self.parts > 1:
            lines.append(
                f"each is scattered to {self.parts} replicas and gathered, with "
                f"{_counted(self.padding, 'byte')} of padding"
            )
        if self.collectives:
            lines.append(f"the loss has collectives of its own: {', '.join(self.collectives)}")
        scalars = f"ride in {self.carrier.name}"
        if self.carrier.bucket is None:
            scalars = "travel in a separate all-reduce"
        lines.append(f"loss and metrics {scalars}; digest {self.digest}")
        return "\n".join(lines)

    _repr_html_ = preformatted


def widened(plan: BucketPlan, least: DTypeLike) -> BucketPlan:
    """Returns the plan with its float dtypes widened to hold all numbers of `least`."""
    leaves = tuple(replace(leaf, dtype=at_least(leaf.dtype, least)) for leaf in plan.leaves)
    buckets = tuple(replace(bucket, dtype=at_least(bucket.dtype, least)) for bucket in plan.buckets)
    return replace(plan, leaves=leaves, buckets=buckets)


def at_least(dtype: DTypeLike, least: DTypeLike) -> np.dtype:
    """Promotes a float dtype to hold all numbers of `least`; returns an integer dtype unchanged."""
    if jnp.issubdtype(dtype, jnp.inexact):
        dtype = jnp.promote_types(dtype, least)
    return np.dtype(dtype)


def _abridged(names: tuple[str, ...], width: int = 64) -> str:
    """Joins the names, or the first and the last if they do not fit in a line."""
    text = ", ".join(names)
    return text if len(text) <= width else f"{names[0]}, …, {names[-1]}"


def _how_sent(bucket: Bucket) -> str:
    if bucket.rows:
        return f" ({bucket.rows.most} of {bucket.rows.of} rows, with their numbers)"
    return rounds_text(bucket)


def rounds_text(bucket: Bucket) -> str:
    return f" (in {bucket.rounds} rounds)" if bucket.rounds > 1 else ""


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
