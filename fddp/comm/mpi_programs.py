"""The placement of MPI ranks: MPI runs the collectives of a loss inside their programs."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from fddp.comm.communicator import mpi_communicator
from fddp.comm.donation import Donation
from fddp.comm.loss_collectives import has_collectives, run_translated
from fddp.comm.mpi_loss_collectives import rank_words
from fddp.comm.placement import (
    AXIS,
    NO_AXES,
    REPLICATED,
    Placement,
    placed,
    placed_alike,
    trace,
)
from fddp.jax_internals import CPU_OPTIONS, named_like, without_jit


def mpi_placement(comm: Any) -> Placement:
    """Makes the placement of one device per process, without a mesh."""
    plain = rank_placement(comm.size)
    words = rank_words(comm.rank, comm.size, mpi_communicator(comm))

    def program(
        f: Callable, in_specs: Any, out_specs: Any, donate: Sequence[int] = ()
    ) -> jax.stages.Wrapped:
        @named_like(f)
        def run(*args: Any) -> Any:
            closed, shapes = trace(plain, f, *args)
            if without_jit() and not has_collectives(closed.jaxpr, AXIS):
                return f(*args)  # with concrete values, not tracers
            return jax.tree.unflatten(
                jax.tree.structure(shapes),
                run_translated(closed, jax.tree.leaves(args), AXIS, words),
            )

        return plain.program(run, in_specs, out_specs, donate)

    return plain._replace(program=program)


def rank_placement(size: int) -> Placement:
    """Makes the placement of one device in each of `size` processes, for programs without
    messages."""
    device = jax.local_devices()[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    options = CPU_OPTIONS if device.platform == "cpu" else None

    def program(
        f: Callable, in_specs: Any, out_specs: Any, donate: Sequence[int] = ()
    ) -> jax.stages.Wrapped:
        del in_specs, out_specs
        # Where no argument is read, JAX would leave the results uncommitted, such as the moments of
        # a first state; and the second step, whose arguments are all committed, would compile anew.
        return jax.jit(
            f, donate_argnums=tuple(donate), compiler_options=options, out_shardings=sharding
        )

    def place(tree: PyTree, spec: PartitionSpec) -> Any:
        del spec
        return placed_alike(tree, sharding)

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
        place=place,
        donation=Donation(sharding),
        per_device=lambda x: (x,),
        join_devices=lambda arrays, spec: arrays[0],
        as_program_rows=partial(
            jax.tree.map, lambda x: placed(x, sharding) if isinstance(x, jax.Array) else x
        ),
    )
