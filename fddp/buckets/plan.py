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

from fddp.buckets.layout import leaf_layout
from fddp.wording import preformatted, table

MiB = 2**20


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
    """Capacity of its message of table rows, if its only leaf is sent as (row number, row). The
    bucket itself follows only if a replica touches more rows. None: the bucket is dense."""
    slice: Slice | None = None
    """The slice of each leaf, if a loop computes gradients slice by slice. None: whole leaves."""
    rounds: int = 1
    """Number of consecutive parts, summed one by one, each with an equal part of every leaf."""

    @property
    def word(self) -> int:
        """Bytes of a word in the message of rows: those of a real number of this dtype."""
        return np.dtype(jnp.finfo(self.dtype).dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes to send; for a bucket in rows, the bytes of its message of rows."""
        if self.rows is None:
            return self.size * self.dtype.itemsize
        width = self.size // self.rows.of
        return self.rows.most * (width * self.dtype.itemsize + max(4, self.word)) + self.word


class Message(NamedTuple):
    """One message of a step: a bucket, the table rows of a bucket, or only the scalars."""

    bucket: int | None
    """Index of its bucket. None: it carries only the scalars."""
    scalars: bool = False
    """True if it ends with loss, metrics and buffers."""
    rows: bool = False
    """True for the table rows of the bucket. The next message then holds the bucket itself."""

    @property
    def name(self) -> str:
        if self.bucket is None:
            return "tail"
        return f"rows {self.bucket}" if self.rows else f"bucket {self.bucket}"


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
    """One per bucket, preceded by its table rows, and one for scalars that no bucket carries."""
    parts: int = 1
    """Number of equal shards of each leaf, one per replica. 1: leaves are summed whole."""
    collectives: tuple[str, ...] = ()
    """JAX's names of the loss's own collectives, which run in addition to the messages."""

    def travelling(self, bucket: Bucket) -> tuple[Leaf, ...]:
        """Returns the leaves of a bucket with the shapes in which they are sent.

        Args:
          bucket: a bucket of this plan.

        Returns:
          The leaves, or their slices if the bucket holds slices.
        """
        leaves = [self.leaves[i] for i in bucket.leaves]
        if bucket.slice is None:
            return tuple(leaves)
        return tuple(
            replace(x, name=f"{x.name}{bucket.slice}", shape=bucket.slice.dims(x.shape))
            for x in leaves
        )

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
        buckets = (
            f"{b.leaves} {b.rows or b.slice or ''}{_in_rounds(b)}".rstrip() for b in self.buckets
        )
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
            padding = _counted(self.padding, "byte")
            lines.append(
                f"each is scattered to {self.parts} replicas and gathered, "
                f"with {padding} of padding"
            )
        if self.collectives:
            lines.append(f"the loss has collectives of its own: {', '.join(self.collectives)}")
        scalars = f"ride in {self.carrier.name}"
        if self.carrier.bucket is None:
            scalars = "travel in a separate all-reduce"
        lines.append(f"loss and metrics {scalars}; digest {self.digest}")
        return "\n".join(lines)

    _repr_html_ = preformatted


def place_scalars(
    plan: BucketPlan, dtype: DTypeLike = np.float32, *, early: bool = False, exact: bool = True
) -> BucketPlan:
    """Appends the scalars (loss, metrics, buffers) to the last bucket that holds `dtype` exactly.

    With `early` it is the first such bucket, as every update needs the summed weight. Without one,
    or if a hook rounds buckets or unused ones are skipped (`exact=False`), they get an all-reduce.

    >>> from fddp import make_plan
    >>> plan = make_plan({"w": np.zeros(3, "f4"), "b": np.zeros(3, "f4")}, bucket_cap_mb=0)
    >>> [message.scalars for message in plan.messages]
    [False, True]
    >>> [message.name for message in place_scalars(plan, exact=False).messages]
    ['bucket 0', 'bucket 1', 'tail']
    """
    bits = jnp.finfo(dtype).bits
    messages = list[Message]()
    carriers = list[int]()
    for k, bucket in enumerate(plan.buckets):
        if bucket.rows:
            messages.append(Message(k, rows=True))
        if exact and _holds(bucket, bits):
            carriers.append(len(messages))
        messages.append(Message(k))
    if carriers:
        number = carriers[0] if early else carriers[-1]
        messages[number] = messages[number]._replace(scalars=True)
    else:
        messages.insert(0 if early else len(messages), Message(None, scalars=True))
    return replace(plan, messages=tuple(messages))


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


def _holds(bucket: Bucket, bits: int) -> bool:
    """True if floats of `bits` bits can be appended to a bucket."""
    floats = jnp.issubdtype(bucket.dtype, jnp.inexact) and jnp.finfo(bucket.dtype).bits >= bits
    return floats and bucket.rows is None and bucket.rounds == 1


def _abridged(names: tuple[str, ...], width: int = 64) -> str:
    """Joins the names, or the first and the last if they do not fit in a line."""
    text = ", ".join(names)
    return text if len(text) <= width else f"{names[0]}, …, {names[-1]}"


def _how_sent(bucket: Bucket) -> str:
    if bucket.rows:
        return f" ({bucket.rows.most} of {bucket.rows.of} rows, with their numbers)"
    return _in_rounds(bucket)


def _in_rounds(bucket: Bucket) -> str:
    return f" (in {bucket.rounds} rounds)" if bucket.rounds > 1 else ""


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
