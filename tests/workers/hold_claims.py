"""Holds all claims, or the named ones, on every rank of this job: `hold_claims.py FOLDER [NAME ...]`."""

import sys
from pathlib import Path

from workers import (
    checkpoint_claims,
    error_claims,
    evaluation_claims,
    group_claims,
    hook_claims,
    level_claims,
    measurement_claims,
    mismatch_claims,
    promise_claims,
    rotation_claims,
    training_claims,
    virtual_claims,
)
from workers.claims import Claim, claims_of, hold

import fddp

CLAIMS = claims_of(
    group_claims,
    training_claims,
    promise_claims,
    hook_claims,
    level_claims,
    rotation_claims,
    measurement_claims,
    mismatch_claims,
    error_claims,
    checkpoint_claims,
    evaluation_claims,
    virtual_claims,
)


def claimed(backend: str, size: int) -> dict[str, Claim]:
    """The claims made for a kind of job."""
    return {name: claim for name, claim in CLAIMS.items() if backend in claim.backends and size in claim.sizes}


def main(folder: Path, *names: str) -> None:
    group = fddp.init()
    chosen = {name: CLAIMS[name] for name in names} or claimed(group.backend, group.processes)
    hold(chosen, group, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
