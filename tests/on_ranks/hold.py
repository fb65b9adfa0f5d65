"""Holds all claims, or the named ones, on every rank of this job: `hold.py FOLDER [NAME ...]`.

On GPUs, where pytest does not start ranks, `python -m fddp run -n 2 --by processes` runs it over
NCCL; with JAX_DEFAULT_MATMUL_PRECISION=highest, and NCCL_MULTI_RANK_GPU_ENABLE=1 on a single GPU.
"""

import sys
from pathlib import Path

from on_ranks import (
    agreement,
    all_cases,
    buffers,
    checkpoints,
    collectives,
    differing_programs,
    disturbed,
    evaluation,
    group,
    guards,
    hooks,
    in_flight,
    join,
    local_steps,
    measurement,
    modules,
    objects,
    one_program,
    round_robin,
    rows,
    scan,
    set_mesh,
    shard,
    start,
    survival,
    train_step,
    two_levels,
    unused,
    virtual_replicas,
)
from on_ranks.claims import Claim, claims_of, hold

import fddp

CLAIMS = claims_of(
    group,
    objects,
    start,
    train_step,
    one_program,
    all_cases,
    rows,
    scan,
    buffers,
    modules,
    collectives,
    differing_programs,
    set_mesh,
    shard,
    local_steps,
    unused,
    guards,
    join,
    hooks,
    in_flight,
    disturbed,
    survival,
    two_levels,
    round_robin,
    measurement,
    agreement,
    checkpoints,
    evaluation,
    virtual_replicas,
)


def claimed(backend: str, size: int) -> dict[str, Claim]:
    """The claims for a kind of job."""
    return {
        name: claim
        for name, claim in CLAIMS.items()
        if backend in claim.backends and size in claim.sizes
    }


def main(folder: Path, *names: str) -> None:
    world = fddp.init()
    backend = "gloo" if world.backend == "nccl" else world.backend
    chosen = {name: CLAIMS[name] for name in names} or claimed(backend, world.processes)
    hold(chosen, world, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
