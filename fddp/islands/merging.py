"""The merge of islands' pseudo-gradients into the shared parameters: a step of the outer optimizer.

The gradient is Σ w·d(age)·Δ ÷ Σ w. Δ is an island's pseudo-gradient, w the amount of data that the
island trained on, and its age the number of merges since the island received the shared parameters.
The discount d is not in the divisor, so a discounted contribution makes the outer step smaller.

Everything is a list of leaves, so that the server needs no tree structures.

Source: Decoupled DiLoCo (arXiv 2604.21428); Zhang et al., "Staleness-aware Async-SGD" (2016) for
the factor.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from fddp.buckets import at_least
from fddp.islands.quorum import Discount
from fddp.jax_internals import host_cpu, without_context_mesh
from fddp.optim import update

# One array for each leaf.
Leaves = Sequence[Any]


class SharedParams(NamedTuple):
    """The shared parameters."""

    version: int
    """Number of merges so far."""
    params: Leaves
    """Trained leaves."""
    outer: Leaves
    """State of the outer optimizer."""


class Contribution(NamedTuple):
    """A pseudo-gradient of an island."""

    island: int
    began: int
    """Version that the island trained from."""
    weight: float
    """Σ w that it has trained on since."""
    step: int
    """Total number of its steps."""
    change: Leaves
    """The pseudo-gradient: parameters of version `began` − local parameters."""


class Merging(NamedTuple):
    """The two programs of a merge."""

    add: Callable[[Leaves, Leaves, Any, Any], Leaves]
    """(sums, change, weight, age) → sums with this contribution."""
    step: Callable[[Leaves, Leaves, Leaves, Any], tuple[Leaves, Leaves]]
    """(parameters, outer state, sums, Σ weight) → next parameters and outer state."""


def merge(
    merging: Merging, shared: SharedParams, contributions: Iterable[Contribution]
) -> SharedParams:
    """Merges one or more contributions, added in their order."""
    number = jax.dtypes.canonicalize_dtype(np.float64).type
    sums: Leaves = [np.zeros(np.shape(x), sum_dtype(x)) for x in shared.params]
    weight = 0.0
    for contribution in contributions:
        sums = merging.add(
            sums,
            contribution.change,
            number(contribution.weight),
            np.int32(shared.version - contribution.began),
        )
        weight += contribution.weight
    new = merging.step(shared.params, shared.outer, sums, number(weight))
    return SharedParams(shared.version + 1, *jax.tree.map(np.asarray, new))


def first_shared(outer: optax.GradientTransformation, params: PyTree) -> SharedParams:
    """Initializes the shared parameters and the state of the outer optimizer, on the host."""
    hosted = jax.tree.map(np.asarray, params)
    state = jax.tree.map(np.asarray, outer.init(hosted))
    return SharedParams(0, jax.tree.leaves(hosted), jax.tree.leaves(state))


def merging_of(
    outer: optax.GradientTransformation, discount: Discount | None, params: PyTree
) -> Merging:
    """Builds the two programs, uncompiled."""
    tree = jax.tree.structure(params)
    state_tree = jax.tree.structure(jax.eval_shape(outer.init, params))

    def add(sums: Leaves, change: Leaves, weight: jax.Array, age: jax.Array) -> Leaves:
        factor = weight if discount is None else weight * discount(age)
        return [total + jnp.asarray(factor, total.dtype) * x for total, x in zip(sums, change)]

    def step(
        params: Leaves, outer_state: Leaves, sums: Leaves, weight: jax.Array
    ) -> tuple[Leaves, Leaves]:
        divisor = jnp.where(weight == 0, 1, weight)
        grads = [
            (total / jnp.asarray(divisor, total.dtype)).astype(x.dtype)
            for total, x in zip(sums, params)
        ]
        trees = tree.unflatten(grads), state_tree.unflatten(outer_state), tree.unflatten(params)
        new, state = update(outer, *trees)
        return jax.tree.leaves(new), jax.tree.leaves(state)

    return Merging(add, step)


def on_this_host(merging: Merging) -> Merging:
    """Compiles the two programs for this host's CPU, at their first call."""
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
    """Shapes and dtypes of the arguments of both programs, for their compilation."""

    def form(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.canonicalize_dtype(x.dtype))

    params, outer, weight, age = jax.tree.map(
        form, (shared.params, shared.outer, np.float64(0), np.int32(0))
    )
    sums = [jax.ShapeDtypeStruct(x.shape, sum_dtype(x)) for x in params]
    return (sums, params, weight, age), (params, outer, sums, weight)


def sum_dtype(x: Any) -> np.dtype:
    """Dtype of the sum of a parameter's pseudo-gradients."""
    return at_least(x.dtype, jnp.float32)
