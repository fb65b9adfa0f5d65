"""Leaves that an update needs whole: each goes to one replica, its home, and what that makes of it comes back in parts.

Replicas hold parts of all leaves. One exchange takes the parts of leaves home, each replica does what is to be done
with those whose home it is, and another exchange brings parts of the results to all. A replica sends its part of the
leaves and gets its part of the results: of n replicas, 1/n of the bytes of an all-reduce. Replicas of several devices
have no homes: each of them gathers all such leaves.

Source: the home of least load for each matrix, Graham's rule (1969), as in PyTorch's `ZeroRedundancyOptimizer`; the
exchange, the distributed Muon of Microsoft's Dion.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from fddp.buckets import DeviceCut, as_rows, by_device, of_rows, own_part, part_dims
from fddp.comm import Communicator, add_bytes, count_aside
from fddp.jaxpr import AtHome

# Dtype → arrays next to each other along the last dim: the message of this dtype.
Packed: TypeAlias = dict[str, Array]


def dealt(costs: Mapping[int, int], replicas: int) -> dict[int, int]:
    """Gives each leaf a home: the most laborious first, to the replica that has the least to do.

    Args:
      costs: leaf → what there is to do for it at home.
      replicas: how many there are.

    Returns:
      Leaf → replica.

    Example:
      >>> dealt({0: 3, 1: 9, 2: 4, 3: 4}, 2)
      {1: 0, 2: 1, 3: 1, 0: 1}
    """
    loads = [0] * replicas
    homes = dict[int, int]()
    for leaf in sorted(costs, key=lambda leaf: (-costs[leaf], leaf)):
        homes[leaf] = loads.index(min(loads))
        loads[homes[leaf]] += costs[leaf]
    return homes


class Lying(NamedTuple):
    """An array, and how it lies in parts."""

    shape: tuple[int, ...]
    dtype: Any
    depth: int
    """Number of layers that are cut each by itself."""
    dims: tuple[int, ...]
    """Dims of a replica's part."""


def at_home(
    comm: Communicator, homes: Mapping[int, int], depth: Callable[[int, int], int], visits: Sequence[AtHome]
) -> list[list[Array]]:
    """Does what needs leaves whole, each at its home; inside a program.

    Args:
      comm: the replicas.
      homes: leaf → replica.
      depth: (leaf, size of an array of it) → the number of layers that are cut each by itself.
      visits: what is to be done, in parts of this replica.

    Returns:
      This replica's parts of what each has made.
    """
    of = [[visit for visit in visits if homes[visit.leaf] == home] for home in range(comm.size)]

    def lying(leaf: int, shape: tuple[int, ...], dtype: Any) -> Lying:
        layers = depth(leaf, prod(shape))
        return Lying(shape, dtype, layers, part_dims(prod(shape), comm.size, layers))

    takes = [
        [lying(one.leaf, shape, x.dtype) for one in some for x, shape in zip(one.parts, one.shapes)] for some in of
    ]
    brings = [[lying(one.leaf, form.shape, form.dtype) for one in some for form in one.forms] for some in of]
    there = _fullest(takes)
    back = _fullest(brings)

    def branch(visits: Sequence[AtHome], takes: Sequence[Lying], brings: Sequence[Lying]) -> Callable[[Packed], Packed]:
        def run(came: Packed) -> Packed:
            rows = zip(_unpacked(takes, came), takes)
            whole = iter([of_rows(x, one.shape, one.depth) for x, one in rows])
            made = [x for one in visits for x in one.run([next(whole) for _ in one.parts])]
            parts = [as_rows(x, comm.size, one.depth) for x, one in zip(made, brings)]
            return _packed([x.reshape(comm.size, -1) for x in parts], back, (comm.size,))

        return run

    to_homes = [_packed([x.reshape(-1) for one in some for x in one.parts], there, ()) for some in of]
    came = _exchanged(comm, jax.tree.map(lambda *rows: jnp.stack(rows), *to_homes))
    made = jax.lax.switch(comm.replica_index(), [branch(*each) for each in zip(of, takes, brings)], came)
    returned = _exchanged(comm, made)
    parts: dict[int, list[Array]] = {}
    for home, some in enumerate(of):
        mine = iter(_unpacked(brings[home], {dtype: rows[home] for dtype, rows in returned.items()}))
        parts.update((one.leaf, [next(mine) for _ in one.forms]) for one in some)
    return [parts[visit.leaf] for visit in visits]


def everywhere(
    comm: Communicator, lies: Callable[[int, int], tuple[int, DeviceCut]], visits: Sequence[AtHome]
) -> list[list[Array]]:
    """Does what needs leaves whole on every replica, where a replica is several devices; inside a program.

    XLA divides the work among these devices, and may join them by a collective of all replicas. In a branch that one
    replica takes, the others would not come.

    Args:
      comm: the replicas.
      lies: (leaf, size of an array of it) → the number of rows that are cut each by itself, and the parts of it that
        the devices of a replica hold.
      visits: what is to be done, in parts of this replica.

    Returns:
      This replica's parts of what each has made.
    """

    def whole(leaf: int, x: Array, shape: tuple[int, ...]) -> Array:
        depth, cut = lies(leaf, prod(shape))

        def gather(comm: Communicator, x: Array) -> Array:
            return by_device(cut.axes, comm.all_gather, cut.rows, PartitionSpec(None, *cut.rows))(x)

        rows, sent = count_aside(comm, gather, x.astype(_wire(x)))
        add_bytes(comm, cut.parts * sent)
        return of_rows(rows, shape, depth, cut).astype(x.dtype)

    def run(one: AtHome) -> list[Array]:
        made = one.run([whole(one.leaf, x, shape) for x, shape in zip(one.parts, one.shapes)])
        return [own_part(x, comm.size, comm.replica_index(), *lies(one.leaf, x.size)) for x in made]

    return [run(one) for one in visits]


def _fullest(forms: Sequence[Sequence[Lying]]) -> dict[str, int]:
    """Dtype → how many numbers of a replica's parts go to, or come from, the home that has most of them."""
    sizes: dict[str, list[int]] = {}
    for home, some in enumerate(forms):
        for form in some:
            sizes.setdefault(_wire(form), [0] * len(forms))[home] += prod(form.dims)
    return {dtype: max(each) for dtype, each in sorted(sizes.items())}


def _packed(arrays: Sequence[Array], sizes: Mapping[str, int], dims: tuple[int, ...]) -> Packed:
    """Arrays of these dims and one more, along which they are laid, filled up to the sizes."""

    def laid(dtype: str, size: int) -> Array:
        mine = [x.astype(dtype) for x in arrays if _wire(x) == dtype]
        rest = size - sum(x.shape[-1] for x in mine)
        return jnp.concatenate([*mine, jnp.zeros((*dims, rest), dtype)], axis=-1)

    return {dtype: laid(dtype, size) for dtype, size in sizes.items()}


def _unpacked(forms: Sequence[Lying], packed: Packed) -> list[Array]:
    """The inverse of `_packed`, of parts of such arrays."""
    taken = dict.fromkeys(packed, 0)

    def take(form: Lying) -> Array:
        dtype = _wire(form)
        begin = taken[dtype]
        taken[dtype] = begin + prod(form.dims)
        part = packed[dtype][..., begin : taken[dtype]]
        return part.reshape(*part.shape[:-1], *form.dims).astype(form.dtype)

    return [take(form) for form in forms]


def _exchanged(comm: Communicator, messages: Packed) -> Packed:
    return {dtype: comm.all_to_all(rows) if rows.size else rows for dtype, rows in messages.items()}


def _wire(x: Any) -> str:
    """The dtype in which an array travels: truth values in bytes."""
    return "uint8" if x.dtype == jnp.bool_ else str(x.dtype)
