"""Groups of the ranks of an MPI communicator, one device each, over mpi4jax and mpi4py.

MPI runs the collectives of a loss inside the programs of the ranks.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import UInt8

from fddp.comm.communicator import mpi_communicator, opaque_rank
from fddp.comm.donation import Donation
from fddp.comm.group import Group
from fddp.comm.lane_thread import library
from fddp.comm.loss_collectives import Subsets, has_collectives, run_translated
from fddp.comm.mpi_transport import mpi_send
from fddp.comm.placement import AXIS, NO_AXES, REPLICATED, Placement, placed, placed_alike, trace
from fddp.comm.program_lane import lanes
from fddp.comm.transport import Bytes, Hosts, Transport
from fddp.jax_internals import CPU_OPTIONS, named_like, without_jit
from fddp.wording import check_has


def mpi_group(comm: Any) -> Group:
    """Makes a group of the ranks of an mpi4py communicator, one device each.

    Args:
      comm: the communicator; the group uses clones of it.

    Returns:
      The group.

    Raises:
      RuntimeError: this process has several devices.
    """
    if jax.local_device_count() > 1:
        raise RuntimeError(
            "backend 'mpi' drives one device per process, and this process has "
            f"{jax.local_device_count()}: start one process per device, or use backend 'gloo'."
        )
    check_has("Clone", "mpi_group: comm", comm, "a communicator of mpi4py")

    # Each kind of message has a communicator, so that two kinds never meet: messages inside
    # programs (mpi4jax), of a loss, of the hosts, of each lane, and the user's.
    in_lanes = None
    if library() and comm.size > 1 and jax.default_backend() == "cpu":
        placement = rank_placement(comm.size)
        index = partial(opaque_rank, comm.rank)
        in_lanes = lanes(placement, comm.rank, index, lambda: mpi_send(comm.Clone()))
    communicator = mpi_communicator(comm.Clone())
    hosts = mpi_hosts(comm.Clone())
    return Group(
        rank=comm.rank,
        size=comm.size,
        backend="mpi",
        placement=mpi_placement(comm.Clone()),
        communicator=communicator,
        transport=Transport(in_lanes),
        hosts=hosts,
        make_subgroup=lambda ranks: mpi_group(
            comm.Create_group(comm.Get_group().Incl(list(ranks)))
        ),
    )


def mpi_hosts(comm: Any) -> Hosts:
    """Makes the collectives of hosts on an mpi4py communicator without other users."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD.Get_group()
    ranks = tuple(MPI.Group.Translate_ranks(comm.Get_group(), None, world))

    def all_gather(data: Bytes) -> UInt8[np.ndarray, "processes n"]:
        rows = np.empty((comm.size, data.size), np.uint8)
        comm.Allgather(np.ascontiguousarray(data), rows)
        return rows

    def broadcast(data: Bytes, root: int) -> Bytes:
        data = np.array(data)
        comm.Bcast(data, root=root)
        return data

    return Hosts(ranks, all_gather, broadcast)


def mpi_placement(comm: Any) -> Placement:
    """Makes the placement of one device per process, without a mesh."""
    plain = rank_placement(comm.size)
    subsets = Subsets(comm.rank, mpi_communicator(comm))

    def program(
        f: Callable, in_specs: Any, out_specs: Any, donate: Sequence[int] = ()
    ) -> jax.stages.Wrapped:
        @named_like(f)
        def run(*args: Any) -> Any:
            closed, shapes = trace(plain, f, *args)
            if without_jit() and not has_collectives(closed.jaxpr, AXIS):
                return f(*args)  # with concrete values, not tracers
            outputs = run_translated(closed, AXIS, subsets, *jax.tree.leaves(args))
            return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

        return plain.program(run, in_specs, out_specs, donate)

    return plain._replace(program=program)


def rank_placement(size: int) -> Placement:
    """Makes the placement of one device in each process, for programs without messages."""
    device = jax.local_devices()[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    options = CPU_OPTIONS if device.platform == "cpu" else None

    def program(
        f: Callable, in_specs: Any, out_specs: Any, donate: Sequence[int] = ()
    ) -> jax.stages.Wrapped:
        # Where no argument is read, JAX would leave the results uncommitted, such as the moments of
        # a first state; and the second step, whose arguments are all committed, would compile anew.
        return jax.jit(
            f, donate_argnums=tuple(donate), compiler_options=options, out_shardings=sharding
        )

    return Placement(
        axis_name=AXIS,
        axis_size=size,
        on_mesh=False,
        per_replica=REPLICATED,
        shares_cores=False,
        overlaps=False,
        view=NO_AXES,
        spec=lambda x: REPLICATED,
        program=program,
        place=lambda tree, spec: placed_alike(tree, sharding),
        donation=Donation(sharding),
        per_device=lambda x: (x,),
        join_devices=lambda arrays, spec: arrays[0],
        as_program_rows=partial(
            jax.tree.map, lambda x: placed(x, sharding) if isinstance(x, jax.Array) else x
        ),
    )
