"""Groups of replicas that train together: `ProcessGroup`, `new_group` of `torch.distributed`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from fddp.comm.agreement import verify
from fddp.comm.allgatherv import CHUNK_BYTES
from fddp.comm.communicator import Communicator
from fddp.comm.host_bytes import from_bytes, from_hosted, hosted, one_array
from fddp.comm.journal import Journal
from fddp.comm.lane import Lane
from fddp.comm.levels import Levels, Nodes, blocks, by_node
from fddp.comm.objects import all_gather_object, broadcast_object
from fddp.comm.placement import Placement
from fddp.comm.recovery import Recovery
from fddp.comm.transport import Hosts, Transport
from fddp.jax_internals import without_context_mesh

REDUCTIONS: dict[str, Callable[..., Any]] = {"sum": np.add, "max": np.maximum, "min": np.minimum}


@dataclass(frozen=True)
class Group:
    """Replicas with equal parameters, and the rank of this process among theirs.

    The collectives here move host values and block; gradients travel inside a step's programs.

    Example:
      >>> import fddp
      >>> group = fddp.init()
      >>> group.all_gather(group.rank).tolist()
      [0]
    """

    rank: int
    """Number of this process in the group."""
    processes: int
    """Number of processes."""
    size: int
    """Number of replicas: processes × devices of each."""
    backend: str
    """"nccl", "gloo", "mpi" or "local"."""
    global_ranks: tuple[int, ...]
    """Numbers of the processes in the whole job, in order of rank."""
    placement: Placement
    """Devices of the replicas' programs and arrays."""
    communicator: Communicator = field(repr=False)
    """Collectives of the replicas inside a program."""
    transport: Transport = field(repr=False)
    """Collectives of the replicas between programs."""
    hosts: Hosts = field(repr=False)
    """Collectives of the processes."""
    recovery: Recovery = field(repr=False, compare=False)
    """Decides whether a step may run after an error in another step."""
    make_subgroup: "Callable[[Sequence[int]], Group]" = field(repr=False, compare=False)
    """Makes a smaller group; see `subgroup`."""
    clone: Callable[[int], tuple[Transport, ...]] = field(repr=False, compare=False)
    """`clone(count)`: makes `count` concurrent transports, or as many as the backend has."""
    levels: Levels = field(repr=False, compare=False)
    """Makes the collectives of a group with nodes; see `hierarchical`."""
    nodes: Nodes | None = None
    """Replicas of each node, if sums go over nodes first; None: over all replicas at once."""
    journal: Journal = field(default_factory=Journal, repr=False, compare=False)
    """Records the progress of this process."""
    lane: Lane = field(default_factory=Lane, repr=False, compare=False)
    """Messages that outlive their steps; shared by the groups of one world."""

    @property
    def axis_name(self) -> str | None:
        """Axis of a loss's collectives over replicas (BatchNorm's `axis_name`), on any backend."""
        return self.placement.axis_name

    @property
    def local(self) -> int | None:
        """Number of replicas per node, if sums go over nodes first; None: over all at once."""
        return None if self.nodes is None else len(self.nodes[0])

    @property
    def parts(self) -> int:
        """Number of replicas, and of shards, that make up one state: all, or those of a node."""
        return self.local or self.size

    @property
    def shard_ranks(self) -> tuple[int, ...] | None:
        """Processes that share this one's state (`Shard.ranks`); None on a mesh: arrays name it."""
        ranks = (self.global_ranks[k] for node in self.sharing if self.rank in node for k in node)
        return None if self.placement.on_mesh else tuple(ranks)

    @property
    def copy_ranks(self) -> tuple[int, ...] | None:
        """Processes that hold a copy each (`Shard.ranks`); None on a mesh."""
        return None if self.placement.on_mesh else self.global_ranks

    @property
    def sharing(self) -> Nodes:
        """Sets of replicas that share a state: the nodes, or all replicas."""
        return self.nodes or (tuple(range(self.size)),)

    @property
    def is_main(self) -> bool:
        """True on rank 0, which prints and writes for all."""
        return self.rank == 0

    def print(self, *values: Any, **options: Any) -> None:
        """Prints on rank 0 only, and flushes: a launcher reads only flushed text.

        Args:
          *values: values for Python's `print`; every rank evaluates them, collective calls
            included.
          **options: options of Python's `print`.

        Example:
          >>> import fddp
          >>> fddp.init().print("loss", 0.5, sep=" = ")
          loss = 0.5
        """
        if self.is_main:
            print(*values, **{"flush": True, **options})

    def all_gather(self, x: ArrayLike) -> np.ndarray:
        """Gathers an array of one shape and dtype from every process.

        Args:
          x: array or number.

        Returns:
          The arrays in order of rank, stacked along a new first dim.
        """
        x = one_array(x)
        with self.journal.call("all_gather", self.processes):
            rows = self.hosts.all_gather(np.frombuffer(x.tobytes(), np.uint8))
        return from_bytes(rows.tobytes(), x.dtype, (self.processes, *x.shape))

    def all_reduce(self, x: ArrayLike, op: str = "sum") -> np.ndarray:
        """Reduces an array over processes, in order of rank, to the same bits on all.

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

    @without_context_mesh
    def broadcast(self, tree: Any, root: int = 0) -> Any:
        """Copies the root's values to every process, in packed chunks of at most 64 MiB.

        Args:
          tree: arrays, of equal structure, shapes and dtypes on all processes.
          root: rank of the process with the values.

        Returns:
          The root's tree of NumPy arrays (random keys stay random keys).

        Raises:
          ValueError: `root` is no rank.
        """
        if root not in range(self.processes):
            raise ValueError(f"root must be a rank in 0..{self.processes - 1}, got {root!r}.")
        leaves, treedef = jax.tree.flatten(tree)
        arrays = [hosted(x) for x in leaves]
        data = np.frombuffer(b"".join(x.tobytes() for x in arrays), np.uint8)
        with self.journal.call("broadcast", self.processes):
            chunks = [
                self.hosts.broadcast(data[begin : begin + CHUNK_BYTES], root)
                for begin in range(0, data.size, CHUNK_BYTES)
            ]
        received = memoryview(np.concatenate([data[:0], *chunks]).tobytes())
        ends = np.cumsum([0] + [x.nbytes for x in arrays])
        values = [
            from_hosted(from_bytes(received[begin:end], x.dtype, x.shape), original)
            for original, x, begin, end in zip(leaves, arrays, ends[:-1], ends[1:])
        ]
        return jax.tree.unflatten(treedef, values)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Gathers a Python object from every process: any pickle, of any size.

        Args:
          obj: this rank's object, free of untrusted data: every reader runs the code in a pickle.

        Returns:
          The objects in order of rank, each a copy.

        Raises:
          TypeError: a rank's object cannot be pickled; on every rank.
          ValueError: a rank cannot read another's object; on every rank.

        Example:
          >>> import fddp
          >>> fddp.init().all_gather_object({"host": "node1"})
          [{'host': 'node1'}]
        """
        return all_gather_object(self, obj)

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """Copies the root's Python object to every process; see `all_gather_object`.

        Args:
          obj: the object, read on the root only.
          root: rank of the process with the object.

        Returns:
          A copy of the object, also on the root.

        Raises:
          TypeError: the object cannot be pickled; on every rank.
          ValueError: a rank cannot read it, or `root` is no rank, or unequal; on every rank.

        Example:
          >>> import fddp
          >>> fddp.init().broadcast_object({"run": "night 3"})
          {'run': 'night 3'}
        """
        return broadcast_object(self, obj, root)

    def barrier(self) -> None:
        """Waits for every process."""
        self.all_gather(np.uint8(0))

    def subgroup(self, ranks: Sequence[int]) -> "Group":
        """Makes a group of some of the processes, each of which calls it.

        Args:
          ranks: ranks of this group, including this process's, in the order of the new ranks.

        Returns:
          The smaller group.

        Raises:
          ValueError: ranks repeat, do not exist, or omit this process.
        """
        ids = [*ranks] if isinstance(ranks, Iterable) else [ranks]
        if not all(rank in range(self.processes) for rank in ids) or len(set(ids)) != len(ids):
            raise ValueError(
                f"ranks must be different numbers in 0..{self.processes - 1}, got {ranks!r}."
            )
        if self.rank not in ids:
            raise ValueError(
                f"rank {self.rank} is not in {ids}; call subgroup only on its members."
            )
        return replace(
            self.make_subgroup(list(map(int, ids))), journal=self.journal, lane=self.lane
        )

    def hierarchical(self, local: int | None = None) -> "Group":
        """Makes a group of the same replicas with sums over each node first, then between nodes.

        This is faster over Gloo with several ranks per host; NCCL and MPICH do it by themselves.
        Every process calls it. With one node, or one replica per node, sums are plain, if in
        another order. With `shard=` each node holds a whole state and gathers parameters inside the
        node (HSDP, PyTorch's HYBRID_SHARD). For shards over all replicas pass the plain group to
        the step.

        Args:
          local: consecutive replicas per node; None: those sharing memory (MPI) or a host (meshes).

        Returns:
          The group; its other collectives and its subgroups are unchanged. A replica sends the
          bytes of a plain sum, 2 (p − 1)/p of an array, counted by `info.sent`; of these 2 (m −
          1)/(m · local) cross the network of m nodes.

        Raises:
          ValueError: nodes have unequal numbers of replicas, `local` does not divide `size` or
            differs between ranks, or a replica has several devices; on every rank.

        Example:
          >>> import fddp
          >>> group = fddp.init()
          >>> group.hierarchical().size == group.size
          True
        """
        verify(self, "nodes", lambda: self._described_nodes(local))
        # Every process finds the same nodes, so either all continue or all raise.
        nodes = by_node(self.levels.find()) if local is None else blocks(local, self.size)
        comm, transport, clone = self.levels.on(nodes, None, len(self.transport.clones))
        return replace(self, nodes=nodes, communicator=comm, transport=transport, clone=clone)

    def _described_nodes(self, local: int | None) -> list[str]:
        if axes := self.placement.other_axes:
            raise ValueError(
                "a sum in two levels needs replicas of one device each, and a replica of this "
                f"group is several, along {', '.join(map(repr, axes))}."
            )
        if local is not None:
            blocks(local, self.size)
        return [f"local={local}"]
