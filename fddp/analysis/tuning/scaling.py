"""Projects a step to more replicas than there are: its stages are measured, its all-reduces follow their algorithm.

Each replica keeps its rows, so on a perfect link the step would take as long on thousands as on one: weak scaling, as
in Fig. 9 of the paper. A hop is one message between two neighbours.

Source: Li et al. (VLDB 2020), section 5.4; ring: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations" (2009); tree: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan" (2009), as in NCCL since 2.4.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, log2

from fddp.analysis.tuning.link import Link
from fddp.schedules import Pace, outline, simulate

REPLICAS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 4096)

# (hop, bytes, replicas) -> seconds of an all-reduce
Algorithm = Callable[[Link, float, int], float]


def ring(hop: Link, nbytes: float, replicas: int) -> float:
    """Each replica sends 2(n−1) messages of a n-th of the array: the fewest bytes, and latency that grows with n.

    Args:
      hop: a message between neighbours.
      nbytes: of the array.
      replicas: n.

    Returns:
      Seconds.

    Example:
      >>> ring(Link(latency_s=1.0, bytes_per_s=10.0), 40, replicas=4)
      12.0
    """
    return 2 * (replicas - 1) * (hop.latency_s + nbytes / replicas / hop.bytes_per_s)


def tree(hop: Link, nbytes: float, replicas: int) -> float:
    """Up and down two binary trees in a pipeline: each byte twice over the link, and latency with log₂ n.

    Args:
      hop: a message between neighbours.
      nbytes: of the array.
      replicas: n.

    Returns:
      Seconds; 0 for one replica.

    Example:
      >>> tree(Link(latency_s=1.0, bytes_per_s=10.0), 40, replicas=4)
      12.0
    """
    return 2 * log2(replicas) * hop.latency_s + 2 * (replicas > 1) * nbytes / hop.bytes_per_s


def hop_of(link: Link, replicas: int, algorithm: Algorithm = ring) -> Link:
    """Finds the cost of a hop from the all-reduces that were measured among some replicas.

    Args:
      link: all-reduces among them.
      replicas: how many they were.
      algorithm: how they were made.

    Returns:
      The hop.

    Raises:
      ValueError: a single replica has no link.

    Example:
      >>> hop_of(Link(latency_s=6.0, bytes_per_s=10.0), replicas=4)
      Link(latency_s=1.0, bytes_per_s=15.0)
    """
    if replicas < 2:
        raise ValueError(f"all-reduces of {replicas} replica say nothing of a link; measure with two or more.")
    hops = algorithm(Link(1.0, inf), 0.0, replicas)
    bytes_sent = algorithm(Link(0.0, 1.0), 1.0, replicas)
    return Link(link.latency_s / hops, link.bytes_per_s * bytes_sent)


@dataclass(frozen=True)
class Projection:
    """A step on so many replicas."""

    replicas: int
    step_s: float
    exposed_s: float
    """Seconds of traffic with no computation over it."""
    efficiency: float
    """The step of one replica over this one."""


def project(
    stages: Sequence[float],
    nbytes: Sequence[float],
    hop: Link,
    *,
    updates: Sequence[float] = (),
    pace: Pace | None = None,
    replicas: Sequence[int] = REPLICAS,
    algorithm: Algorithm = ring,
) -> tuple[Projection, ...]:
    """Simulates a staged step on growing numbers of replicas.

    Args:
      stages: seconds of the stages alone.
      nbytes: bytes of the all-reduces.
      hop: a message between neighbours.
      updates: seconds of the updates, the last one after the last all-reduce.
      pace: how computation and traffic slow each other down; None: not at all.
      replicas: how many.
      algorithm: `ring`, `tree` or one like them.

    Returns:
      A projection for each number of replicas.

    Example:
      >>> for one in project([2.0, 1.0], [10, 10], Link(0.0, 10.0), replicas=[1, 2, 1000]):
      ...     print(one.replicas, one.step_s, round(one.efficiency, 2))
      1 3.0 1.0
      2 4.0 0.75
      1000 5.996 0.5
    """
    lone = sum(stages) + sum(updates)

    def at(count: int) -> Projection:
        sends = [algorithm(hop, size, count) for size in nbytes] if count > 1 else []
        line = simulate(*outline(stages, sends, updates), pace)
        return Projection(count, line.seconds, line.exposed, lone / line.seconds if line.seconds else 1.0)

    return tuple(at(count) for count in replicas)
