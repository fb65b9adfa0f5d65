"""The plan of buckets, which says in which bucket each gradient travels: frozen integers and names, no arrays.

A plan is computed once, from shapes and from the order in which gradients become ready. Everything that later moves
data (packing, the schedules, the audit) follows it. Two replicas that agree on its digest agree on every message.

Source: Li et al., "PyTorch Distributed" (VLDB 2020), section 4.2; `Reducer` in PyTorch's `reducer.cpp`.
"""

import hashlib
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from fddp.buckets.part_forms import part_of
from fddp.wording import preformatted, table

MiB = 2**20


@dataclass(frozen=True)
class Leaf:
    """One array of the tree: its path, shape and dtype."""

    name: str
    """Path in the tree: "Dense_0/kernel"."""
    shape: tuple[int, ...]
    """Its dims."""
    dtype: np.dtype
    """The dtype in which it travels."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


class Rows(NamedTuple):
    """Rows that a message has room for, where a gradient touches few: `most` of the `of` rows that the leaf has."""

    most: int
    of: int


class Slice(NamedTuple):
    """Some rounds of a loop over layers: a slice along the first dim of what has a slice for each round."""

    begin: int
    end: int

    def __str__(self) -> str:
        return f"[{self.begin}:{self.end}]"

    def dims(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The dims of this slice of an array with the dims `whole`."""
        return self.end - self.begin, *whole[1:]


class Travelling(NamedTuple):
    """A leaf of a plan, or the slice of one, that travels in one piece."""

    leaf: int
    """The number of the leaf."""
    slice: Slice | None = None
    """None: all of it."""
    loop: int = 0
    """The number of the loop that makes the slice, or the leaf round by round."""
    rounds: int = 1
    """The number of equal parts along its first dim that travel one by one, as a loop makes them in its rounds."""


@dataclass(frozen=True)
class Bucket:
    """Leaves of one dtype that travel together, in the order in which they lie in the bucket."""

    leaves: tuple[int, ...]
    """Numbers of the leaves in the plan."""
    names: tuple[str, ...]
    """Names of the leaves."""
    dtype: np.dtype
    """The dtype of all leaves."""
    size: int
    """Number of elements."""
    rows: Rows | None = None
    """The room for rows, if its only leaf travels as rows with their numbers; the rest then travels only if a replica
    has more rows than that. None: all of it travels."""
    slice: Slice | None = None
    """The slice of its leaves that travels, if a loop makes their gradients slice by slice; None: all of them."""
    rounds: int = 1
    """The number of parts, one behind the other, that are summed one by one. Each holds an equal part of every leaf,
    which a loop makes in one of its rounds."""

    @property
    def word(self) -> int:
        """Bytes of one word of the message of rows: those of a real number of this dtype."""
        return np.dtype(jnp.finfo(self.dtype).dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes that travel; of a bucket in rows those of its message of rows."""
        if self.rows is None:
            return self.size * self.dtype.itemsize
        width = self.size // self.rows.of
        return self.rows.most * (width * self.dtype.itemsize + max(4, self.word)) + self.word


class Message(NamedTuple):
    """One message of a step: an all-reduce, or rows that are gathered."""

    bucket: int | None
    """The bucket that travels in it; None: the scalars alone."""
    scalars: bool = False
    """Whether loss, metrics and buffers travel at its end."""
    rows: bool = False
    """Whether it carries the bucket's rows; the next message then carries the rest of the bucket, if there is any."""

    @property
    def name(self) -> str:
        return "tail" if self.bucket is None else f"{'rows' if self.rows else 'bucket'} {self.bucket}"


@dataclass(frozen=True)
class BucketPlan:
    """The buckets in launch order, over the leaves of one tree, and the messages in which they travel.

    Leaves that no bucket names do not travel: `pack` passes them over and `unpack` leaves `None` in their place.
    """

    leaves: tuple[Leaf, ...]
    """All leaves of the tree, in its order."""
    buckets: tuple[Bucket, ...]
    """The buckets, in launch order."""
    treedef: Any
    """The structure of the tree."""
    messages: tuple[Message, ...]
    """The messages of a step, in order: one for each bucket, before it one with its rows if it travels as rows, and one
    more where the scalars travel alone."""
    parts: int = 1
    """Number of equal parts in which each leaf is scattered and gathered, one a replica; 1: it is summed whole."""
    collectives: tuple[str, ...] = ()
    """The kinds of collectives that the loss holds, in JAX's words; they travel beside the messages."""

    def travelling(self, bucket: Bucket) -> tuple[Leaf, ...]:
        """Gives the leaves of a bucket with the dims in which they travel in it.

        Args:
          bucket: one of the plan's.

        Returns:
          The leaves; where slices travel, in the forms of slices.
        """
        leaves = [self.leaves[i] for i in bucket.leaves]
        if bucket.slice is None:
            return tuple(leaves)
        return tuple(replace(x, name=f"{x.name}{bucket.slice}", shape=bucket.slice.dims(x.shape)) for x in leaves)

    @property
    def padding(self) -> int:
        """Bytes of padding: zeros behind leaves, or layers, whose size the number of parts does not divide."""
        leaves = [self.leaves[i] for i in {i for bucket in self.buckets for i in bucket.leaves}]
        return sum((math.prod(part_of(x.shape, self.parts)) * self.parts - x.size) * x.dtype.itemsize for x in leaves)

    @property
    def carrier(self) -> Message:
        """The message in which loss, metrics and buffers travel."""
        return next(message for message in self.messages if message.scalars)

    @property
    def summary(self) -> str:
        """The plan in a few words: "2 of 2 leaves in 1 bucket, 0.001 MiB"."""
        sent = len({i for b in self.buckets for i in b.leaves})
        total = sum(b.nbytes for b in self.buckets) / MiB
        return f"{sent} of {len(self.leaves)} leaves in {_counted(len(self.buckets), 'bucket')}, {total:.3f} MiB"

    @cached_property
    def digest(self) -> str:
        """A hash of names, shapes, dtypes and layout: equal digests mean equal messages."""
        buckets = (f"{one.leaves} {one.rows or one.slice or ''}{_in_rounds(one)}".rstrip() for one in self.buckets)
        parts = [f"in {self.parts} parts"] if self.parts > 1 else []
        text = [*map(str, self.leaves), *buckets, *map(str, self.messages), *parts]
        return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        rows = [
            (str(i), str(len(b.leaves)), f"{b.nbytes / MiB:.3f}", str(b.dtype), _abridged(b.names) + _told(b))
            for i, b in enumerate(self.buckets)
        ]
        head = ("bucket", "leaves", "MiB", "dtype", "names, in the order they become ready")
        carrier = self.carrier
        tail = "travel in one all-reduce of their own" if carrier.bucket is None else f"ride in {carrier.name}"
        padding = _counted(self.padding, "byte")
        foot = (
            self.summary,
            *[f"each is scattered to {self.parts} replicas and gathered, with {padding} of padding"] * (self.parts > 1),
            *[f"the loss has collectives of its own: {', '.join(self.collectives)}"] * bool(self.collectives),
            f"loss and metrics {tail}; digest {self.digest}",
        )
        return "\n".join([*table([head, *rows]), *foot])

    _repr_html_ = preformatted


def place_scalars(
    plan: BucketPlan, dtype: DTypeLike = np.float32, *, early: bool = False, exact: bool = True
) -> BucketPlan:
    """Chooses the message in which loss, metrics and buffers travel: the last bucket that can hold them, or the first.

    Messages of 16-bit words, and hooks, would round them. Where no bucket can hold them they travel in one tiny
    all-reduce of their own.

    Args:
      plan: the buckets.
      dtype: a real dtype that holds every scalar.
      early: whether they travel early, as those of a step do: a bucket is then used while the next one travels, or is
        sent only if a replica used one of its leaves.
      exact: whether buckets arrive as they were sent; not so when a hook changes them, or when they may not be sent.

    Returns:
      The plan, with its messages.

    Example:
      >>> import numpy as np
      >>> from fddp import make_plan
      >>> plan = make_plan({"w": np.zeros(3, np.float32), "b": np.zeros(3, np.float32)}, bucket_cap_mb=0)
      >>> [message.scalars for message in plan.messages], [m.name for m in place_scalars(plan, exact=False).messages]
      ([False, True], ['bucket 0', 'bucket 1', 'tail'])
    """
    bits = jnp.finfo(dtype).bits
    count = len(plan.buckets)
    wide = [k for k in range(count) if exact and _holds(plan.buckets[k], bits)]
    carrier = wide[0 if early else -1] if wide else None
    buckets = list[Message]()
    for k, bucket in enumerate(plan.buckets):
        buckets += [Message(k, rows=True), Message(k)] if bucket.rows else [Message(k, k == carrier)]
    alone = [Message(None, True)] if carrier is None else []
    return replace(plan, messages=(*alone, *buckets) if early else (*buckets, *alone))


def widened(plan: BucketPlan, least: DTypeLike) -> BucketPlan:
    """Makes a plan of the same buckets, whose floats are summed in a wider dtype.

    Args:
      plan: the buckets.
      least: a float dtype; a leaf is summed in a dtype that holds the numbers of this one and of the leaf's own.

    Returns:
      The plan; integers stay as they are.
    """
    leaves = tuple(replace(leaf, dtype=at_least(leaf.dtype, least)) for leaf in plan.leaves)
    buckets = tuple(replace(bucket, dtype=at_least(bucket.dtype, least)) for bucket in plan.buckets)
    return replace(plan, leaves=leaves, buckets=buckets)


def at_least(dtype: DTypeLike, least: DTypeLike) -> np.dtype:
    """The dtype that holds all numbers of two dtypes; an integer dtype is returned as it is."""
    return np.dtype(jnp.promote_types(dtype, least) if jnp.issubdtype(dtype, jnp.inexact) else dtype)


def _holds(bucket: Bucket, bits: int) -> bool:
    """Whether floats of `bits` bits can travel behind a bucket."""
    floats = jnp.issubdtype(bucket.dtype, jnp.inexact) and jnp.finfo(bucket.dtype).bits >= bits
    return floats and bucket.rows is None and bucket.rounds == 1


def _abridged(names: tuple[str, ...], width: int = 64) -> str:
    """All names, or the first and the last where they are too many for a line."""
    text = ", ".join(names)
    return text if len(text) <= width else f"{names[0]}, …, {names[-1]}"


def _told(bucket: Bucket) -> str:
    rows = bucket.rows
    return f" ({rows.most} of {rows.of} rows, with their numbers)" if rows else _in_rounds(bucket)


def _in_rounds(bucket: Bucket) -> str:
    return f" (in {bucket.rounds} rounds)" if bucket.rounds > 1 else ""


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
