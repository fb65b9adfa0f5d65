"""Projects a measured step to more replicas: measured stages, all-reduces by their algorithm.

Each replica has the same number of rows, so on a perfect link a step would take the same time on
any number of replicas: weak scaling, as in Fig. 9 of the paper. A hop is one message between two
neighbours.

Source: Li et al. (VLDB 2020), section 5.4; ring: Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations" (2009); tree: Sanders, Speck and Träff, "Two-tree
algorithms for full bandwidth broadcast, reduction and scan" (2009), as in NCCL since 2.4.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, log2

from fddp.analysis.tuning.link import Link
from fddp.schedules import Pace, outline, simulate

REPLICAS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 4096)

# (hop, bytes, replicas) → seconds of an all-reduce
Algorithm = Callable[[Link, float, int], float]


def ring(hop: Link, nbytes: float, replicas: int) -> float:
    """Returns the seconds of a ring all-reduce: 2(n−1) messages of 1/n of the array per replica.

    No algorithm sends fewer bytes; the latency grows with n.

    >>> ring(Link(latency_s=1.0, bytes_per_s=10.0), 40, replicas=4)
    12.0
    """
    return 2 * (replicas - 1) * (hop.latency_s + nbytes / replicas / hop.bytes_per_s)


def tree(hop: Link, nbytes: float, replicas: int) -> float:
    """Returns the seconds of an all-reduce up and down two binary trees, in a pipeline.

    Each byte crosses the link twice; the latency grows with log₂ n.

    >>> tree(Link(latency_s=1.0, bytes_per_s=10.0), 40, replicas=4)
    12.0
    """
    return 2 * log2(replicas) * hop.latency_s + 2 * (replicas > 1) * nbytes / hop.bytes_per_s


def hop_of(link: Link, replicas: int, algorithm: Algorithm = ring) -> Link:
    """Derives the cost of a hop from all-reduces measured among `replicas` replicas.

    >>> hop_of(Link(latency_s=6.0, bytes_per_s=10.0), replicas=4)
    Link(latency_s=1.0, bytes_per_s=15.0)
    """
    if replicas < 2:
        raise ValueError(
            f"all-reduces of {replicas} replica say nothing about a link; measure with two or more."
        )
    hops = algorithm(Link(1.0, inf), 0.0, replicas)
    bytes_sent = algorithm(Link(0.0, 1.0), 1.0, replicas)
    return Link(link.latency_s / hops, link.bytes_per_s * bytes_sent)


@dataclass(frozen=True)
class Projection:
    """The estimate of a step on a number of replicas."""

    replicas: int
    step_s: float
    exposed_s: float
    """Seconds of traffic without computation."""
    efficiency: float
    """Step time of one replica over `step_s`."""


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
    """Simulates a staged step for each number of replicas.

    `stages` and `updates` are seconds without traffic; the last update follows the last
    all-reduce. With `pace` None, computation and traffic do not slow each other down.

    >>> for at in project([2.0, 1.0], [10, 10], Link(0.0, 10.0), replicas=[1, 2, 1000]):
    ...     print(at.replicas, at.step_s, round(at.efficiency, 2))
    1 3.0 1.0
    2 4.0 0.75
    1000 5.996 0.5
    """
    compute_s = sum(stages) + sum(updates)

    def at(count: int) -> Projection:
        sends = list[float]()
        if count > 1:
            sends = [algorithm(hop, size, count) for size in nbytes]
        line = simulate(*outline(stages, sends, updates), pace)
        if not line.seconds:
            return Projection(count, 0.0, line.exposed, 1.0)
        return Projection(count, line.seconds, line.exposed, compute_s / line.seconds)

    return tuple(map(at, replicas))
