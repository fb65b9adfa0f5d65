"""One rank of bench/hosts.py: runs ways of training on command, and reports their seconds."""

import sys
from pathlib import Path

import fddp

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.overlap_worker import by_itself, obey, with_fddp
from bench.problems import waiting


def main(backend: str, control: str, each: int, elements: int) -> None:
    group = fddp.init(backend)
    task = waiting(group.rank, elements)
    cap_mb = elements / 2**18  # a bucket for each layer
    wire = {"gloo": "Gloo", "mpi": "MPI"}[backend]
    ways = {
        f"{name} ({wire})": with_fddp(task, *way, cap_mb)
        for name, way in ways_of(group, each).items()
    }
    obey(control, backend, group, ways)


def ways_of(group: fddp.Group, each: int) -> dict[str, tuple[fddp.Group, str]]:
    """Groups and schedules by name: with a rank on each host all schedules, with several sums over
    each host first."""
    ways = {"fddp staged": (group, "staged"), "alone": (by_itself(group.backend), "staged")}
    if each == 1:
        return ways | {"fddp eager": (group, "eager"), "fddp after": (group, "after")}
    return ways | {"fddp staged, hierarchical": (group.hierarchical(local=each), "staged")}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
