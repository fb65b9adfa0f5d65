"""One rank of bench/overlap.py: runs ways of training on command, and reports their seconds."""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import fddp

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.problems import Problem, problem

OPTIMIZER = optax.sgd(1e-3)
Step = Callable[[], Any]
Way = tuple[Step, Step]  # a step, and a function that waits for its state


def main(backend: str, control: str, name: str, cap_mb: float) -> None:
    group = fddp.init(backend)
    task = problem(name, seed=group.rank)
    ways = fddp_ways(task, group, cap_mb)
    if not name.startswith("waiting"):  # these have no ways by hand
        ways |= (mpi_ways if backend == "mpi" else gloo_ways)(task, group)
    obey(control, backend, group, ways)


def obey(control: str, job: str, group: fddp.Group, ways: Mapping[str, Way]) -> None:
    """Runs steps of a way on command of a socket, and reports their seconds."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(control)
        stream = line.makefile("rw")
        _write(stream, {"job": job, "rank": group.rank, "ways": list(ways)})
        for order in stream:
            way, steps = json.loads(order)
            step, finish = ways[way]
            seconds = []
            for _ in range(steps):
                group.barrier()
                start = time.perf_counter()
                jax.block_until_ready(step())
                seconds.append(time.perf_counter() - start)
            jax.block_until_ready(finish())  # nothing of the last step belongs to another way
            _write(stream, {"seconds": seconds})


def _write(stream: Any, words: Any) -> None:
    stream.write(json.dumps(words) + "\n")
    stream.flush()


def by_itself(backend: str) -> fddp.Group:
    """A group of this process alone."""
    if backend == "gloo":
        return fddp.mesh_group(Mesh(jax.local_devices(), ("replica",), axis_types=(AxisType.Auto,)))
    from mpi4py import MPI

    return fddp.mpi_group(MPI.COMM_SELF)


def fddp_ways(task: Problem, group: fddp.Group, cap_mb: float) -> dict[str, Way]:
    """Steps of fddp, and one without traffic."""
    wire = {"gloo": "Gloo", "mpi": "MPI"}[group.backend]
    return {
        f"fddp overlap ({wire})": with_fddp(task, group, "overlap", cap_mb),
        f"fddp eager ({wire})": with_fddp(task, group, "eager", cap_mb),
        f"fddp after ({wire})": with_fddp(task, group, "after", cap_mb),
        f"fddp in shards ({wire})": with_fddp(task, group, "overlap", cap_mb, shard="state"),
        f"alone ({wire})": with_fddp(task, by_itself(group.backend), "overlap", cap_mb),
    }


def mpi_ways(task: Problem, group: fddp.Group) -> dict[str, Way]:
    """mpi4jax as its documentation shows it: one call per leaf inside one jit."""
    import mpi4jax
    from mpi4py import MPI

    total = partial(jax.tree.map, partial(mpi4jax.allreduce, op=MPI.SUM))
    return {"mpi4jax per leaf": _by_hand(task, group.size, lambda f: f, total)}


def gloo_ways(task: Problem, group: fddp.Group) -> dict[str, Way]:
    """The ways of JAX's own documentation."""
    mesh = Mesh(jax.devices(), ("batch",), axis_types=(AxisType.Auto,))
    spread = partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("batch")), out_specs=P(), check_vma=False
    )
    per_leaf = lambda grads: jax.lax.psum(grads, "batch")  # noqa: E731
    return {
        "shard_map, psum per leaf": _by_hand(task, group.size, spread, per_leaf, mesh),
        "shard_map, one flat psum": _by_hand(task, group.size, spread, _flat_psum, mesh),
        "jit, NamedSharding": _by_hand(task, 1, lambda f: f, lambda grads: grads, mesh),
    }


def with_fddp(
    task: Problem, group: fddp.Group, schedule: Any, cap_mb: float, **options: Any
) -> Way:
    """A step of fddp that waits for its loss."""
    step = fddp.train_step(
        task.loss_fn,
        OPTIMIZER,
        group=group,
        has_aux=True,
        schedule=schedule,
        bucket_cap_mb=cap_mb,
        last_bucket_mb=cap_mb,
        first_bucket_mb=cap_mb,
        **options,
    )
    state = step.init(task.params, model_state=task.model_state)

    def run() -> Any:
        nonlocal state
        state, info = step(state, task.batch)
        return info.loss  # for which a loop waits, if for anything

    def finish() -> Any:
        nonlocal state
        state = step.finish(state)
        return state.params

    return run, finish


def _by_hand(task: Problem, size: int, spread: Any, total: Any, mesh: Mesh | None = None) -> Way:
    """A step as people write it: gradients, a sum over replicas, the optimizer."""

    def step(state: Any, batch: Any) -> Any:
        params, opt_state, model_state = state
        buffers = {} if model_state is None else {"model_state": model_state}
        (loss, aux), grads = jax.value_and_grad(task.loss_fn, has_aux=True)(
            params, batch, **buffers
        )
        if model_state is not None:
            model_state, aux = aux
        grads = jax.tree.map(lambda g: g / size, total(grads))
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, model_state), loss

    run_step = jax.jit(spread(step), donate_argnums=0)
    hand_state = jax.tree.map(
        jnp.copy, (task.params, OPTIMIZER.init(task.params), task.model_state)
    )
    batch = task.batch
    if mesh is not None:
        rows = NamedSharding(mesh, P("batch"))
        hand_state = jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(NamedSharding(mesh, P()), x),
            hand_state,
        )
        batch = jax.tree.map(lambda x: jax.make_array_from_process_local_data(rows, x), batch)

    def run() -> Any:
        nonlocal hand_state
        hand_state, loss = run_step(hand_state, batch)
        return hand_state[0], loss

    return run, lambda: ()


def _flat_psum(grads: Any) -> Any:
    flat, unravel = ravel_pytree(grads)
    return unravel(jax.lax.psum(flat, "batch"))


if __name__ == "__main__":
    os.environ.setdefault("MPI4JAX_NO_WARN_JAX_VERSION", "1")
    main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]))
