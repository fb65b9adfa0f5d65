"""One rank of bench/hosts.py: runs a way of training when it is told to, and reports how long it took."""

import sys
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

import fddp

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.overlap_worker import obey, with_fddp
from bench.problems import Problem, problem

CAP_MB = 0.5  # a bucket for each layer


def main(backend: str, control: str, each: int) -> None:
    group = fddp.init(backend)
    task = problem("waiting", seed=group.rank)
    wire = {"gloo": "Gloo", "mpi": "MPI"}[backend]
    ways = one_on_each(task, group) if each == 1 else several_on_each(task, group, each)
    obey(control, backend, group, {f"{name} ({wire})": way for name, way in ways.items()})


def one_on_each(task: Problem, group: fddp.Group) -> dict[str, tuple[Any, Any, Any]]:
    """A rank on each host: the schedules, and the step without traffic."""
    mesh = Mesh(jax.local_devices(), ("replica",), axis_types=(AxisType.Auto,))
    return {
        "fddp staged": with_fddp(task, group, "staged", CAP_MB),
        "fddp eager": with_fddp(task, group, "eager", CAP_MB),
        "fddp after": with_fddp(task, group, "after", CAP_MB),
        "alone": with_fddp(task, fddp.mesh_group(mesh), "staged", CAP_MB),
    }


def several_on_each(task: Problem, group: fddp.Group, each: int) -> dict[str, tuple[Any, Any, Any]]:
    """Several ranks on each host: sums at once, and in two levels."""
    return {
        "fddp staged": with_fddp(task, group, "staged", CAP_MB),
        "fddp staged, hierarchical": with_fddp(task, group.hierarchical(local=each), "staged", CAP_MB),
    }


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
