"""Makes the first state, equal on all replicas, with rank 0's values.

Source: `_sync_module_states` in PyTorch's `distributed.py`.
"""

import platform
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from fddp.buckets import from_words, insert_shards, split_shards, to_words
from fddp.comm import REPLICATED, Group, described, forms_of, laid_out, shortened, specs
from fddp.jax_internals import without_context_mesh
from fddp.jaxpr import join_leaves, split_leaves
from fddp.losses import not_numeric
from fddp.optim import DynamicScaleState, nodes_of, optimizer_laid_out
from fddp.runtime import fddp_version
from fddp.step.bucket_plan import provisional_plan
from fddp.step.checks import check_arrays, check_trained
from fddp.step.combinations import MEMORY, MULTI_STEPS, SCALE_INSIDE, refuse
from fddp.step.replica import Replica
from fddp.step.state import TrainState, check_no_state
from fddp.step.state_layout import first_hook_state, form_in_shards, hook_state_form, laid_out_state
from fddp.step.step_optimizer import Optimizer, StepOptimizer


class Start(NamedTuple):
    """The arguments of `TrainStep.init` on one rank."""

    params: Any
    model_state: Any
    rng: Any
    remark: str
    """A remark for the user, or ""."""


def equal_start(group: Group, tree: PyTree) -> Any:
    """Copies rank 0's arrays to all replicas. Collective. Partitions along other mesh axes stay.

    The copies do not share memory with the caller's arrays, so that a step can donate them.
    """
    leaves, treedef = jax.tree.flatten(tree)
    indices = [i for i, x in enumerate(leaves) if group.placement.spec(x) != REPLICATED]
    partitioned, replicated = split_leaves(indices, leaves)
    replicated = group.placement.place(group.broadcast(replicated), REPLICATED)
    if partitioned:
        partitioned = _from_first_replica(group, partitioned)
    return treedef.unflatten(join_leaves(indices, partitioned, replicated))


@without_context_mesh
def read_start(
    replica: Replica, optimizer: StepOptimizer, params: PyTree, model_state: PyTree, rng: PyTree
) -> Start:
    """Checks the arguments of `TrainStep.init` on one rank."""
    for name, tree in (("model_state", model_state), ("rng", rng)):
        check_no_state(name, tree)
        if paths := not_numeric(tree):
            raise TypeError(f"{name} must be a tree of arrays, and holds {shortened(paths, ', ')}.")
    for x in jax.tree.leaves((params, model_state)):
        if isinstance(x, jax.ShapeDtypeStruct):
            raise TypeError(f"step.init takes arrays, got {x}: step.shapes takes their forms.")
    if wrong := [x for x in jax.tree.leaves(rng) if not hasattr(x, "dtype")]:
        raise TypeError(f"rng must be a tree of keys, of jax.random.key, got {wrong[0]!r}.")
    return Start(params, model_state, rng, _check_start(replica, optimizer, params))


@without_context_mesh
def first_state(replica: Replica, optimizer: Optimizer, start: Start) -> TrainState:
    """Makes the first state on the group's devices. Collective."""
    group = replica.group
    placement = group.placement
    params, model_state, rng = equal_start(group, (start.params, start.model_state, start.rng))
    hook_state = placement.program(
        partial(first_hook_state, replica, params), (), placement.per_replica
    )()
    number = placement.place(np.zeros((), np.int32), REPLICATED)
    state = TrainState(number, params, None, model_state, hook_state, None, rng)
    trained_params = replica.trained(params)
    trained_specs = specs(placement, trained_params)

    def make(params: PyTree, model_state: PyTree) -> tuple[Any, Any]:
        trained = replica.trained(params)
        # Copied because it may contain the parameters, and an array is donated once.
        opt_state = jax.tree.map(jnp.copy, optimizer.init(trained))
        opt_state = optimizer_laid_out(placement.other_axes, opt_state, trained, trained_specs)
        index = group.communicator.replica_index()
        whole = state._replace(params=params, opt_state=opt_state, model_state=model_state)
        held = laid_out_state(replica, whole, lambda layout, x: layout.part(x, index))
        return split_shards(held.opt_state)[0], split_shards(held)[1]

    program = placement.program(make, (REPLICATED, REPLICATED), (REPLICATED, placement.per_replica))
    opt_state, parts = program(params, model_state)
    form = state._replace(opt_state=jax.eval_shape(optimizer.init, trained_params))
    held = laid_out_state(replica, form, lambda layout, x: None)
    return insert_shards(held._replace(opt_state=opt_state), parts)


@without_context_mesh
def first_form(
    replica: Replica, optimizer: Optimizer, params: PyTree, model_state: PyTree, rng: PyTree
) -> TrainState:
    """Returns shapes and dtypes of the first state, computing nothing."""
    check_arrays(params)
    number, params, model_state, rng = forms_of((np.int32(0), params, model_state, rng))
    opt_state = jax.eval_shape(optimizer.init, replica.trained(params))
    hook_state = hook_state_form(replica, params)
    state = TrainState(number, params, opt_state, model_state, hook_state, None, rng)
    return form_in_shards(replica, state)


def _from_first_replica(group: Group, tree: PyTree) -> Any:
    """Broadcasts the first replica's arrays, bit for bit, and keeps their layout on other axes."""

    def broadcast(x: jax.Array) -> jax.Array:
        # A sum of words with zeros from all other replicas is exact for any dtype.
        words = to_words(x)
        message = jnp.where(group.communicator.replica_index() == 0, words, jnp.zeros_like(words))
        return from_words(group.communicator.all_reduce(message), x)

    layout = specs(group.placement, tree)
    program = group.placement.program(
        lambda tree: laid_out(group.placement, jax.tree.map(broadcast, tree), layout),
        (REPLICATED,),
        REPLICATED,
    )
    return program(group.placement.place(tree, REPLICATED))


def _check_start(replica: Replica, optimizer: StepOptimizer, params: PyTree) -> str:
    """Raises an error if a step cannot start like this; returns a remark for the user, or ""."""
    check_arrays(params)
    check_trained(params, replica.chosen(params))
    optimizer.check_needs(replica.trained(params))
    features = dict(replica.features)
    if jax.tree.leaves(hook_state_form(replica, params)):
        features[MEMORY] = f"{replica.options.hook}, which has a memory"
    opt_state = jax.eval_shape(lambda params: optimizer.init(replica.trained(params)), params)
    if several := nodes_of(optax.MultiStepsState, opt_state):
        features[MULTI_STEPS] = MULTI_STEPS
    if nodes_of(DynamicScaleState, several):
        features[SCALE_INSIDE] = SCALE_INSIDE
    refuse(features)
    return replica.strategy.check(replica, optimizer.inner, params)


@without_context_mesh
def described_start(replica: Replica, optimizer: Optimizer, start: Start) -> Iterable[str]:
    """Lists the facts that must be equal on all ranks before the first message, one per line."""
    params = start.params
    opt_state = jax.eval_shape(lambda params: optimizer.init(replica.trained(params)), params)
    return [
        f"fddp {fddp_version()}, jax {jax.__version__}, Python {platform.python_version()}",
        repr(replica.options),
        repr(optimizer),
        f"plan {provisional_plan(replica, params).digest}",
        f"replicas per host in sums: {replica.group.transport.local or 'all'}",
        f"{len(jax.tree.leaves(params))} parameters",
        *described("parameter", params),
        *described("parts of", specs(replica.group.placement, params)),
        *described("optimizer", opt_state),
        *described("model_state", start.model_state),
        *described("rng", start.rng),
    ]
