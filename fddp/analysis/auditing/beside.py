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
from fddp.schedules import Timeline
from fddp.step import TrainState, with_trained
from fddp.training import TrainStep

# XLA overlaps nothing on GPUs before Hopper unless it is told to.
FLAG = "xla_gpu_enable_latency_hiding_scheduler"
HOPPER = (9, 0)


class Plain(NamedTuple):
    """A way of plain JAX, compiled."""

    way: str
    """Its name."""
    collectives: int
    asynchronous: int
    """The number of its collectives that the program does not wait for at once."""
    timeline: Timeline
    """The spans of a step on the target, as `estimate` has them."""


def beside_jit(step: TrainStep, state: TrainState, batch: Any, target: Target) -> tuple[Plain, ...]:
    """Compiles plain JAX of the same loss and optimizer.

    Options of the step do not count: the batch is one micro-batch, all rows weigh the same, everything is held whole.
    Under `jax.jit` a mean over rows, one of BatchNorm too, is over all rows. Under `jax.shard_map` each replica sees
    its own rows, as in a step, and keeps its own buffers.

    Args:
      step: the step, settled by a batch.
      state: the forms of its state.
      batch: the forms of the rows of all replicas.
      target: the machine.

    Returns:
      The ways.
    """
    mesh = target.mesh()
    equal = NamedSharding(mesh, PartitionSpec())
    spread = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    params = whole_forms(state.params)
    opt_state = jax.eval_shape(step.optimizer.init, step.settled.replica.trained(params))
    held = _placed((params, opt_state, whole_forms(state.model_state), state.rng), equal)
    rows = _placed(batch, spread)
    ways: dict[str, tuple[Any, dict[str, Any]]] = {
        "jit with NamedSharding": (_under_jit(step, equal), {}),
        "shard_map, a pmean for each leaf": (_under_shard_map(step, mesh), {}),
    }
    if target.chip.capability < HOPPER:
        ways["jit with NamedSharding, latency hiding"] = (ways["jit with NamedSharding"][0], {FLAG: True})

    def compiled(way: str) -> Plain:
        program, options = ways[way]
        module = parse(program.lower(*held, rows).compile(compiler_options=options).as_text() or "")
        found = find_collectives(module)
        timeline = estimate(module, found, target)
        return Plain(way, len(found), sum(one.asynchronous for one in found), timeline)

    return tuple(map(compiled, ways))


def _under_jit(step: TrainStep, equal: NamedSharding) -> Any:
    return jax.jit(partial(_plain_step, step, lambda tree: tree), out_shardings=equal, donate_argnums=(0, 1))


def _under_shard_map(step: TrainStep, mesh: jax.sharding.Mesh) -> Any:
    axis = mesh.axis_names[0]

    def one(params: Any, opt_state: Any, model_state: Any, rng: Any, rows: Any) -> Any:
        mean = partial(jax.tree.map, lambda x: jax.lax.pmean(x, axis))
        params, opt_state, told, model_state = _plain_step(step, mean, params, opt_state, model_state, rng, rows)
        return params, opt_state, told, jax.tree.map(lambda x: x[None], model_state)

    equal = PartitionSpec()
    own = PartitionSpec(axis)
    specs = {"in_specs": (equal, equal, equal, equal, own), "out_specs": (equal, equal, equal, own)}
    return jax.jit(jax.shard_map(one, mesh=mesh, check_vma=False, **specs), donate_argnums=(0, 1))


def _plain_step(
    step: TrainStep,
    mean: Callable[[Any], Any],
    params: Any,
    opt_state: Any,
    model_state: Any,
    rng: Any,
    rows: Any,
) -> Any:
    replica = step.settled.replica

    def loss(trained: Any) -> tuple[Any, Any]:
        _, value = replica.objective(with_trained(params, trained), model_state, rng, rows)
        return value.loss, value

    trained = replica.trained(params)
    (_, value), grads = jax.value_and_grad(loss, has_aux=True)(trained)
    told = mean((value.loss, value.aux))
    updates, opt_state = step.optimizer.update(mean(grads), opt_state, trained)
    new = with_trained(params, optax.apply_updates(trained, updates))
    return new, opt_state, told, value.model_state


def _placed(tree: Any, sharding: NamedSharding) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
