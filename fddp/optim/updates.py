"""Updates parameters with an optimizer, except the parameters that a step did not use.

With a zero gradient momentum and weight decay would still move a parameter. DDP leaves its `.grad`
undefined, and torch's optimizers skip it. Here the optimizer runs on all parameters, and unused
ones are restored.

An optimizer receives the gradients, and two of optax's extra arguments: `value`, the mean loss, and
`grad`. An optimizer that requires more is refused before any computation.

Source: `finalize_backward` in PyTorch's reducer.cpp, which keeps `.grad` of globally unused
parameters undefined; `GradientTransformationExtraArgs` in optax.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from fddp.jaxpr import inputs_of_outputs
from fddp.optim.state_leaves import map_state, masked

# Arguments of optax's transformations for functions of the loss, or its gradients, at other
# parameters.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "value_fn": lambda params, **kwargs: optax.tree.sum(params),
    "obj_fn": lambda params: optax.tree.sum(params),
    "grad_fn": lambda params, step: params,
}


def update(
    optimizer: optax.GradientTransformation,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
    used: Any = None,
    *,
    value: Any = None,
) -> tuple[Any, Any]:
    """Updates parameters and optimizer state; leaves that no replica used stay bitwise equal.

    `used` is a tree like the parameters with the number of replicas that used each leaf; None means
    all. State that belongs to no single leaf, such as a step count or a vector of all leaves, is
    updated if a used leaf's update reads it: an unused part of `optax.partition` keeps its count,
    while one Adam for all parts counts every step.
    """
    updated = partial(updates_of, optimizer, grads, params=params, value=value, grad=grads)
    updates, new_state = updated(opt_state)
    new_params: Any = optax.apply_updates(params, updates)
    if used is None:
        return new_params, new_state

    def chosen(new: Any, old: Any) -> Any:
        pick = lambda new, old, n: new if masked(new) else jnp.where(n > 0, new, old)  # noqa: E731
        return jax.tree.map(pick, new, old, used, is_leaf=masked)

    counts = jax.tree.leaves(used)
    inputs = inputs_of_outputs(jax.make_jaxpr(lambda state: updated(state)[0])(opt_state))

    def of_several(new: Any, old: Any, number: int) -> Any:
        readers = {k for k, numbers in enumerate(inputs) if number in numbers}
        if not readers:
            return new
        any_used = jnp.any(jnp.stack([counts[k] for k in sorted(readers)]) > 0)
        return jnp.where(any_used, new, old)

    treedef = jax.tree.structure(opt_state)
    numbers = treedef.unflatten(range(treedef.num_leaves))
    of_leaves = lambda new, old, numbers: chosen(new, old)  # noqa: E731
    return chosen(new_params, params), map_state(
        of_leaves, of_several, params, new_state, opt_state, numbers
    )


def check_needs(optimizer: optax.GradientTransformation, params: PyTree = None) -> None:
    """Raises TypeError if an optimizer requires arguments that a step lacks; nothing is computed.

    Line searches, for example, require a function of the loss, and some optimizers the gradient of
    each example. Without `params` it tries invented ones. An optimizer that fails with them for
    another reason, such as labels by path, passes.
    """
    if params is None:
        shapes = {"w": (3, 2), "b": (3,)}
        params = {name: jax.ShapeDtypeStruct(x, jnp.float32) for name, x in shapes.items()}
    # The first trial calls the update as a step does. Later ones add one function each, to detect
    # the missing one.
    for functions in ({}, *({name: f} for name, f in FUNCTIONS.items())):
        try:
            updates = jax.eval_shape(partial(_first_updates, optimizer, functions), params)
        except Exception as error:
            # The next trial may work. If none does, the user's first step raises the same error.
            missing = _missing(str(error))
        else:
            missing = " and ".join(functions) or _other_form(updates, params)
            if not missing:
                return
        if missing:
            raise TypeError(
                f"fddp.train_step: the optimizer's update needs {missing}, which a step does "
                "not have: it passes the mean gradients of a batch and, as value, their mean "
                "loss, but no function of the loss. Use an optimizer without it, such as "
                "optax.lbfgs(0.1, linesearch=None), or write the step yourself, with "
                "fddp.all_reduce inside jax.shard_map."
            )


def updates_of(
    optimizer: Any, grads: PyTree, opt_state: PyTree, params: PyTree, **extra_args: Any
) -> tuple[Any, Any]:
    """Calls an update with the extra arguments it accepts: some transformations raise on others."""
    while True:
        try:
            return optimizer.update(grads, opt_state, params, **extra_args)
        except TypeError as error:
            unexpected = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if unexpected is None or unexpected[1] not in extra_args:
                raise
            del extra_args[unexpected[1]]


def _first_updates(
    optimizer: optax.GradientTransformation,
    functions: dict[str, Callable[..., Any]],
    params: PyTree,
) -> Any:
    extra_args = {"value": jnp.zeros(()), "grad": params} | functions
    return updates_of(optimizer, params, optimizer.init(params), params, **extra_args)[0]


def _missing(message: str) -> str:
    """Extracts missing keyword arguments from Python's error message; '' if it has none."""
    match = re.search(r"missing \d+ required keyword-only arguments?: (.*)", message)
    if match is None:
        return ""
    names = re.findall(r"'(\w+)'", match[1])
    return " and ".join(name for name in names if name not in ("value", "grad"))


def _other_form(updates: PyTree, params: PyTree) -> str:
    """Describes the gradients that an update requires, if its updates have other shapes; or ""."""
    new, new_tree = jax.tree.flatten(updates)
    old, old_tree = jax.tree.flatten(params)
    shapes = [
        (np.shape(a), np.shape(b))
        for a, b in zip(new, old)
        if new_tree == old_tree and np.shape(a) != np.shape(b)
    ]
    if not shapes:
        return ""
    return "the gradient of each example (from their mean it makes {} for parameters of {})".format(
        *shapes[0]
    )
