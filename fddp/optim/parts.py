"""Divides an optimizer's update over ranks that hold parts of the leaves and share its state (ZeRO).

The update's program tells how. Elementwise equations run on parts of any size. A norm takes one sum over the ranks. A
leaf whose elements are mixed, as Muon does, is gathered for that. An update that mixes several leaves is not divided:
each rank would gather all of them.

Source: ZeRO (Rajbhandari et al., SC 2020), which trusts the user that the optimizer is elementwise.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fddp.jaxpr import Follows, Kind, Same, Whole, kinds, leaves_of, needed_whole
from fddp.optim.layout import map_state, masked

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


class Divided(NamedTuple):
    """The leaves that an optimizer's update needs whole."""

    gathered: dict[int, str]
    """Leaves that are gathered for a part of it → the first equation that needs them whole."""
    refused: dict[int, str]
    """Leaves whose update cannot be divided → the reason."""


def divided(optimizer: optax.GradientTransformation, params: Any, loss: Any = SCALAR) -> Divided:
    """Divides an optimizer's update over ranks, as its program allows.

    Args:
      optimizer: any optax transformation.
      params: the parameters that it trains, or their shapes and dtypes.
      loss: shape and dtype of the mean loss, for optimizers that ask for it.

    Returns:
      The leaves that the update needs whole, one or several at a time.

    Example:
      >>> import jax, optax
      >>> params = {"b": jax.ShapeDtypeStruct((3,), "float32"), "w": jax.ShapeDtypeStruct((3, 4), "float32")}
      >>> divided(optax.adamw(0.1), params).gathered
      {}
      >>> divided(optax.contrib.muon(0.1), params).gathered
      {1: 'scan'}
      >>> divided(optax.flatten(optax.adam(0.1)), params).refused
      {0: 'concatenate of several leaves', 1: 'concatenate of several leaves'}
    """
    update = optax.with_extra_args_support(optimizer).update

    def call(grads: Any, opt_state: Any, params: Any, value: Any) -> Any:
        return update(grads, opt_state, params, value=value, grad=grads)

    forms = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), params)
    opt_state = jax.eval_shape(optimizer.init, forms)
    of_params = list(map(Follows, range(len(jax.tree.leaves(forms)))))
    of_state = jax.tree.leaves(kinds_of_state(opt_state, forms), is_leaf=_is_kind)
    inputs = [*of_params, *of_state, *of_params, Same()]
    program = jax.make_jaxpr(call)(forms, opt_state, forms, loss)
    # Updates are like parameters, and a state that an update makes is like the one that it is given.
    made = zip(kinds(program, inputs), [*of_params, *of_state])
    refused = {leaf: why for leaves, why in map(_refusal, *zip(*made)) for leaf in sorted(leaves)}
    return Divided(dict(sorted(needed_whole(program, inputs).items())), refused)


def kinds_of_state(opt_state: Any, params: Any, of_params: Any = None) -> Any:
    """Finds the kinds of the arrays of an optimizer's state.

    Args:
      opt_state: the state, or its shapes and dtypes.
      params: the parameters that it trains.
      of_params: a tree like the parameters, with the kind of each; None: each follows the leaf of its own number.

    Returns:
      A kind for each array: an array for a parameter lies in parts as the parameter does, a single number is equal on
      all ranks.
    """
    if of_params is None:
        of_params = jax.tree.unflatten(jax.tree.structure(params), map(Follows, range(len(jax.tree.leaves(params)))))

    def of(x: Any, param: Any, follows: Follows) -> Any:
        if masked(x):
            return x
        return follows if jnp.shape(x) == jnp.shape(param) or x.size != 1 else Same()

    def of_part(part: Any) -> Any:
        return jax.tree.map(of, part, params, of_params, is_leaf=masked)

    return map_state(of_part, lambda x: Same(), params, opt_state)


def _refusal(made: Kind, given: Kind) -> tuple[frozenset[int], str]:
    """The leaves of a result that does not lie as the step before gave it, and the reason; none where it does."""
    leaves = leaves_of([made])
    if isinstance(made, Whole) and len(leaves) > 1:
        return leaves, made.why
    if leaves and isinstance(given, Same):
        return leaves, "a state that is in parts only afterwards"
    if leaves and isinstance(given, Follows) and leaves != {given.leaf}:
        return leaves | {given.leaf}, "a state of one leaf that goes to another"
    return frozenset(), ""


def _is_kind(x: Any) -> bool:
    return isinstance(x, Kind)
