"""Compiles plain JAX of a step's loss and optimizer for the same target, to be held beside the step.

Source: the two ways in which JAX's own documentation trains on several devices: `jax.jit` over arrays whose rows are
spread (`NamedSharding`), and `jax.shard_map` with a mean of each gradient.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from fddp.analysis.auditing.estimate import estimate
from fddp.analysis.auditing.targets import Target
from fddp.buckets import whole_forms
from fddp.hlo import find_collectives, parse
from fddp.jax_internals import compile_to_read, without_context_mesh
from fddp.losses import Value
from fddp.schedules import Timeline
from fddp.step import TrainState, with_trained
from fddp.training import TrainStep

# XLA overlaps nothing on GPUs before Hopper unless it is told to.
FLAG = "xla_gpu_enable_latency_hiding_scheduler"
HOPPER = (9, 0)
JIT = "jit with NamedSharding"
SHARD_MAP = "shard_map, pmean a leaf"
HIDING = ", latency hiding"  # a way under that flag


class Plain(NamedTuple):
    """A way of plain JAX, compiled."""

    way: str
    """Its name."""
    collectives: int
    asynchronous: int
    """The number of its collectives that the program does not wait for at once."""
    timeline: Timeline
    """The spans of a step on the target, as `estimate` has them."""


@without_context_mesh
def beside_jit(step: TrainStep, state: TrainState, batch: Any, target: Target) -> dict[str, Callable[[], Plain]]:
    """Finds the ways in which plain JAX trains by the same loss and optimizer.

    Options of the step do not count: the batch is one micro-batch, all rows weigh the same, everything is held whole.
    Each replica keeps its own buffers, which it makes of its own rows, as in a step. Where there are buffers `jax.jit`
    maps the loss over replicas (`jax.vmap`): BatchNorm would otherwise take its means over all rows, and send them.

    Args:
      step: the step, settled by a batch.
      state: the forms of its state.
      batch: the forms of the rows of all replicas.
      target: the machine.

    Returns:
      The ways by their names; each is compiled when it is called.
    """
    mesh = target.mesh()
    equal = NamedSharding(mesh, PartitionSpec())
    spread = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    params = whole_forms(state.params)
    opt_state = jax.eval_shape(step.optimizer.init, step.settled.replica.trained(params))
    held = _placed((params, opt_state, whole_forms(state.model_state), state.rng), equal)
    rows = _placed(batch, spread)
    apart = bool(jax.tree.leaves(state.model_state))
    under_jit = _by_replica_under_jit(step, equal, spread) if apart else _under_jit(step, equal)
    programs = {JIT: under_jit, SHARD_MAP: _under_shard_map(step, mesh)}
    ways: dict[str, tuple[Any, dict[str, Any]]] = {way: (program, {}) for way, program in programs.items()}
    if target.chip.capability < HOPPER:
        ways |= {way + HIDING: (program, {FLAG: True}) for way, program in programs.items()}

    def compiled(way: str, program: Any, options: dict[str, Any]) -> Plain:
        module = parse(compile_to_read(program.lower(*held, rows), options).as_text() or "")
        found = find_collectives(module)
        timeline = estimate(module, found, target)
        return Plain(way, len(found), sum(one.asynchronous for one in found), timeline)

    return {way: partial(compiled, way, *how) for way, how in ways.items()}


def _under_jit(step: TrainStep, equal: NamedSharding) -> Any:
    return jax.jit(partial(_plain_step, step, _as_it_is, _as_it_is), out_shardings=equal, donate_argnums=(0, 1))


def _by_replica_under_jit(step: TrainStep, equal: NamedSharding, spread: NamedSharding) -> Any:
    (axis,) = spread.mesh.axis_names
    parts = spread.mesh.size

    def each(loss: Callable[[Any], Value]) -> Callable[[Any], Value]:
        def joined(rows: Any) -> Value:
            cut = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), rows)
            value = jax.vmap(loss, spmd_axis_name=axis)(cut)
            return value._replace(loss=value.loss.mean(), aux=jax.tree.map(lambda x: x.mean(0), value.aux))

        return joined

    out = equal, equal, equal, spread
    return jax.jit(partial(_plain_step, step, each, _as_it_is), out_shardings=out, donate_argnums=(0, 1))


def _under_shard_map(step: TrainStep, mesh: jax.sharding.Mesh) -> Any:
    axis = mesh.axis_names[0]

    def one(params: Any, opt_state: Any, model_state: Any, rng: Any, rows: Any) -> Any:
        mean = partial(jax.tree.map, lambda x: jax.lax.pmean(x, axis))
        given = params, opt_state, model_state, rng, rows
        params, opt_state, told, model_state = _plain_step(step, _as_it_is, mean, *given)
        return params, opt_state, told, jax.tree.map(lambda x: x[None], model_state)

    equal = PartitionSpec()
    own = PartitionSpec(axis)
    specs = {"in_specs": (equal, equal, equal, equal, own), "out_specs": (equal, equal, equal, own)}
    return jax.jit(jax.shard_map(one, mesh=mesh, check_vma=False, **specs), donate_argnums=(0, 1))


def _plain_step(
    step: TrainStep,
    each: Callable[[Callable[[Any], Value]], Callable[[Any], Value]],
    mean: Callable[[Any], Any],
    params: Any,
    opt_state: Any,
    model_state: Any,
    rng: Any,
    rows: Any,
) -> Any:
    """Trains as a script of one process would, with a loss that `each` spreads, and gradients that `mean` averages."""
    replica = step.settled.replica

    def loss(trained: Any) -> tuple[Any, Value]:
        value = each(lambda rows: replica.objective(with_trained(params, trained), model_state, rng, rows)[1])(rows)
        return value.loss, value

    trained = replica.trained(params)
    (_, value), grads = jax.value_and_grad(loss, has_aux=True)(trained)
    told = mean((value.loss, value.aux))
    updates, opt_state = step.optimizer.update(mean(grads), opt_state, trained)
    new = with_trained(params, optax.apply_updates(trained, updates))
    return new, opt_state, told, value.model_state


def _as_it_is(x: Any) -> Any:
    return x


def _placed(tree: Any, sharding: NamedSharding) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
