"""Gradients over replicas, as a replacement for `jax.value_and_grad` in scripts with their own
optimizer step."""

from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from fddp.comm import REPLICATED, Group
from fddp.jax_internals import without_context_mesh
from fddp.losses import check_callable, make_objective
from fddp.runtime import group_of
from fddp.step import (
    MEMORY,
    Mean,
    OptionArguments,
    Replica,
    Settled,
    TrainState,
    check_arrays,
    compare,
    explained,
    first_hook_state,
    read_options,
    ready,
    refuse,
    refuse_transformations,
    synchronize,
)
from fddp.training.make import strategy_of

CALL = "fddp.value_and_grad"


@explained
def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    group: Group | None = None,
    has_aux: bool = False,
    **options: Unpack[OptionArguments],
) -> Callable[..., Any]:
    """Makes a function like `jax.value_and_grad(loss_fn)`, averaged over all replicas' rows.

    Args:
      loss_fn: as for `train_step`.
      group: the replicas; None: the group of `fddp.init()`.
      has_aux: whether the loss returns metrics.
      **options: fields of `fddp.Options`, named as DDP names them.

    Returns:
      `f(params, batch)` → (loss, grads) or ((loss, aux), grads), averaged over replicas. The
      results are equal on all replicas only if `params` are, which is not checked: start from one
      seed, or from `group.broadcast(params)`. `f` passes `model_state=` and `rng=` on to the loss;
      with a model state, aux is (model_state, aux). Parameters without a gradient (integers) get
      zeros.

    Raises:
      TypeError: an unknown option, or a loss that is not a function.
      ValueError: an option out of its range.

    Example:
      >>> import fddp, jax.numpy as jnp
      >>> f = fddp.value_and_grad(lambda w, x: jnp.mean((x - w) ** 2))
      >>> [float(x) for x in f(jnp.zeros(()), jnp.full(8, 2.0))]
      [4.0, -4.0]
    """
    check_callable("value_and_grad", "loss_fn", loss_fn)
    settings = read_options("value_and_grad", {"donate": False} | options)
    refuse(settings.features | {CALL: CALL})

    def use(replica: Replica, layout: TrainState, state: TrainState, mean: Mean) -> Any:
        del replica, layout
        # None marks a parameter without a gradient; it is also a part of a tree, as in Equinox.
        leaves, tree = jax.tree.flatten(state.params)
        pairs = zip(leaves, tree.flatten_up_to(mean.grads))
        grads = tree.unflatten([jnp.zeros_like(p) if g is None else g for p, g in pairs])
        if state.model_state is not None:
            return (mean.loss, (mean.model_state, mean.aux)), grads
        return ((mean.loss, mean.aux) if has_aux else mean.loss), grads

    group = group_of("value_and_grad", group)
    replica = Replica(
        make_objective(loss_fn, has_aux=has_aux), group, settings, strategy_of(settings)
    )
    settled: Settled | None = None

    @without_context_mesh
    def f(params: PyTree, batch: PyTree, *, model_state: PyTree = None, rng: PyTree = None) -> Any:
        nonlocal settled
        refuse_transformations()
        if settled is None:
            check_arrays(params)
        params = jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), params)
        state = TrainState(jnp.zeros((), jnp.int32), params, (), model_state, (), None, rng)
        state = replica.group.placement.place(state, REPLICATED)
        if jax.tree.leaves(first_hook_state(replica, state.params)):
            refuse({CALL: CALL, MEMORY: str(settings.hook)})
        settled, args = ready(settled, replica, use, state, batch)
        settled = compare(settled, args)
        return synchronize(settled, state, args)

    return f
