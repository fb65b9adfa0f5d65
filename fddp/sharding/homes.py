"""Work on whole leaves during a sharded update, as in Muon: each leaf has one replica as its home.

One exchange sends the parts of each leaf to its home, each replica does the work of its leaves, and
another exchange returns parts of the results to all replicas. A replica sends its parts of the
leaves and receives its parts of the results: with n replicas, 1/n of the bytes of an all-reduce.
Replicas of several devices have no homes: each of them gathers all such leaves.

Source: Graham's rule (1969), which gives each matrix to the least loaded home, as in PyTorch's
`ZeroRedundancyOptimizer`; the exchange of the distributed Muon in Microsoft's Dion.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array

from fddp.buckets import DeviceCut, by_device, of_rows, own_part, part_dims, split_into_shards
from fddp.comm import Communicator, add_bytes, count_aside
from fddp.jaxpr import AtHome

# Dtype → arrays concatenated along the last dim: the message of this dtype.
Packed: TypeAlias = dict[str, Array]


def dealt(costs: Mapping[int, int], replicas: int) -> dict[int, int]:
    """Assigns each leaf to a home: the costliest leaf first, to the least loaded replica.

    >>> dealt({0: 3, 1: 9, 2: 4, 3: 4}, 2)
    {1: 0, 2: 1, 3: 1, 0: 1}
    """
    loads = [0] * replicas
    homes = dict[int, int]()
    for leaf in sorted(costs, key=lambda leaf: (-costs[leaf], leaf)):
        homes[leaf] = loads.index(min(loads))
        loads[homes[leaf]] += costs[leaf]
    return homes


class PartLayout(NamedTuple):
    """The layout of an array in parts."""

    shape: tuple[int, ...]
    dtype: Any
    depth: int
    """Number of layers that are cut separately."""
    dims: tuple[int, ...]
    """Dims of one replica's part."""


def at_home(
    comm: Communicator,
    homes: Mapping[int, int],
    depth: Callable[[int, int], int],
    visits: Sequence[AtHome],
) -> list[list[Array]]:
    """Runs each function of a whole leaf at the leaf's home, and returns this replica's parts.

    For use inside a program. `depth` maps (leaf, size of an array of the leaf) to the number of
    layers that are cut separately.
    """
    visits_by_home = [
        [visit for visit in visits if homes[visit.leaf] == home] for home in range(comm.size)
    ]

    def lying(leaf: int, shape: tuple[int, ...], dtype: DTypeLike) -> PartLayout:
        layers = depth(leaf, prod(shape))
        return PartLayout(shape, dtype, layers, part_dims(prod(shape), comm.size, layers))

    input_layouts = [
        [lying(x.leaf, dims, part.dtype) for x in visits for part, dims in zip(x.parts, x.shapes)]
        for visits in visits_by_home
    ]
    output_layouts = [
        [lying(x.leaf, form.shape, form.dtype) for x in visits for form in x.forms]
        for visits in visits_by_home
    ]
    input_sizes = _fullest(input_layouts)
    output_sizes = _fullest(output_layouts)

    def branch(
        visits: Sequence[AtHome],
        input_layouts: Sequence[PartLayout],
        output_layouts: Sequence[PartLayout],
    ) -> Callable[[Packed], Packed]:
        def run(received: Packed) -> Packed:
            rows = zip(_unpacked(input_layouts, received), input_layouts)
            arrays = iter([of_rows(x, layout.shape, layout.depth) for x, layout in rows])
            outputs = [
                x for visit in visits for x in visit.run([next(arrays) for _ in visit.parts])
            ]
            output_rows = [
                split_into_shards(x, comm.size, layout.depth)
                for x, layout in zip(outputs, output_layouts)
            ]
            return _packed(
                [x.reshape(comm.size, -1) for x in output_rows], output_sizes, (comm.size,)
            )

        return run

    payloads = [
        _packed([x.reshape(-1) for visit in visits for x in visit.parts], input_sizes, ())
        for visits in visits_by_home
    ]
    received = _exchanged(comm, jax.tree.map(lambda *rows: jnp.stack(rows), *payloads))
    outputs = jax.lax.switch(
        comm.replica_index(),
        [branch(*args) for args in zip(visits_by_home, input_layouts, output_layouts)],
        received,
    )
    returned = _exchanged(comm, outputs)
    local_outputs: dict[int, list[Array]] = {}
    for home, home_visits in enumerate(visits_by_home):
        arrays = iter(
            _unpacked(output_layouts[home], {dtype: rows[home] for dtype, rows in returned.items()})
        )
        local_outputs.update(
            (visit.leaf, [next(arrays) for _ in visit.forms]) for visit in home_visits
        )
    return [local_outputs[visit.leaf] for visit in visits]


def everywhere(
    comm: Communicator, lies: Callable[[int, int], tuple[int, DeviceCut]], visits: Sequence[AtHome]
) -> list[list[Array]]:
    """Runs each function of a whole leaf on all replicas, and returns this replica's parts.

    For use inside a program whose replicas are several devices. XLA divides the work among these
    devices, and may join them by a collective of all replicas: in a branch of a single replica the
    collective would hang. `lies` maps (leaf, size of an array of the leaf) to the number of rows
    that are cut separately, and to the parts on the devices of a replica.
    """

    def whole(leaf: int, x: Array, shape: tuple[int, ...]) -> Array:
        depth, cut = lies(leaf, prod(shape))

        def gather(comm: Communicator, x: Array) -> Array:
            return by_device(cut.axes, comm.all_gather, cut.rows, PartitionSpec(None, *cut.rows))(x)

        rows, nbytes = count_aside(comm, gather, x.astype(_wire(x)))
        add_bytes(comm, cut.parts * nbytes)
        return of_rows(rows, shape, depth, cut).astype(x.dtype)

    def run(visit: AtHome) -> list[Array]:
        outputs = visit.run(
            [whole(visit.leaf, x, shape) for x, shape in zip(visit.parts, visit.shapes)]
        )
        return [
            own_part(x, comm.size, comm.replica_index(), *lies(visit.leaf, x.size)) for x in outputs
        ]

    return [run(visit) for visit in visits]


def _fullest(layouts: Sequence[Sequence[PartLayout]]) -> dict[str, int]:
    """Dtype → the most numbers that a replica exchanges with one home; `layouts` is by home."""
    sizes: dict[str, list[int]] = {}
    for home, home_layouts in enumerate(layouts):
        for layout in home_layouts:
            sizes.setdefault(_wire(layout), [0] * len(layouts))[home] += prod(layout.dims)
    return {dtype: max(by_home) for dtype, by_home in sorted(sizes.items())}


def _packed(arrays: Sequence[Array], sizes: Mapping[str, int], dims: tuple[int, ...]) -> Packed:
    """Concatenates arrays of dims (*dims, n) along the last dim, zero-padded to `sizes`."""

    def laid(dtype: str, size: int) -> Array:
        chosen = [x.astype(dtype) for x in arrays if _wire(x) == dtype]
        padding = size - sum(x.shape[-1] for x in chosen)
        return jnp.concatenate([*chosen, jnp.zeros((*dims, padding), dtype)], axis=-1)

    return {dtype: laid(dtype, size) for dtype, size in sizes.items()}


def _unpacked(layouts: Sequence[PartLayout], packed: Packed) -> list[Array]:
    """Splits messages into parts of arrays with these layouts: the inverse of `_packed`."""
    offsets = dict.fromkeys(packed, 0)

    def take(layout: PartLayout) -> Array:
        dtype = _wire(layout)
        begin = offsets[dtype]
        offsets[dtype] = begin + prod(layout.dims)
        part = packed[dtype][..., begin : offsets[dtype]]
        return part.reshape(*part.shape[:-1], *layout.dims).astype(layout.dtype)

    return [take(layout) for layout in layouts]


def _exchanged(comm: Communicator, messages: Packed) -> Packed:
    return {dtype: comm.all_to_all(rows) if rows.size else rows for dtype, rows in messages.items()}


def _wire(x: Array | PartLayout) -> str:
    """The dtype in which an array is sent: bool as bytes."""
    return "uint8" if x.dtype == jnp.bool_ else str(x.dtype)
