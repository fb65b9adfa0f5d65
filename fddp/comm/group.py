"""Groups of replicas that train together: `ProcessGroup`, `new_group` of `torch.distributed`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fddp.comm.communicator import Communicator
from fddp.comm.host_bytes import one_array
from fddp.comm.journal import Journal
from fddp.comm.objects import all_gather_object, broadcast_object, broadcast_tree, rows
from fddp.comm.placement import Placement
from fddp.comm.transport import Hosts, Transport
from fddp.comm.two_levels import hierarchical
from fddp.jax_internals import without_context_mesh
from fddp.wording import check_choice

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
    size: int
    """Number of replicas: processes × devices of each."""
    backend: str
    """"nccl", "gloo", "mpi" or "local"."""
    placement: Placement
    """Devices of the replicas' programs and arrays."""
    communicator: Communicator = field(repr=False)
    """Collectives of the replicas inside a program."""
    transport: Transport = field(repr=False)
    """Collectives of the replicas between programs."""
    hosts: Hosts = field(repr=False)
    """The processes, and their collectives."""
    make_subgroup: "Callable[[Sequence[int]], Group]" = field(repr=False, compare=False)
    """Makes a smaller group; see `subgroup`."""
    journal: Journal = field(default_factory=Journal, repr=False, compare=False)
    """Records the progress of this process."""

    def __dir__(self) -> list[str]:
        internal = {"placement", *(x.name for x in fields(self) if not x.repr)}
        return [name for name in super().__dir__() if name not in internal]

    def __repr__(self) -> str:
        numbers = f"rank={self.rank}, processes={self.processes}, size={self.size}"
        return f"Group({numbers}, backend={self.backend!r}, axis_name={self.axis_name!r})"

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """Numbers of the processes in the whole job, in order of rank."""
        return self.hosts.ranks

    @property
    def processes(self) -> int:
        """Number of processes."""
        return len(self.hosts.ranks)

    @property
    def axis_name(self) -> str | None:
        """Axis of a loss's collectives over replicas (BatchNorm's `axis_name`), on any backend."""
        return self.placement.axis_name

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
        return np.frombuffer(rows.tobytes(), x.dtype).reshape(self.processes, *x.shape).copy()

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
        check_choice("op", op, [*REDUCTIONS])
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
          ValueError: `root` is no rank, or the trees differ; on every rank.
        """
        return broadcast_tree(self, tree, root)

    def rows(self, batch: Any) -> Any:
        """Divides rows that every process has: returns `x[rank::processes]` of each array.

        Nothing is padded or dropped: if the number of rows is not a multiple of `processes`, the
        first ranks have one more row, and a rank may have none. `fddp.evaluate` accepts such parts;
        a step does after its first batch, if every rank has a row.

        Args:
          batch: tree of arrays with rows along the first dim, equal on all processes.

        Returns:
          The tree with the rows of this process.

        Raises:
          ValueError: numbers of rows differ, an array has no dims, or is divided already.
          TypeError: a leaf is not an array.

        Example:
          >>> import fddp, numpy as np
          >>> fddp.init().rows({"x": np.arange(3)})
          {'x': array([0, 1, 2])}
        """
        return rows(self, batch)

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
        return replace(self.make_subgroup(list(map(int, ids))), journal=self.journal)

    def hierarchical(self, local: int | None = None) -> "Group":
        """Makes a group of the same replicas with sums over each host first, then between hosts.

        This is faster over Gloo with several ranks per host. NCCL and MPICH do it by themselves,
        and there the group is returned unchanged, as with one host, or one replica per host. Every
        process calls it.

        Args:
          local: consecutive replicas per host; None: fddp detects those of each host.

        Returns:
          The group. `info.sent` counts 2 (p − 1)/p of an array, the bytes of a plain sum; of these
          2 (m − 1)/(m · local) cross the network of m hosts.

        Raises:
          ValueError: hosts have unequal numbers of replicas, `local` does not divide `size` or
            differs between ranks, or a replica has several devices; on every rank.

        Example:
          >>> import fddp
          >>> group = fddp.init()
          >>> group.hierarchical().size == group.size
          True
        """
        return hierarchical(self, local)
