"""Work on whole leaves during a sharded update, as in Muon: each leaf has one replica as its owner.

One exchange sends the parts of each leaf to its owner, each replica does the work of its leaves,
and another exchange returns parts of the results to all replicas. A replica sends its parts of the
leaves and receives its parts of the results: with n replicas, 1/n of the bytes of an all-reduce.

Source: Graham's rule (1969), which gives each matrix to the least loaded owner, as in PyTorch's
`ZeroRedundancyOptimizer`; the exchange of the distributed Muon in Microsoft's Dion.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fddp.buckets import ShardLayout
from fddp.comm import Communicator
from fddp.jaxpr import LeafWork, RunWhole


def dealt(costs: Mapping[int, int], replicas: int) -> dict[int, int]:
    """Assigns an owner to each leaf: the costliest leaf first, to the least loaded replica."""
    loads = [0] * replicas
    owners = dict[int, int]()
    for leaf in sorted(costs, key=lambda leaf: (-costs[leaf], leaf)):
        owners[leaf] = loads.index(min(loads))
        loads[owners[leaf]] += costs[leaf]
    return owners


def at_owners(
    comm: Communicator,
    leaf_layouts: Sequence[ShardLayout],
    works: Sequence[LeafWork],
    local_parts: Sequence[Sequence[Array]],
    run_whole: RunWhole,
) -> list[list[Array]]:
    """Runs the work on each leaf at its owner, and returns this replica's parts of the results.

    For use inside a program.
    """
    owners = dealt({x.leaf: prod(leaf_layouts[x.leaf].shape) for x in works}, comm.size)
    by_owner = [[x for x in works if owners[x.leaf] == owner] for owner in range(comm.size)]
    parts_of = {work.leaf: parts for work, parts in zip(works, local_parts)}

    def layout(work: LeafWork, x: Any) -> ShardLayout:
        return leaf_layouts[work.leaf].of(x.aval.shape)

    def part(work: LeafWork, x: Any) -> jax.ShapeDtypeStruct:
        shape = x.aval.shape if x.aval.size == 1 else layout(work, x).dims
        return jax.ShapeDtypeStruct(shape, x.aval.dtype)

    inputs = [[x for work in own for x in parts_of[work.leaf]] for own in by_owner]
    outputs = [[part(work, x) for work in own for x in work.outputs] for own in by_owner]
    width = min(4, *(x.dtype.itemsize for own in (*inputs, *outputs) for x in own))

    def words(x: Any) -> int:
        return x.size * x.dtype.itemsize // width

    def packed(by_owner: Sequence[Sequence[Any]], rows: int, arrays: Sequence[Array]) -> Array:
        """Concatenates arrays of `rows` parts as words, padded to the fullest owner's message."""
        flat = [x.reshape(rows, -1).view(f"uint{8 * width}") for x in arrays]
        padding = max(sum(map(words, own)) for own in by_owner) - sum(x.shape[1] for x in flat)
        return jnp.concatenate([*flat, jnp.zeros((rows, padding), f"uint{8 * width}")], axis=1)

    def unpacked(parts: Sequence[Any], rows: Array) -> list[Array]:
        pieces = jnp.split(rows, np.cumsum(list(map(words, parts))), axis=1)
        shapes = [(len(rows), *like.shape) for like in parts]
        return [x.view(like.dtype).reshape(s) for x, like, s in zip(pieces, parts, shapes)]

    def run(own: Sequence[LeafWork], parts: Sequence[Array], rows: Array) -> Array:
        """Runs an owner's work on the parts of all replicas; returns the parts of its results."""
        gathered = iter(unpacked(parts, rows))
        results = list[Array]()
        for work in own:
            arrays = [layout(work, x).join(next(gathered)) for x in work.inputs]
            for x, array in zip(work.outputs, run_whole(work, arrays)):
                results.append(layout(work, x).split(array))
        return packed(outputs, comm.size, results)

    received = comm.all_to_all(jnp.concatenate([packed(inputs, 1, parts) for parts in inputs]))
    branches = [partial(run, *pair) for pair in zip(by_owner, inputs)]
    returned = comm.all_to_all(jax.lax.switch(comm.replica_index(), branches, received))
    new_parts: dict[int, list[Array]] = {}
    for own, parts, row in zip(by_owner, outputs, returned):
        arrays = iter(unpacked(parts, row[None]))
        new_parts |= {work.leaf: [next(arrays)[0] for _ in work.outputs] for work in own}
    return [new_parts[work.leaf] for work in works]
