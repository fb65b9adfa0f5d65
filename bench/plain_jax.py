"""Compiles plain JAX programs with a step's loss and optimizer, for comparison with `fddp.audit`.

Source: JAX's documentation of training on several devices: `jax.jit` over arrays with sharded rows
(`NamedSharding`), and `jax.shard_map` with a mean of each gradient.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from fddp.analysis.auditing.estimate import estimate
from fddp.analysis.auditing.report import moved
from fddp.analysis.auditing.targets import Target, read_target
from fddp.buckets import whole_forms
from fddp.hlo import find_collectives, parse
from fddp.jax_internals import compile_to_read, without_context_mesh
from fddp.jaxpr import with_trained
from fddp.losses import Evaluated
from fddp.schedules import Timeline
from fddp.step import TrainState
from fddp.training import TrainStep

# XLA overlaps nothing on GPUs before Hopper without this flag.
FLAG = "xla_gpu_enable_latency_hiding_scheduler"
HOPPER = (9, 0)
JIT = "jit with NamedSharding"
SHARD_MAP = "shard_map, pmean a leaf"
HIDING = ", latency hiding"  # suffix of a program compiled with the flag


class Plain(NamedTuple):
    """A compiled plain JAX program."""

    way: str
    """Name of the program."""
    collectives: int
    asynchronous: int
    """Number of asynchronous collectives."""
    timeline: Timeline
    """The estimated spans of a step on the target."""


def compiled_plain(step: TrainStep, state: TrainState, batch: Any, target: str) -> list[Plain]:
    """Compiles all plain programs of a step for a target such as "h100:8"."""
    machine = read_target(target)
    step, state, batch = moved(step, state, batch, machine)
    step.tasks(state, batch)  # settles it
    return [make() for make in plain_steps(step, state, batch, machine).values()]


@without_context_mesh
def plain_steps(
    step: TrainStep, state: TrainState, batch: Any, target: Target
) -> dict[str, Callable[[], Plain]]:
    """Returns plain JAX programs with a step's loss and optimizer, as compile functions by name.

    `state` and `batch` are shapes, of all replicas. The programs ignore the step's options: the
    batch is one micro-batch, rows have equal weights, and the state is replicated.
    """
    mesh = target.mesh()
    replicated = NamedSharding(mesh, PartitionSpec())
    sharded = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    params = whole_forms(state.params)
    opt_state = jax.eval_shape(step.optimizer.init, step.settled.replica.trained(params))
    inputs = _placed((params, opt_state, whole_forms(state.model_state), state.rng), replicated)
    rows = _placed(batch, sharded)
    has_buffers = bool(jax.tree.leaves(state.model_state))
    # As in a step, each replica computes its buffers from its own rows. Without a map over replicas
    # BatchNorm would average over all rows, and communicate.
    under_jit = (
        _by_replica_under_jit(step, replicated, sharded)
        if has_buffers
        else _under_jit(step, replicated)
    )
    programs = {JIT: under_jit, SHARD_MAP: _under_shard_map(step, mesh)}
    ways: dict[str, tuple[jax.stages.Wrapped, dict[str, Any]]] = {
        way: (program, {}) for way, program in programs.items()
    }
    if target.chip.capability < HOPPER:
        ways |= {way + HIDING: (program, {FLAG: True}) for way, program in programs.items()}

    def compiled(way: str, program: jax.stages.Wrapped, options: dict[str, Any]) -> Plain:
        module = parse(compile_to_read(program.lower(*inputs, rows), options).as_text() or "")
        collectives = find_collectives(module)
        timeline = estimate(module, collectives, target)
        return Plain(way, len(collectives), sum(c.asynchronous for c in collectives), timeline)

    return {way: partial(compiled, way, *settings) for way, settings in ways.items()}


def _under_jit(step: TrainStep, replicated: NamedSharding) -> jax.stages.Wrapped:
    return jax.jit(
        partial(_plain_step, step, _identity, _identity),
        out_shardings=replicated,
        donate_argnums=(0, 1),
    )


def _by_replica_under_jit(
    step: TrainStep, replicated: NamedSharding, sharded: NamedSharding
) -> jax.stages.Wrapped:
    (axis,) = sharded.mesh.axis_names
    replicas = sharded.mesh.size

    def on_each_replica(loss: Callable[[Any], Evaluated]) -> Callable[[Any], Evaluated]:
        def joined(rows: Any) -> Evaluated:
            shards = jax.tree.map(lambda x: x.reshape(replicas, -1, *x.shape[1:]), rows)
            value = jax.vmap(loss, spmd_axis_name=axis)(shards)
            return value._replace(
                loss=value.loss.mean(), aux=jax.tree.map(lambda x: x.mean(0), value.aux)
            )

        return joined

    out = replicated, replicated, replicated, sharded
    return jax.jit(
        partial(_plain_step, step, on_each_replica, _identity),
        out_shardings=out,
        donate_argnums=(0, 1),
    )


def _under_shard_map(step: TrainStep, mesh: jax.sharding.Mesh) -> jax.stages.Wrapped:
    axis = mesh.axis_names[0]

    def on_replica(params: Any, opt_state: Any, model_state: Any, rng: Any, rows: Any) -> Any:
        mean = partial(jax.tree.map, lambda x: jax.lax.pmean(x, axis))
        inputs = params, opt_state, model_state, rng, rows
        params, opt_state, report, model_state = _plain_step(step, _identity, mean, *inputs)
        return params, opt_state, report, jax.tree.map(lambda x: x[None], model_state)

    replicated = PartitionSpec()
    sharded = PartitionSpec(axis)
    specs = {
        "in_specs": (replicated, replicated, replicated, replicated, sharded),
        "out_specs": (replicated, replicated, replicated, sharded),
    }
    return jax.jit(
        jax.shard_map(on_replica, mesh=mesh, check_vma=False, **specs), donate_argnums=(0, 1)
    )


def _plain_step(
    step: TrainStep,
    each: Callable[[Callable[[Any], Evaluated]], Callable[[Any], Evaluated]],
    mean: Callable[[Any], Any],
    params: Any,
    opt_state: Any,
    model_state: Any,
    rng: Any,
    rows: Any,
) -> Any:
    """Runs one training step; `each` maps the loss over replicas, `mean` averages over them."""
    replica = step.settled.replica

    def loss(trained: Any) -> tuple[Any, Evaluated]:
        value = each(
            lambda rows: replica.objective(with_trained(params, trained), model_state, rng, rows)[1]
        )(rows)
        return value.loss, value

    trained = replica.trained(params)
    (_, value), grads = jax.value_and_grad(loss, has_aux=True)(trained)
    report = mean((value.loss, value.aux))
    updates, opt_state = step.optimizer.update(mean(grads), opt_state, trained)
    new = with_trained(params, optax.apply_updates(trained, updates))
    return new, opt_state, report, value.model_state


def _identity(x: Any) -> Any:
    return x


def _placed(tree: Any, sharding: NamedSharding) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
