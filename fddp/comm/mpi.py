"""Replicas that are ranks of an MPI communicator, one device each; traffic goes through mpi4jax and mpi4py."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import UInt8

from fddp.comm.communicator import mpi_communicator, mpi_word
from fddp.comm.landing import landing
from fddp.comm.member import EVERYWHERE, WHOLE, Bytes, Member, placed
from fddp.comm.recovery import Recovery, mpi_meet

MESSAGES = 4
FIRST_WAIT_S, LONGEST_WAIT_S = 2e-5, 5e-4


def mpi_member(comm: Any) -> Member:
    """A member that is one rank of an MPI communicator, with one device; traffic goes through mpi4jax.

    Args:
      comm: an mpi4py communicator. It is cloned, so that the messages inside of programs (mpi4jax), those between
        programs, those of the hosts and the user's own never meet.

    Returns:
      The member.
    """
    from mpi4py import MPI

    wire, hosts, between = comm.Clone(), comm.Clone(), comm.Clone()
    device, like = jax.local_devices()[0], landing()
    here = jax.sharding.SingleDeviceSharding(device)

    def program(f: Callable, in_specs: Any, out_specs: Any, donate: Sequence[int] = ()) -> jax.stages.Wrapped:
        del in_specs, out_specs  # one device a process: equal everywhere and its own are the same array
        return jax.jit(f, donate_argnums=tuple(donate))

    def reduce(x: jax.Array) -> jax.Array:
        if comm.size == 1:
            return x
        # mpi4jax's own call spins on a core that the backward pass needs; MPI's nonblocking call, asked less and less
        # often, leaves it free. In several messages one is on the wire while another is being added up.
        sent = jax.device_get(mpi_word(x))
        received = like(sent)
        parts = zip(np.array_split(sent, MESSAGES), np.array_split(received, MESSAGES))
        requests = [between.Iallreduce(mine, total, op=MPI.SUM) for mine, total in parts]
        wait = FIRST_WAIT_S
        while not MPI.Request.Testall(requests):
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_S)
        return jax.device_put(received, device).astype(x.dtype)

    def place(tree: Any, spec: PartitionSpec) -> Any:
        del spec
        return jax.tree.map(partial(placed, sharding=here), tree)

    def gather(data: Bytes) -> UInt8[np.ndarray, "processes n"]:
        rows = np.empty((hosts.size, data.size), np.uint8)
        hosts.Allgather(np.ascontiguousarray(data), rows)
        return rows

    def send(data: Bytes, root: int) -> Bytes:
        data = np.array(data)
        hosts.Bcast(data, root=root)
        return data

    return Member(
        axis_name=None,
        own=EVERYWHERE,
        share=1,
        crowded=False,
        view=WHOLE,
        spec=lambda x: EVERYWHERE,
        program=program,
        communicator=mpi_communicator(wire),
        reduce=reduce,
        place=place,
        feed=lambda rows: rows,
        gather=gather,
        send=send,
        recovery=Recovery(mpi_meet(comm.Clone())),
    )
