"""Sums in two levels: inside every host first, and then between the hosts.

Each replica sums a part of the array over its host, sums that part over the replicas at its
position on the other hosts, and receives the other parts from its host. Each part is summed once,
so all replicas have the same bits.

Source: `HOROVOD_HIERARCHICAL_ALLREDUCE` in Horovod.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from fddp.comm.agreement import verify
from fddp.comm.communicator import add_rows, mpi_word
from fddp.comm.placement import REPLICATED
from fddp.comm.program_lane import mesh_lanes
from fddp.comm.rank_connections import host_keys

if TYPE_CHECKING:  # a group makes one with two levels
    from fddp.comm.group import Group


def hierarchical(group: "Group", local: int | None) -> "Group":
    placement = group.placement
    verify(group, "hosts", lambda: _described(group, local))
    if not placement.on_mesh or placement.overlaps:  # MPI and NCCL do it by themselves
        return group
    # Every process finds the same hosts, so either all continue or all raise.
    labels: Sequence[Hashable] = [number // (local or 1) for number in range(group.size)]
    if local is None:
        keys = host_keys(group)
        devices = placement.place(np.zeros(()), REPLICATED).sharding.mesh.devices.flat
        labels = [keys[group.global_ranks.index(x.process_index)] for x in devices]
    hosts = by_label(labels)
    if 1 in (len(hosts), len(hosts[0])):
        return group
    all_reduce = partial(two_level_sum, str(placement.axis_name), hosts)
    communicator = replace(group.communicator, all_reduce=all_reduce)
    in_lanes = None
    if group.transport.in_lanes:
        levels = [ranks for ranks in (*hosts, *zip(*hosts)) if group.rank in ranks]
        in_lanes = mesh_lanes(placement, group.rank, group.hosts, levels)
    transport = group.transport._replace(in_lanes=in_lanes, local=len(hosts[0]))
    return replace(group, communicator=communicator, transport=transport)


def two_level_sum(axis: str, hosts: Sequence[Sequence[int]], x: Shaped[Array, " n"]) -> Array:
    """Sums an array over the replicas along an axis, inside a program; rounds 16 bits once."""
    local = len(hosts[0])
    rows = jnp.pad(x.reshape(-1), (0, -x.size % local)).reshape(local, -1)
    part = add_rows(mpi_word(jax.lax.all_to_all(rows, axis, 0, 0, axis_index_groups=hosts)))
    same_position = tuple(zip(*hosts))
    total = jax.lax.psum(part, axis, axis_index_groups=same_position).astype(x.dtype)
    whole = jax.lax.all_gather(total, axis, axis_index_groups=hosts)
    return whole.reshape(-1)[: x.size].reshape(x.shape)


def _described(group: "Group", local: int | None) -> list[str]:
    if axes := group.placement.other_axes:
        raise ValueError(
            "a sum in two levels needs replicas of one device each, and a replica of this "
            f"group is several, along {', '.join(map(repr, axes))}."
        )
    whole = isinstance(local, int) and not isinstance(local, bool) and local > 0
    if local is not None and (not whole or group.size % local):
        raise ValueError(
            "local must be the number of replicas of a host, equal on all hosts, so a divisor of "
            f"the {group.size} of this group; got {local!r}."
        )
    return [f"local={local}"]


def by_label(labels: Sequence[Hashable]) -> tuple[tuple[int, ...], ...]:
    """Lists the replicas of each host from the labels of all replicas' hosts."""
    replicas = defaultdict[Hashable, list[int]](list)
    for replica, label in enumerate(labels):
        replicas[label].append(replica)
    hosts = tuple(map(tuple, replicas.values()))
    if len(sizes := sorted(set(map(len, hosts)))) > 1:
        raise ValueError(
            f"the {len(labels)} replicas of this group lie on {len(hosts)} hosts, on one "
            f"{sizes[0]} and on another {sizes[-1]}, and a sum in two levels needs the same "
            "number on each: start the same number, or give local=, the replicas that count as a "
            "host."
        )
    return hosts
