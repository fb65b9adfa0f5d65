"""Rewrites the gradients' program for stacks of layers sent in slices: its loops run in parts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from fddp.buckets import BucketPlan, Slice
from fddp.jax_internals import ClosedJaxpr
from fddp.jaxpr import in_rounds, in_slices, read_by_rows

# (leaf, slice; None: the whole leaf) → number of the input.
Inputs: TypeAlias = Mapping[tuple[int, Slice | None], int]


class Sliced(NamedTuple):
    """A program that takes slices of leaves and returns slices of their gradients."""

    closed: ClosedJaxpr
    inputs: Inputs
    join: Callable[[Sequence[Any]], list[Any]]
    """The program's outputs → the outputs with whole gradients."""


def by_slices(plan: BucketPlan, closed: ClosedJaxpr, grads: Mapping[int, int]) -> Sliced:
    """Makes a program of slices from a program of leaves, if the plan sends leaves in slices.

    The first inputs of `closed` are all leaves. `grads` maps the number of an output to the leaf of
    this gradient.
    """
    bounds: dict[int, tuple[Slice, ...]] = {}
    for bucket in plan.buckets:
        if bucket.slice:
            for i in bucket.leaves:
                bounds[i] = tuple(sorted((*bounds.get(i, ()), bucket.slice)))
    inputs: dict[tuple[int, Slice | None], int] = {}
    for i in range(len(plan.leaves)):
        for part in bounds.get(i, (None,)):
            inputs[i, part] = len(inputs)
    if not bounds:
        return Sliced(closed, inputs, list)
    by_rows = read_by_rows(closed, {i: plan.leaves[i].shape[0] for i in bounds})
    run, forms = in_slices(by_rows, bounds, {k: bounds[i] for k, i in grads.items() if i in bounds})
    program = jax.make_jaxpr(run)(*forms)
    rounds = in_rounds(program, {}, dict.fromkeys(range(len(forms)), 1))
    if rounds is not None:
        program = jax.make_jaxpr(lambda *args: rounds.run(*args, *rounds.begins))(*forms)

    def join(outputs: Sequence[Any]) -> list[Any]:
        remaining = iter(outputs)
        joined = list[Any]()
        for k in range(len(closed.out_avals)):
            if grads.get(k) in bounds:
                joined.append(jnp.concatenate([next(remaining) for _ in bounds[grads[k]]]))
            else:
                joined.append(next(remaining))
        return joined

    return Sliced(program, inputs, join)
