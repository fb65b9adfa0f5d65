"""Updates parameters with an optimizer, and leaves parameters alone that a step did not use.

With a zero gradient a parameter would still move by momentum and weight decay. DDP leaves its `.grad` undefined, and
torch's optimizers pass over it. Here the optimizer runs on all parameters, and unused ones are put back.

An optimizer gets the gradients, and those of optax's extra arguments that a step knows: `value`, the mean loss, and
`grad`. An optimizer that asks for more is refused before anything runs.

Source: `finalize_backward` in PyTorch's reducer.cpp, which keeps `.grad` of globally unused parameters undefined;
`GradientTransformationExtraArgs` in optax.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fddp.jaxpr import inputs_of_outputs
from fddp.optim.layout import map_state, masked
from fddp.optim.local import LocalSteps, Optimizer

# Names in optax's transformations of functions that compute the loss, or its gradients, at other parameters.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "value_fn": lambda params, **rest: optax.tree.sum(params),
    "obj_fn": lambda params: optax.tree.sum(params),
    "grad_fn": lambda params, step: params,
}


def update(
    optimizer: optax.GradientTransformation,
    grads: Any,
    opt_state: Any,
    params: Any,
    used: Any = None,
    *,
    value: Any = None,
) -> tuple[Any, Any]:
    """Updates parameters and optimizer state; those of leaves that no replica used stay as they were, bit for bit.

    Args:
      optimizer: any optax transformation.
      grads: tree of gradients like the parameters.
      opt_state: the optimizer's state.
      params: the parameters. In `optax.LookaheadParams` only the fast ones have gradients; a slow leaf counts as used
        if its fast leaf is.
      used: tree like the parameters, with the number of replicas that used each leaf; None: all are used.
      value: the loss, for optimizers that ask for it.

    Returns:
      The parameters and the optimizer's state. State that belongs to no single leaf (a count of steps, a vector of all
      leaves) is updated if a leaf was used whose update reads it. Under `optax.partition` a part of which
      no leaf was used keeps its count. One Adam for all parts counts every step.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from fddp.optim.updates import update
      >>> decay, ones = optax.add_decayed_weights(-0.5), {"a": jnp.ones(()), "b": jnp.ones(())}
      >>> params, _ = update(decay, {"a": 0.0, "b": 0.0}, decay.init(ones), ones, used={"a": 2, "b": 0})
      >>> {name: float(x) for name, x in params.items()}
      {'a': 0.5, 'b': 1.0}
    """
    grads = _fast(grads)
    updated = partial(updates_of, optimizer, grads, params=params, value=value, grad=grads)
    updates, new_state = updated(opt_state)
    new_params: Any = optax.apply_updates(params, updates)
    if used is None:
        return new_params, new_state

    def chosen(new: Any, old: Any) -> Any:
        put_back = lambda new, old, n: new if masked(new) else jnp.where(n > 0, new, old)  # noqa: E731
        return jax.tree.map(put_back, new, old, _fast(used), is_leaf=masked)

    both = isinstance(params, optax.LookaheadParams)
    kept = optax.LookaheadParams(*map(chosen, new_params, params)) if both else chosen(new_params, params)
    counts = jax.tree.leaves(_fast(used))
    inputs = inputs_of_outputs(jax.make_jaxpr(lambda state: updated(state)[0])(opt_state))

    def of_several(new: Any, old: Any, number: int) -> Any:
        # `optax.LookaheadParams` has two updates for each leaf: first all fast ones, then all slow ones.
        readers = {k % len(counts) for k, numbers in enumerate(inputs) if number in numbers}
        if not readers:
            return new
        any_used = jnp.any(jnp.stack([counts[k] for k in sorted(readers)]) > 0)
        return jnp.where(any_used, new, old)

    treedef = jax.tree.structure(opt_state)
    numbers = treedef.unflatten(range(treedef.num_leaves))
    of_leaves = lambda new, old, numbers: chosen(new, old)  # noqa: E731
    return kept, map_state(of_leaves, of_several, _fast(params), new_state, opt_state, numbers)


def check_needs(optimizer: Optimizer, params: Any = None) -> None:
    """Refuses an optimizer that asks for arguments which a step does not have; nothing is computed.

    Args:
      optimizer: any optax transformation, or one of `local_steps`.
      params: the parameters; None: made-up ones. An optimizer that fails with these for other reasons (labels by path,
        say) passes.

    Raises:
      TypeError: it asks for a function of the loss, as line searches do, or for the gradient of each example.
    """
    for part in (optimizer.inner, optimizer.outer) if isinstance(optimizer, LocalSteps) else (optimizer,):
        _check_needs(part, params)


def _check_needs(optimizer: optax.GradientTransformation, params: Any) -> None:
    if params is None:
        made_up: Any = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in (("w", (3, 2)), ("b", (3,)))}
        # With these `lookahead` works too, given the gradients of one half.
        params = optax.LookaheadParams(made_up, made_up)
        gradients = [params, params.fast]
    else:
        gradients = [_fast(params)]

    # The first trials call it as a step does; later ones pass one function more, to see whether it was missing.
    as_called = [(grads, {}) for grads in gradients]
    for grads, functions in [*as_called, *((gradients[0], {name: f}) for name, f in FUNCTIONS.items())]:
        try:
            updates = jax.eval_shape(partial(_first_updates, optimizer, functions), grads, params)
        except Exception as error:  # the next trial may work; if none does, the user's first step raises the same
            wanted = _missing(str(error))
        else:
            wanted = " and ".join(functions) or _other_form(updates, params)
            if not wanted:
                return
        if wanted:
            raise TypeError(
                f"fddp.train_step: the optimizer's update asks for {wanted}, which a step does not have: it gives the "
                "mean gradients of a batch and, as value, their mean loss, and nothing that computes them once more. "
                "Take an optimizer that does without, as optax.lbfgs(0.1, linesearch=None) does, or write the step "
                "yourself, with fddp.all_reduce inside jax.shard_map."
            )


def updates_of(optimizer: Any, grads: Any, opt_state: Any, params: Any, **known: Any) -> tuple[Any, Any]:
    """Calls an update with those of the known arguments that it takes: some transformations refuse the others."""
    while True:
        try:
            return optimizer.update(grads, opt_state, params, **known)
        except TypeError as error:
            unexpected = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if unexpected is None or unexpected[1] not in known:
                raise
            del known[unexpected[1]]


def _first_updates(optimizer: Any, functions: dict[str, Any], grads: Any, params: Any) -> Any:
    known = {"value": jnp.zeros(()), "grad": grads} | functions
    return updates_of(optimizer, grads, optimizer.init(params), params, **known)[0]


def _missing(message: str) -> str:
    """Reads in Python's message the keyword arguments that an update was not given; '' if it is another message."""
    told = re.search(r"missing \d+ required keyword-only arguments?: (.*)", message)
    names = re.findall(r"'(\w+)'", told[1]) if told else []
    return " and ".join(name for name in names if name not in ("value", "grad"))


def _other_form(updates: Any, params: Any) -> str:
    """Describes the gradients that an update asks for, if its result is not like the parameters; '' if it is."""
    new, form = jax.tree.flatten(updates)
    old, like = jax.tree.flatten(params)
    differing = [(np.shape(a), np.shape(b)) for a, b in zip(new, old) if form == like and np.shape(a) != np.shape(b)]
    if not differing:
        return ""
    return "the gradient of each example (from their mean it makes {} for parameters of {})".format(*differing[0])


def _fast(params: Any) -> Any:
    """The parameters that have gradients: all but the slow ones of `optax.LookaheadParams`."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params
