"""An optimizer's update that leaves alone what a step did not use.

With a zero gradient a parameter would still move by momentum and weight decay; DDP leaves its `.grad` undefined, and
torch's optimizers pass it over. Here the optimizer runs on everything, and what was not used is put back.

Beside the gradients an optimizer gets what optax's extra arguments ask for and a step knows: `value`, the mean loss,
and `grad`. What asks for more is refused before anything runs.

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

from fddp.optim.layout import map_state, masked
from fddp.optim.local import LocalSteps, Optimizer

# What optax's transformations call functions that compute the loss, or its gradients, at other parameters.
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
    """Updates parameters and optimizer state; those of leaves that nobody used stay as they were, bit for bit.

    Args:
      optimizer: any optax transformation.
      grads: tree like the parameters.
      opt_state: the optimizer's state.
      params: the parameters. Of `optax.LookaheadParams` the fast ones have gradients, and what holds for a leaf of
        them holds for the slow one.
      used: tree like the parameters: how many replicas used each leaf; None: all are used.
      value: the loss, for optimizers that ask for it.

    Returns:
      The parameters and the optimizer's state. What belongs to no single leaf (a count of steps, all of them in one
      vector) always moves on.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from fddp.optim.updates import update
      >>> decay, ones = optax.add_decayed_weights(-0.5), {"a": jnp.ones(()), "b": jnp.ones(())}
      >>> params, _ = update(decay, {"a": 0.0, "b": 0.0}, decay.init(ones), ones, used={"a": 2, "b": 0})
      >>> {name: float(x) for name, x in params.items()}
      {'a': 0.5, 'b': 1.0}
    """
    grads = _fast(grads)
    updates, new_state = _updates(optimizer, grads, opt_state, params, value=value, grad=grads)
    new_params: Any = optax.apply_updates(params, updates)
    if used is None:
        return new_params, new_state

    def chosen(new: Any, old: Any) -> Any:
        put_back = lambda new, old, n: new if masked(new) else jnp.where(n > 0, new, old)  # noqa: E731
        return jax.tree.map(put_back, new, old, _fast(used), is_leaf=masked)

    both = isinstance(params, optax.LookaheadParams)
    kept = optax.LookaheadParams(*map(chosen, new_params, params)) if both else chosen(new_params, params)
    return kept, map_state(chosen, lambda new, old: new, _fast(params), new_state, opt_state)


def check_needs(optimizer: Optimizer, params: Any = None) -> None:
    """Refuses an optimizer that asks for what a step does not have; nothing is computed.

    Args:
      optimizer: any optax transformation.
      params: the parameters; None: some made up. What fails with these for other reasons (labels by path, say) passes.

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

    # As a step calls it; then with a function more, to see whether that is what was missing.
    as_called = [(grads, {}) for grads in gradients]
    for grads, functions in [*as_called, *((gradients[0], {name: f}) for name, f in FUNCTIONS.items())]:
        try:
            updates = jax.eval_shape(partial(_first_updates, optimizer, functions), grads, params)
        except Exception as error:  # not ours to judge: the next trial may work, and if none does the first step tells
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


def _updates(optimizer: Any, grads: Any, opt_state: Any, params: Any, **known: Any) -> tuple[Any, Any]:
    """An update, given what it takes of what is known: not every transformation passes over the rest."""
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
    return _updates(optimizer, grads, optimizer.init(params), params, **known)[0]


def _missing(message: str) -> str:
    """Keyword arguments that an update has not been given, as Python tells it; '' if that is not what it tells."""
    told = re.search(r"missing \d+ required keyword-only arguments?: (.*)", message)
    names = re.findall(r"'(\w+)'", told[1]) if told else []
    return " and ".join(name for name in names if name not in ("value", "grad"))


def _other_form(updates: Any, params: Any) -> str:
    """What gradients an update asks for whose result is not like the parameters; '' if it is."""
    (new, form), (old, like) = jax.tree.flatten(updates), jax.tree.flatten(params)
    differing = [(np.shape(a), np.shape(b)) for a, b in zip(new, old) if form == like and np.shape(a) != np.shape(b)]
    if not differing:
        return ""
    return "the gradient of each example (from their mean it makes {} for parameters of {})".format(*differing[0])


def _fast(params: Any) -> Any:
    """What has gradients: all but the slow ones of `optax.LookaheadParams`."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params
