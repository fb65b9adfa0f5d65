"""Takes the gradients' program apart where stacks of layers travel in slices: its loops then run in parts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from fddp.buckets import BucketPlan, Slice
from fddp.jax_internals import ClosedJaxpr
from fddp.jaxpr import in_rounds, in_slices, read_by_rows

# A leaf, or a slice of it → the number of the input.
Inputs: TypeAlias = Mapping[tuple[int, Slice | None], int]


class Sliced(NamedTuple):
    """A program that is given slices of leaves, and makes slices of their gradients."""

    closed: ClosedJaxpr
    inputs: Inputs
    join: Callable[[Sequence[Any]], list[Any]]
    """The program's outputs → those with whole gradients."""


def by_slices(plan: BucketPlan, closed: ClosedJaxpr, grads: Mapping[int, int]) -> Sliced:
    """Gives a program slices of the leaves that travel so.

    Args:
      plan: the buckets.
      closed: a program whose first inputs are all leaves.
      grads: the number of an output that is a gradient → its leaf.

    Returns:
      The program; the same one, if nothing travels in slices.
    """
    parts = [(i, bucket.slice) for bucket in plan.buckets if bucket.slice for i in bucket.leaves]
    bounds = {i: tuple(sorted(part for leaf, part in parts if leaf == i)) for i, _ in parts}
    leaves = range(len(plan.leaves))
    inputs = {one: k for k, one in enumerate((i, part) for i in leaves for part in bounds.get(i, (None,)))}
    if not bounds:
        return Sliced(closed, inputs, list)
    by_rows = read_by_rows(closed, {i: plan.leaves[i].shape[0] for i in bounds})
    run, forms = in_slices(by_rows, bounds, {k: bounds[i] for k, i in grads.items() if i in bounds})
    cut = jax.make_jaxpr(run)(*forms)
    rounds = in_rounds(cut, {}, dict.fromkeys(range(len(forms)), 1))
    if rounds is not None:
        cut = jax.make_jaxpr(lambda *args: rounds.run(*args, *rounds.begins))(*forms)

    def join(made: Sequence[Any]) -> list[Any]:
        left = iter(made)
        each = ([next(left) for _ in bounds.get(grads.get(k, -1), (None,))] for k in range(len(closed.out_avals)))
        return [some[0] if len(some) == 1 else jnp.concatenate(some) for some in each]

    return Sliced(cut, inputs, join)
