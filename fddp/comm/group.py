"""The group of replicas that train together, and the collectives of its hosts.

Source: `ProcessGroup` and `new_group` in `torch.distributed`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import jax
import numpy as np

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
    """Replicas with equal parameters, and this process's place among them.

    The collectives here move host values and block; the gradients' traffic is inside the step's programs.

    Example:
      >>> import fddp
      >>> group = fddp.init()
      >>> group.all_gather(group.rank).tolist()
      [0]
    """

    rank: int
    """This process's place among the group's processes."""
    processes: int
    """Number of processes."""
    size: int
    """Number of replicas: processes × devices of each."""
    backend: str
    """"nccl", "gloo", "mpi" or "local"."""
    global_ranks: tuple[int, ...]
    """The processes in order of rank, by their number in the whole job."""
    placement: Placement
    """The devices on which its replicas' programs run, and their arrays lie."""
    communicator: Communicator = field(repr=False)
    """Collectives of its replicas inside a program."""
    transport: Transport = field(repr=False)
    """Collectives that move its replicas' arrays between programs."""
    hosts: Hosts = field(repr=False)
    """Collectives of its processes."""
    recovery: Recovery = field(repr=False, compare=False)
    """Decides whether a step may run after an error inside another."""
    make_subgroup: "Callable[[Sequence[int]], Group]" = field(repr=False, compare=False)
    """Makes a smaller group; see `subgroup`."""
    clone: Callable[[int], tuple[Transport, ...]] = field(repr=False, compare=False)
    """Makes as many transports that work side by side, or fewer where the backend has no more."""
    levels: Levels = field(repr=False, compare=False)
    """Makes the collectives of a group that sums over nodes first; see `hierarchical`."""
    nodes: Nodes | None = None
    """The replicas of each node, where sums go over nodes first; None: a sum goes over all replicas at once."""
    journal: Journal = field(default_factory=Journal, repr=False, compare=False)
    """Notes what this process does, step by step."""
    lane: Lane = field(default_factory=Lane, repr=False, compare=False)
    """The messages that its steps leave under way; groups of one world share it."""

    @property
    def axis_name(self) -> str | None:
        """The replicas' axis, for collectives inside a loss (BatchNorm's `axis_name`); on every backend."""
        return self.placement.axis_name

    @property
    def local(self) -> int | None:
        """Replicas of a node, where sums go over nodes first; None: a sum goes over all replicas at once."""
        return None if self.nodes is None else len(self.nodes[0])

    @property
    def parts(self) -> int:
        """Number of replicas that share a state, and of the parts that they cut it into: all, or those of a node."""
        return self.local or self.size

    @property
    def shard_ranks(self) -> tuple[int, ...] | None:
        """The processes that share a state with this one (`Shard.ranks`); None on a mesh, which its arrays name."""
        mine = (self.global_ranks[k] for node in self.sharing if self.rank in node for k in node)
        return None if self.placement.on_mesh else tuple(mine)

    @property
    def copy_ranks(self) -> tuple[int, ...] | None:
        """The processes that each hold a copy (`Shard.ranks`); None on a mesh."""
        return None if self.placement.on_mesh else self.global_ranks

    @property
    def sharing(self) -> Nodes:
        """The replicas of each set that shares a state: those of each node, or all."""
        return self.nodes or (tuple(range(self.size)),)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes for all."""
        return self.rank == 0

    def print(self, *values: Any, **options: Any) -> None:
        """Prints on rank 0 alone, and flushes: a launcher reads only what a script has flushed.

        Every rank evaluates the arguments, so a collective call may stand among them.

        Args:
          *values: as for Python's own `print`.
          **options: likewise.

        Example:
          >>> import fddp
          >>> fddp.init().print("loss", 0.5, sep=" = ")
          loss = 0.5
        """
        if self.is_main:
            print(*values, **{"flush": True, **options})

    def all_gather(self, x: Any) -> np.ndarray:
        """Collects an array of one shape and dtype from every process.

        Args:
          x: array or number.

        Returns:
          The arrays in order of rank, stacked along a new first dim.
        """
        x = one_array(x)
        with self.journal.call("all_gather", self.processes):
            rows = self.hosts.all_gather(np.frombuffer(x.tobytes(), np.uint8))
        return from_bytes(rows.tobytes(), x.dtype, (self.processes, *x.shape))

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

    @without_context_mesh
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
        if root not in range(self.processes):
            raise ValueError(f"root must be a rank in 0..{self.processes - 1}, got {root!r}.")
        leaves, treedef = jax.tree.flatten(tree)
        there = [hosted(x) for x in leaves]
        data = np.frombuffer(b"".join(x.tobytes() for x in there), np.uint8)
        with self.journal.call("broadcast", self.processes):
            chunks = [
                self.hosts.broadcast(data[at : at + CHUNK_BYTES], root) for at in range(0, data.size, CHUNK_BYTES)
            ]
        received = memoryview(np.concatenate([data[:0], *chunks]).tobytes())
        ends = np.cumsum([0] + [x.nbytes for x in there])
        values = [
            from_hosted(from_bytes(received[begin:end], x.dtype, x.shape), original)
            for original, x, begin, end in zip(leaves, there, ends[:-1], ends[1:])
        ]
        return jax.tree.unflatten(treedef, values)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Collects an object from every process: anything that can be pickled, of any size on each.

        A pickle is a program that its reader runs. The ranks of one job trust each other; data from anybody else does
        not belong here.

        Args:
          obj: this rank's object.

        Returns:
          The objects, in order of rank; this rank's is a copy, too.

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
        """Gives every process the root's object: anything that can be pickled; see `all_gather_object`.

        Args:
          obj: the root's object counts; the others may give None.
          root: rank whose object counts.

        Returns:
          The object; the root's is a copy, too.

        Raises:
          TypeError: it cannot be pickled; on every rank.
          ValueError: a rank cannot read it, there is no such root, or ranks name different ones; on every rank.

        Example:
          >>> import fddp
          >>> fddp.init().broadcast_object({"run": "night 3"})
          {'run': 'night 3'}
        """
        return broadcast_object(self, obj, root)

    def barrier(self) -> None:
        """Waits until every process is here."""
        self.all_gather(np.uint8(0))

    def subgroup(self, ranks: Sequence[int]) -> "Group":
        """Makes a group of some of the processes; each of them calls it, and the others need not.

        Args:
          ranks: ranks of this group, this process's among them; they are numbered anew in this order.

        Returns:
          The smaller group.

        Raises:
          ValueError: ranks repeat, do not exist, or leave this process out.
        """
        numbers = [*ranks] if isinstance(ranks, Iterable) else [ranks]
        if not all(rank in range(self.processes) for rank in numbers) or len(set(numbers)) != len(numbers):
            raise ValueError(f"ranks must be different numbers in 0..{self.processes - 1}, got {ranks!r}.")
        if self.rank not in numbers:
            raise ValueError(f"rank {self.rank} is not in {numbers}; call subgroup only on its members.")
        return replace(self.make_subgroup(list(map(int, numbers))), journal=self.journal, lane=self.lane)

    def hierarchical(self, local: int | None = None) -> "Group":
        """Makes a group of the same replicas, whose sums go over every node first and then between the nodes.

        It helps hosts with several ranks each, on Gloo; NCCL and MPICH do it by themselves. Every process calls it.
        Where nodes have one replica each, or there is one node, a sum is the plain one, if in another order.

        With `shard=` the replicas of a node share a state, so that each node has all of it and parameters are gathered
        inside of nodes (HSDP, PyTorch's HYBRID_SHARD). For shards over all replicas give the step the plain group.

        Args:
          local: replicas of a node: the first `local` replicas are one node, the next as many another, as launchers
            fill hosts. None: nodes are found, as replicas that share memory (MPI) or a host (meshes).

        Returns:
          The group. Its other collectives are this one's, and so are its subgroups. The bytes that leave a replica on
          both levels, which `info.sent` counts, are those of a plain sum: 2 (p − 1)/p of an array. Of these
          2 (m − 1)/(m · local) go over the network that joins m nodes.

        Raises:
          ValueError: nodes have unequally many replicas, `local` is no divisor of `size`, ranks give different ones, or
            a replica is several devices; on every rank.

        Example:
          >>> import fddp
          >>> group = fddp.init()
          >>> group.hierarchical().size == group.size
          True
        """
        verify(self, "nodes", lambda: self._described_nodes(local))
        # Every process finds the same nodes, so either all go on or all raise.
        nodes = by_node(self.levels.find()) if local is None else blocks(local, self.size)
        communicator, transport, clone = self.levels.on(nodes, None, len(self.transport.clones))
        return replace(self, nodes=nodes, communicator=communicator, transport=transport, clone=clone)

    def _described_nodes(self, local: int | None) -> list[str]:
        if axes := self.placement.other_axes:
            raise ValueError(
                f"a sum in two levels needs replicas of one device each, and a replica of this group is several, along "
                f"{', '.join(map(repr, axes))}."
            )
        if local is not None:
            blocks(local, self.size)
        return [f"local={local}"]
