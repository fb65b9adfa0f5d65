"""Work on whole leaves during a sharded update, as in Muon: each leaf has one replica as its home.

One exchange sends the parts of each leaf to its home, each replica does the work of its leaves, and
another exchange returns parts of the results to all replicas. A replica sends its parts of the
leaves and receives its parts of the results: with n replicas, 1/n of the bytes of an all-reduce.

Source: Graham's rule (1969), which gives each matrix to the least loaded home, as in PyTorch's
`ZeroRedundancyOptimizer`; the exchange of the distributed Muon in Microsoft's Dion.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fddp.buckets import ShardLayout
from fddp.comm import Communicator
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


class Form(NamedTuple):
    """An array in parts."""

    layout: ShardLayout
    dtype: Any


class HomeWork(NamedTuple):
    """The functions of whole leaves that one replica runs."""

    visits: list[AtHome]
    inputs: list[Form]
    """The whole arguments of all functions."""
    outputs: list[Form]
    """The whole results of all functions."""


def at_home(
    comm: Communicator,
    homes: Mapping[int, int],
    leaf_layouts: Sequence[ShardLayout],
    visits: Sequence[AtHome],
) -> list[list[Array]]:
    """Runs each function of a whole leaf at the leaf's home, and returns this replica's parts.

    For use inside a program.
    """
    works = [HomeWork([], [], []) for _ in range(comm.size)]
    for visit in visits:
        layout = leaf_layouts[visit.leaf]
        work = works[homes[visit.leaf]]
        work.visits.append(visit)
        for part, shape in zip(visit.parts, visit.shapes):
            work.inputs.append(Form(layout.of(shape), part.dtype))
        work.outputs.extend(Form(layout.of(x.shape), x.dtype) for x in visit.forms)
    input_sizes = _fullest([work.inputs for work in works])
    output_sizes = _fullest([work.outputs for work in works])

    def run(work: HomeWork, received: Packed) -> Packed:
        rows = zip(work.inputs, _unpacked(work.inputs, received))
        arrays = iter([form.layout.join(x) for form, x in rows])
        results = list[Array]()
        for visit in work.visits:
            results += visit.run([next(arrays) for _ in visit.parts])
        parts = [form.layout.split(x) for form, x in zip(work.outputs, results)]
        return _packed([x.reshape(comm.size, -1) for x in parts], output_sizes, (comm.size,))

    payloads = [
        _packed([x.reshape(-1) for visit in work.visits for x in visit.parts], input_sizes, ())
        for work in works
    ]
    received = _exchanged(comm, jax.tree.map(lambda *rows: jnp.stack(rows), *payloads))
    branches = [partial(run, work) for work in works]
    returned = _exchanged(comm, jax.lax.switch(comm.replica_index(), branches, received))
    local_outputs: dict[int, list[Array]] = {}
    for home, work in enumerate(works):
        packed = {dtype: rows[home] for dtype, rows in returned.items()}
        arrays = iter(_unpacked(work.outputs, packed))
        for visit in work.visits:
            local_outputs[visit.leaf] = [next(arrays) for _ in visit.forms]
    return [local_outputs[visit.leaf] for visit in visits]


def _fullest(forms: Sequence[Sequence[Form]]) -> dict[str, int]:
    """Dtype → the most numbers that a replica exchanges with one home; `forms` is by home."""
    sizes: dict[str, list[int]] = {}
    for home, home_forms in enumerate(forms):
        for form in home_forms:
            sizes.setdefault(_wire(form.dtype), [0] * len(forms))[home] += prod(form.layout.dims)
    return {dtype: max(by_home) for dtype, by_home in sorted(sizes.items())}


def _packed(arrays: Sequence[Array], sizes: Mapping[str, int], dims: tuple[int, ...]) -> Packed:
    """Concatenates arrays of dims (*dims, n) along the last dim, zero-padded to `sizes`."""

    def laid(dtype: str, size: int) -> Array:
        chosen = [x.astype(dtype) for x in arrays if _wire(x.dtype) == dtype]
        padding = size - sum(x.shape[-1] for x in chosen)
        return jnp.concatenate([*chosen, jnp.zeros((*dims, padding), dtype)], axis=-1)

    return {dtype: laid(dtype, size) for dtype, size in sizes.items()}


def _unpacked(forms: Sequence[Form], packed: Packed) -> list[Array]:
    """Splits messages into parts of arrays of these forms: the inverse of `_packed`."""
    offsets = dict.fromkeys(packed, 0)
    parts = list[Array]()
    for layout, dtype in forms:
        wire = _wire(dtype)
        begin = offsets[wire]
        offsets[wire] = begin + prod(layout.dims)
        part = packed[wire][..., begin : offsets[wire]]
        parts.append(part.reshape(*part.shape[:-1], *layout.dims).astype(dtype))
    return parts


def _exchanged(comm: Communicator, messages: Packed) -> Packed:
    nonempty = {dtype: comm.all_to_all(rows) for dtype, rows in messages.items() if rows.size}
    return messages | nonempty


def _wire(dtype: Any) -> str:
    """The dtype in which an array is sent: bool as bytes."""
    return "uint8" if dtype == jnp.bool_ else str(dtype)
