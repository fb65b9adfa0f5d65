"""Which gradient travels in which bucket: frozen integers and names, no arrays.

A plan is computed once, from shapes and from the order in which gradients become ready. Everything that later moves
data (`flat`, the schedules, the audit) follows it, and two replicas agree on everything if they agree on its digest.

Source: Li et al., "PyTorch Distributed" (VLDB 2020), section 4.2; `compute_bucket_assignment_by_size` in PyTorch's
`reducer.cpp`.
"""

import hashlib
import math
import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from fddp.buckets.groups import Groups, group_keys

MiB = 2**20


@dataclass(frozen=True)
class Leaf:
    """One array of the tree: its path, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Bucket:
    """Leaves of one dtype that travel together, in the order in which they lie in the bucket."""

    leaves: tuple[int, ...]
    names: tuple[str, ...]
    dtype: np.dtype
    size: int

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


class Message(NamedTuple):
    """One all-reduce of a step."""

    bucket: int | None
    """The bucket that travels in it; None: the scalars alone."""
    scalars: bool = False
    """Whether loss, metrics and buffers travel in it, at its end."""

    @property
    def name(self) -> str:
        return "tail" if self.bucket is None else f"bucket {self.bucket}"


@dataclass(frozen=True)
class BucketPlan:
    """The buckets in launch order, over the leaves of one tree, and the messages in which they travel.

    Leaves that no bucket names do not travel: `pack` passes them over and `unpack` leaves `None` in their place.
    """

    leaves: tuple[Leaf, ...]
    buckets: tuple[Bucket, ...]
    treedef: Any
    messages: tuple[Message, ...]
    """All all-reduces of a step, in order: a bucket each, and one more where the scalars travel alone."""

    @property
    def carrier(self) -> Message:
        """The message in which loss, metrics and buffers travel."""
        return next(message for message in self.messages if message.scalars)

    @cached_property
    def digest(self) -> str:
        """A hash of names, shapes, dtypes and layout: equal digests mean equal messages."""
        text = [*map(str, self.leaves), *(str(bucket.leaves) for bucket in self.buckets), *map(str, self.messages)]
        return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        rows = [
            (str(i), str(len(b.leaves)), f"{b.nbytes / MiB:.3f}", str(b.dtype), _abridged(b.names))
            for i, b in enumerate(self.buckets)
        ]
        head = ("bucket", "leaves", "MiB", "dtype", "names, in the order they become ready")
        total = sum(b.nbytes for b in self.buckets) / MiB
        carrier = self.carrier
        tail = "travel in one all-reduce of their own" if carrier.bucket is None else f"ride in {carrier.name}"
        sent = sum(len(b.leaves) for b in self.buckets)
        foot = (
            f"{sent} of {len(self.leaves)} leaves in {_counted(len(self.buckets), 'bucket')}, {total:.3f} MiB",
            f"loss and metrics {tail}; digest {self.digest}",
        )
        return "\n".join([*_table([head, *rows]), *foot])


def make_plan(
    tree: Any,
    *,
    order: Sequence[int] | None = None,
    bucket_cap_mb: float = 25,
    first_bucket_mb: float = 1,
    last_bucket_mb: float = 1,
    groups: Groups | None = None,
) -> BucketPlan:
    """Assigns the leaves of a tree to buckets, by the rule of PyTorch's `compute_bucket_assignment_by_size`.

    Leaves are taken in `order`; each dtype fills a bucket of its own, which is closed as soon as its bytes reach the
    cap. A leaf is never split, so a bucket exceeds its cap by less than one leaf. The first bucket's cap is small, so
    that traffic starts early; of the last bucket at most `last_bucket_mb` stays, so that little traffic is left when
    the backward pass ends.

    Leaves that `groups` gives one key travel together, whatever the caps say: in one bucket, ready with the last of
    them, or in one for each dtype that they have.

    Args:
      tree: parameters, gradients or `jax.ShapeDtypeStruct`s: any tree whose leaves have a shape and a dtype.
      order: leaf indices in the order in which their gradients become ready (see `grad_order`); leaves that it does
        not name do not travel. None: the reverse of the leaves, as DDP guesses.
      bucket_cap_mb: cap of a bucket in MiB; 0 gives every leaf a bucket of its own.
      first_bucket_mb: cap of the first bucket in MiB, if smaller than `bucket_cap_mb`.
      last_bucket_mb: cap of the last bucket in MiB, if smaller than `bucket_cap_mb`; a group is not cut.
      groups: from the name of a leaf ("layers/0/kernel") to the key of its group, any that is hashable, or to None:
        then the caps alone decide (Horovod's `groups`).

    Returns:
      A `BucketPlan`; `print(plan)` shows it as a table.

    Raises:
      ValueError: a cap is negative or NaN, or `order` is not a selection of the leaves' indices.
      TypeError: a leaf is no array, an index in `order` no whole number, or a key of `groups` not hashable.

    Example:
      >>> import numpy as np
      >>> tree = {"w": np.zeros((256, 1024), np.float32), "b": np.zeros(1024, np.float32)}
      >>> [bucket.names for bucket in make_plan(tree, bucket_cap_mb=1).buckets]
      [('w',), ('b',)]
      >>> [bucket.names for bucket in make_plan(tree, bucket_cap_mb=1, groups=lambda name: "layer").buckets]
      [('w', 'b')]
    """
    caps = {
        "bucket_cap_mb": bucket_cap_mb,
        "first_bucket_mb": first_bucket_mb,
        "last_bucket_mb": last_bucket_mb,
    }
    for name, cap in caps.items():
        if isinstance(cap, bool) or not isinstance(cap, int | float) or not cap >= 0:  # NaN compares false
            raise ValueError(f"{name} must be 0 or more MiB, got {cap!r}.")
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves = tuple(_leaf(path, value) for path, value in paths)
    order = tuple(reversed(range(len(leaves)))) if order is None else tuple(operator.index(i) for i in order)
    if len(set(order)) != len(order) or not all(0 <= i < len(leaves) for i in order):
        raise ValueError(
            f"order must name each leaf at most once, by its index in 0..{len(leaves) - 1}, got {list(order)}."
        )
    keys = dict(zip(order, group_keys([leaves[i].name for i in order], groups)))
    cap = bucket_cap_mb * MiB
    filled = _fill(leaves, keys, first=min(first_bucket_mb * MiB, cap), cap=cap)
    if filled and keys[filled[-1][0]] is None:
        filled = _by_readiness(_shorten_last(leaves, filled, cap=min(last_bucket_mb * MiB, cap)), order)
    return place_scalars(BucketPlan(leaves, tuple(_bucket(leaves, bucket) for bucket in filled), treedef, ()))


def place_scalars(
    plan: BucketPlan, dtype: DTypeLike = np.float32, *, early: bool = False, exact: bool = True
) -> BucketPlan:
    """Says in which message loss, metrics and buffers travel: behind the last bucket that holds them, or the first.

    A message of 16-bit words or a hook would round them; where there is nothing better they travel in one tiny
    all-reduce of their own.

    Args:
      plan: the buckets.
      dtype: a real one that holds every scalar.
      early: whether they travel early: for schedules that use a bucket while the next one travels, and for buckets
        that are sent only if a replica used what is in them.
      exact: whether buckets arrive as they were sent: not when a hook changes them, or when they may not be sent.

    Returns:
      The plan, with its messages.

    Example:
      >>> import numpy as np
      >>> plan = make_plan({"w": np.zeros(3, np.float32), "b": np.zeros(3, np.float32)}, bucket_cap_mb=0)
      >>> [message.scalars for message in plan.messages], [m.name for m in place_scalars(plan, exact=False).messages]
      ([False, True], ['bucket 0', 'bucket 1', 'tail'])
    """
    bits, count = jnp.finfo(dtype).bits, len(plan.buckets)
    holds = [jnp.issubdtype(b.dtype, jnp.inexact) and jnp.finfo(b.dtype).bits >= bits for b in plan.buckets]
    wide = [k for k in range(count) if holds[k]] if exact else []
    carrier = wide[0 if early else -1] if wide else None
    buckets = [Message(k, k == carrier) for k in range(count)]
    alone = [Message(None, True)] if carrier is None else []
    return replace(plan, messages=(*alone, *buckets) if early else (*buckets, *alone))


def _fill(leaves: Sequence[Leaf], keys: Mapping[int, Hashable | None], *, first: float, cap: float) -> list[list[int]]:
    """Walks the order, with one open bucket for each dtype, and for each dtype of a group, which no cap closes."""
    filling: dict[tuple[np.dtype, Hashable | None], list[int]] = {}
    closed: list[list[int]] = []
    for i, key in keys.items():
        bucket = filling.setdefault((leaves[i].dtype, key), [])
        bucket.append(i)
        if key is None and sum(leaves[j].nbytes for j in bucket) >= (cap if closed else first):
            closed.append(filling.pop((leaves[i].dtype, key)))
    return _by_readiness([*closed, *filling.values()], list(keys))


def _by_readiness(groups: Sequence[list[int]], order: Sequence[int]) -> list[list[int]]:
    """A bucket is launched when the last of its leaves is ready."""
    position = {leaf: at for at, leaf in enumerate(order)}
    return sorted(groups, key=lambda bucket: position[bucket[-1]])


def _shorten_last(leaves: Sequence[Leaf], groups: list[list[int]], *, cap: float) -> list[list[int]]:
    """Splits the last bucket so that what leaves after the backward's end is within the cap, or one leaf."""
    if not groups:
        return groups
    *others, last = groups
    cut = len(last) - 1
    while cut > 0 and sum(leaves[i].nbytes for i in last[cut - 1 :]) <= cap:
        cut -= 1
    return [*others, last[:cut], last[cut:]] if cut else groups


def _bucket(leaves: Sequence[Leaf], group: Sequence[int]) -> Bucket:
    return Bucket(
        leaves=tuple(group),
        names=tuple(leaves[i].name for i in group),
        dtype=leaves[group[0]].dtype,
        size=sum(leaves[i].size for i in group),
    )


def _leaf(path: Any, value: Any) -> Leaf:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        value = _scalar(name, value)
    return Leaf(name, tuple(value.shape), np.dtype(value.dtype))


def _scalar(name: str, value: Any) -> Any:
    if isinstance(value, int | float | complex):
        return jax.eval_shape(lambda: jnp.asarray(value))
    raise TypeError(f"leaf {name!r} must be an array, got {type(value).__name__}.")


def _abridged(names: tuple[str, ...], width: int = 64) -> str:
    """All names, or the first and the last where they are too many for a line."""
    text = ", ".join(names)
    return text if len(text) <= width else f"{names[0]}, …, {names[-1]}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
