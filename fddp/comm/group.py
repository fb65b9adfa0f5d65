"""The replicas that train together: who they are, and what their hosts can say to each other.

Source: `ProcessGroup` and `new_group` in `torch.distributed`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fddp.comm.member import EVERYWHERE, Member
from fddp.comm.mesh import mesh_member
from fddp.comm.mpi import mpi_member

AXIS = "replica"
CHUNK_BYTES = 64 * 2**20
REDUCTIONS: dict[str, Callable[..., Any]] = {"sum": np.add, "max": np.maximum, "min": np.minimum}


@dataclass(frozen=True)
class Group:
    """Replicas with equal parameters, and this process's place among them.

    The collectives here move host values and block; the gradients' traffic is inside the step's programs.

    Example:
      >>> import fddp
      >>> group = fddp.init()
      >>> group.all_gather(group.rank).tolist()
      [0]
    """

    rank: int
    """This process."""
    processes: int
    """Number of processes."""
    size: int
    """Number of replicas: processes × devices of each."""
    backend: str
    """"nccl", "gloo", "mpi" or "local"."""
    member: Member = field(repr=False)
    """What carries this group's programs and messages."""
    cut: "Callable[[Sequence[int]], Group]" = field(repr=False, compare=False)
    """Makes a smaller group; see `subgroup`."""
    world: tuple[int, ...]
    """The processes in order of rank, by their number in the whole job."""
    beside: Callable[[int], tuple[Member, ...]] = field(repr=False, compare=False)
    """Members that can sum side by side between programs: so many, or fewer where the backend has no more."""

    @property
    def axis_name(self) -> str | None:
        """The axis for collectives inside a loss (BatchNorm's `axis_name`); None under MPI, which has no mesh."""
        return self.member.axis_name

    def all_gather(self, x: Any) -> np.ndarray:
        """Collects an array of one shape and dtype from every process.

        Args:
          x: array or number.

        Returns:
          The arrays in order of rank, stacked along a new first dim.
        """
        x = np.asarray(x)
        rows = self.member.gather(np.frombuffer(x.tobytes(), np.uint8))
        return _from_bytes(rows.tobytes(), x.dtype, (self.processes, *x.shape))

    def all_reduce(self, x: Any, op: str = "sum") -> np.ndarray:
        """Reduces an array over processes, in order of rank, so that all get the same bits.

        Args:
          x: array or number of one shape and dtype on every process.
          op: "sum", "max" or "min".

        Returns:
          The reduced array.

        Raises:
          ValueError: another `op`.
        """
        if op not in REDUCTIONS:
            raise ValueError(f"op must be one of {', '.join(REDUCTIONS)}, got {op!r}.")
        return reduce(REDUCTIONS[op], self.all_gather(x))

    def broadcast(self, tree: Any, root: int = 0) -> Any:
        """Gives every process the root's values, in packed chunks of at most 64 MiB.

        Args:
          tree: arrays, of the same structure, shapes and dtypes on every process.
          root: rank whose values count.

        Returns:
          The root's tree, as numpy arrays (random keys stay random keys).

        Raises:
          ValueError: there is no such rank.
        """
        if not 0 <= root < self.processes:
            raise ValueError(f"root must be a rank in 0..{self.processes - 1}, got {root}.")
        leaves, treedef = jax.tree.flatten(tree)
        hosted = [_hosted(x) for x in leaves]
        data = np.frombuffer(b"".join(x.tobytes() for x in hosted), np.uint8)
        chunks = [self.member.send(data[at : at + CHUNK_BYTES], root) for at in range(0, data.size, CHUNK_BYTES)]
        received = memoryview(np.concatenate([data[:0], *chunks]).tobytes())
        ends = np.cumsum([0] + [x.nbytes for x in hosted])
        values = [
            _like(original, _from_bytes(received[begin:end], x.dtype, x.shape))
            for original, x, begin, end in zip(leaves, hosted, ends[:-1], ends[1:])
        ]
        return jax.tree.unflatten(treedef, values)

    def barrier(self) -> None:
        """Waits until every process is here."""
        self.all_gather(np.uint8(0))

    def subgroup(self, ranks: Sequence[int]) -> "Group":
        """Cuts out a group of some of the processes; every one of them calls it, and nobody else needs to.

        Args:
          ranks: ranks of this group, this process's among them; they are numbered anew in this order.

        Returns:
          The smaller group.

        Raises:
          ValueError: ranks repeat, do not exist, or leave this process out.
        """
        ranks = [int(rank) for rank in ranks]
        if len(set(ranks)) != len(ranks) or not all(0 <= rank < self.processes for rank in ranks):
            raise ValueError(f"ranks must be different numbers in 0..{self.processes - 1}, got {ranks}.")
        if self.rank not in ranks:
            raise ValueError(f"rank {self.rank} is not in {ranks}; call subgroup only on its members.")
        return self.cut(ranks)


def mesh_group(mesh: Mesh, axis_name: str = AXIS) -> Group:
    """Makes a group of the replicas along one axis of the user's own mesh.

    Where the mesh has other axes, a replica is all devices at one place of the axis, and the parameters of `step.init`
    stay placed along them as the user placed them (tensor parallelism): XLA partitions the loss as under `jax.jit`,
    and gradients are summed over this axis alone, each device sending the parts that it holds.

    Args:
      mesh: a mesh over devices of one or several processes.
      axis_name: the axis over which replicas lie.

    Returns:
      The group.

    Raises:
      ValueError: the mesh has no such axis, or a replica is spread over several processes.

    Example:
      >>> import jax, fddp
      >>> fddp.mesh_group(jax.sharding.Mesh(jax.devices(), "replica")).size == jax.device_count()
      True
    """
    if axis_name not in mesh.axis_names:
        raise ValueError(f"the mesh has axes {', '.join(map(str, mesh.axis_names))}, none is {axis_name!r}.")
    axis = mesh.axis_names.index(axis_name)
    replicas = np.moveaxis(mesh.devices, axis, 0).reshape(mesh.shape[axis_name], -1)
    owners = [{device.process_index for device in replica} for replica in replicas]
    for number, found in enumerate(owners):
        if len(found) > 1:
            raise ValueError(
                f"replica {number} of the axis {axis_name!r} is spread over processes {sorted(found)}, and a process "
                "brings the rows of whole replicas: let the other axes of the mesh lie inside of processes."
            )
    owner = [process for (process,) in owners]
    processes = list(dict.fromkeys(owner))
    if jax.process_index() not in processes:
        raise ValueError(
            f"the mesh has devices of processes {sorted(processes)}, none of this one, {jax.process_index()}: only "
            "those that take part make a group of it."
        )
    platform = mesh.devices.flat[0].platform

    def cut(ranks: Sequence[int]) -> Group:
        chosen = [at for rank in ranks for at, process in enumerate(owner) if process == processes[rank]]
        devices = np.take(mesh.devices, chosen, axis)
        return mesh_group(Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types), axis_name)

    def beside(count: int) -> tuple[Member, ...]:
        # Several devices of a process, reached by programs of several threads in different orders, wait for each other.
        turns = min(count, len(processes)) if len(processes) == mesh.size else 1
        return tuple(_turned(mesh, member, turn) if turn else member for turn in range(turns))

    member = mesh_member(mesh, axis_name)
    return Group(
        rank=processes.index(jax.process_index()),
        processes=len(processes),
        size=mesh.shape[axis_name],
        backend="local" if len(processes) == 1 else "gloo" if platform == "cpu" else "nccl",
        member=member,
        cut=cut,
        world=tuple(processes),
        beside=beside,
    )


def mpi_group(comm: Any) -> Group:
    """Makes a group of the ranks of an mpi4py communicator, one device each.

    Args:
      comm: the communicator; it is cloned.

    Returns:
      The group.

    Raises:
      RuntimeError: this process has several devices.
    """
    if jax.local_device_count() > 1:
        raise RuntimeError(
            f"backend 'mpi' drives one device a process, and this one has {jax.local_device_count()}: start one "
            "process per device, or use backend 'gloo'."
        )

    def cut(ranks: Sequence[int]) -> Group:
        return mpi_group(comm.Create_group(comm.Get_group().Incl(list(ranks))))

    def beside(count: int) -> tuple[Member, ...]:
        return (member, *(mpi_member(comm) for _ in range(count - 1)))

    from mpi4py import MPI

    whole, ranks, member = MPI.COMM_WORLD.Get_group(), comm.Get_group(), mpi_member(comm)
    world = tuple(MPI.Group.Translate_ranks(ranks, None, whole))
    return Group(comm.rank, comm.size, comm.size, "mpi", member, cut, world, beside)


def replica_mesh(devices: Sequence[Any]) -> Mesh:
    """A mesh of one axis over devices."""
    return Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))


def _turned(mesh: Mesh, member: Member, turn: int) -> Member:
    """The member with sums over the same devices in a cyclically later order.

    XLA keeps one Gloo communicator for each order of devices, and on one communicator two sums at once mix, without an
    error. Sums of floats may differ in the last bits, equally on all ranks.
    """
    ring = Mesh(np.roll(mesh.devices.reshape(-1), -turn).reshape(mesh.devices.shape), mesh.axis_names)
    other = mesh_member(ring, member.axis_name or AXIS)

    def there(x: jax.Array, home: Mesh, spec: PartitionSpec) -> jax.Array:
        """What this process has of an array, as part of one over the devices in another order."""
        parts = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, NamedSharding(home, spec), parts)

    def reduce(x: jax.Array) -> jax.Array:
        return there(other.reduce(there(x, ring, member.own)), mesh, EVERYWHERE)

    return member._replace(reduce=reduce)


def _hosted(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(x))
    return np.asarray(x)


def _like(original: Any, value: np.ndarray) -> Any:
    if isinstance(original, jax.Array) and jnp.issubdtype(original.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.asarray(value), impl=jax.random.key_impl(original))
    return value


def _from_bytes(data: Any, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(data, dtype).reshape(shape).copy()
