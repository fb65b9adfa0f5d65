"""Ways for processes to meet: `joins.py HOW [PORT]`. Prints a line for the group that came of it."""

import os
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fddp


def join(how: str, port: str) -> fddp.Group:
    if how == "adopt":
        rank, size = (int(os.environ.pop(f"FDDP_{name}")) for name in ("RANK", "SIZE"))
        jax.distributed.initialize(os.environ.pop("FDDP_COORDINATOR"), size, rank)
        return fddp.init()
    if how == "arguments":
        return fddp.init(rank=1 - int(os.environ["FDDP_RANK"]), size=2, coordinator=f"127.0.0.1:{port}")
    if how == "srun":  # as srun --mpi=pmi2 names its tasks
        rank, size, host = (os.environ.pop(f"FDDP_{name}") for name in ("RANK", "SIZE", "COORDINATOR"))
        step = {"JOB_ID": port, "STEP_ID": "0", "STEP_NUM_TASKS": size, "STEP_NODELIST": host.split(":")[0]}
        task = {"PROCID": rank, "LOCALID": rank, "MPI_TYPE": "pmi2"}
        os.environ |= {f"SLURM_{name}": text for name, text in (step | task).items()}
        os.environ |= {"PMI_RANK": rank, "PMI_SIZE": size, "PMI_JOBID": f"{port}.0"}
        return fddp.init()
    if how == "other mpi":  # as the mpiexec of an MPI that is not mpi4py's
        rank, size = (os.environ.pop(f"FDDP_{name}") for name in ("RANK", "SIZE"))
        world = {"RANK": rank, "LOCAL_RANK": rank, "SIZE": size}
        os.environ |= {f"OMPI_COMM_WORLD_{name}": text for name, text in world.items()}
        warnings.filterwarnings("ignore", "suspicious MPI execution environment")  # mpi4py's own
        return fddp.init()
    return fddp.init(how or None)


def main(how: str = "", port: str = "") -> None:
    group = join(how, port)
    devices = group.size // group.processes
    step = fddp.train_step(lambda w, x: jnp.mean((w - x) ** 2), optax.sgd(0.5), group=group)
    state, _ = step(step.init(jnp.zeros(())), np.full(2 * devices, group.rank, np.float32))
    print(f"{group.backend} {group.rank} of {group.processes}, {group.size} replicas, {float(state.params)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
