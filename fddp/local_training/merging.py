"""The merge of islands' pseudo-gradients into the shared parameters: a step of the outer optimizer.

The gradient is Σ w·d(age)·Δ ÷ Σ w. Here Δ is what an island has taken off the parameters that it began from, w is how
much it has trained on, and its age is the number of merges since it began. What the factor d takes from an old
contribution is given to no other.

Everything is a list of leaves, so that the keeper of the shared parameters needs to know no tree.

Source: Decoupled DiLoCo (arXiv 2604.21428); Zhang et al., "Staleness-aware Async-SGD" (2016) for the factor.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fddp.buckets import at_least
from fddp.jax_internals import host_cpu, without_context_mesh
from fddp.optim import LocalSteps, update

# One array for each leaf.
Leaves = Sequence[Any]


class SharedParams(NamedTuple):
    """The shared parameters."""

    version: int
    """Number of merges that made them."""
    params: Leaves
    """The leaves that are trained."""
    outer: Leaves
    """The state of the outer optimizer."""


class Contribution(NamedTuple):
    """A pseudo-gradient that an island sends."""

    island: int
    began: int
    """The version that the island began from."""
    weight: float
    """Σ w that it has trained on since."""
    step: int
    """The number of steps that it has made in all."""
    change: Leaves
    """The parameters that it began from minus its own."""


class Merging(NamedTuple):
    """The two programs of a merge."""

    add: Callable[[Leaves, Leaves, Any, Any], Leaves]
    """(sums, change, weight, age) → the sums with this contribution."""
    step: Callable[[Leaves, Leaves, Leaves, Any], tuple[Leaves, Leaves]]
    """(parameters, outer state, sums, Σ weight) → the next parameters and outer state."""


def merge(merging: Merging, shared: SharedParams, contributions: Iterable[Contribution]) -> SharedParams:
    """Merges contributions, in the order in which they are given.

    Args:
      merging: the programs.
      shared: the parameters before.
      contributions: one or more.

    Returns:
      The next version.
    """
    number = jax.dtypes.canonicalize_dtype(np.float64).type
    sums: Leaves = [np.zeros(np.shape(x), sum_dtype(x)) for x in shared.params]
    weight = 0.0
    for one in contributions:
        sums = merging.add(sums, one.change, number(one.weight), np.int32(shared.version - one.began))
        weight += one.weight
    params, outer = merging.step(shared.params, shared.outer, sums, number(weight))
    return SharedParams(shared.version + 1, [np.asarray(x) for x in params], [np.asarray(x) for x in outer])


def first_shared(steps: LocalSteps, params: Any) -> SharedParams:
    """The shared parameters that a training begins with.

    Args:
      steps: the optimizer.
      params: the tree of parameters.

    Returns:
      The parameters, with a new state of the outer optimizer.
    """
    hosted = jax.tree.map(np.asarray, params)
    outer = [np.asarray(x) for x in jax.tree.leaves(steps.outer.init(hosted))]
    return SharedParams(0, jax.tree.leaves(hosted), outer)


def merging_of(steps: LocalSteps, params: Any) -> Merging:
    """Makes the two programs, uncompiled.

    Args:
      steps: the optimizer.
      params: the tree of parameters, or their forms.

    Returns:
      The programs, as functions of JAX.
    """
    tree = jax.tree.structure(params)
    state_tree = jax.tree.structure(jax.eval_shape(steps.outer.init, params))
    discount = steps.quorum.discount if steps.quorum else None

    def add(sums: Leaves, change: Leaves, weight: Any, age: Any) -> Leaves:
        counted = weight if discount is None else weight * discount(age)
        return [total + jnp.asarray(counted, total.dtype) * x for total, x in zip(sums, change)]

    def step(params: Leaves, outer: Leaves, sums: Leaves, weight: Any) -> tuple[Leaves, Leaves]:
        whole = jnp.where(weight == 0, 1, weight)
        grads = [(total / jnp.asarray(whole, total.dtype)).astype(x.dtype) for total, x in zip(sums, params)]
        trees = tree.unflatten(grads), state_tree.unflatten(outer), tree.unflatten(params)
        new, state = update(steps.outer, *trees)
        return jax.tree.leaves(new), jax.tree.leaves(state)

    return Merging(add, step)


def on_this_host(merging: Merging) -> Merging:
    """Compiles the two programs for this process's CPU, when they are called."""
    cpu = host_cpu()

    def compiled(f: Callable[..., Any]) -> Callable[..., Any]:
        program = jax.jit(f)

        @without_context_mesh
        def call(*args: Any) -> Any:
            with jax.default_device(cpu):
                return program(*args)

        return call

    return Merging(compiled(merging.add), compiled(merging.step))


def merge_forms(shared: SharedParams) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The forms of the two programs' arguments, to compile them for.

    Args:
      shared: the parameters.

    Returns:
      The arguments of each, as `jax.ShapeDtypeStruct`s.
    """

    def form(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.canonicalize_dtype(x.dtype))

    params = [form(x) for x in shared.params]
    outer = [form(x) for x in shared.outer]
    sums = [jax.ShapeDtypeStruct(x.shape, sum_dtype(x)) for x in params]
    weight = form(np.float64(0))
    age = form(np.int32(0))
    return (sums, params, weight, age), (params, outer, sums, weight)


def sum_dtype(x: Any) -> np.dtype:
    """The dtype in which changes of a parameter are added."""
    return at_least(x.dtype, jnp.float32)
