"""One rank of bench/hosts.py: runs ways of training on command, and reports their seconds."""

import sys
from pathlib import Path

import fddp

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.overlap_worker import by_itself, obey, with_fddp
from bench.problems import waiting


def main(backend: str, control: str, elements: int) -> None:
    group = fddp.init(backend)
    task = waiting(group.rank, elements)
    cap_mb = elements / 2**18  # a bucket for each layer
    wire = {"gloo": "Gloo", "mpi": "MPI"}[backend]
    ways = {f"fddp {name} ({wire})": (group, name) for name in ("overlap", "after")}
    ways[f"alone ({wire})"] = (by_itself(group.backend), "overlap")
    obey(control, backend, group, {k: with_fddp(task, *way, cap_mb) for k, way in ways.items()})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
