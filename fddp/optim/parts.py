"""Divides an optimizer's update over ranks that hold parts of the leaves and share its state (ZeRO).

The update's program tells how. Elementwise equations run on parts of any size. A norm takes one sum over the ranks. A
leaf whose elements are mixed, as Muon does, is gathered for that on one rank, its home. An update that mixes several
leaves cannot be divided.

Source: ZeRO (Rajbhandari et al., SC 2020), which trusts the user that the optimizer is elementwise.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fddp.jax_internals import ClosedJaxpr
from fddp.jaxpr import Follows, Kind, Same, Whole, kinds, stays
from fddp.optim.layout import map_state, masked
from fddp.optim.updates import updates_of

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


class Divided(NamedTuple):
    """An optimizer's update, and the leaves that it needs whole."""

    program: ClosedJaxpr
    """(gradients, state, parameters, loss) → (updates, state), of whole arrays, flattened."""
    inputs: tuple[Kind, ...]
    """The kind of each of its arguments; leaves are numbered as those of the parameters."""
    home: dict[int, str]
    """Leaves that are gathered at their home for a part of it → the first equation that needs them whole."""
    refused: dict[int, str]
    """Leaves whose update cannot be divided → the reason."""


def divided(optimizer: optax.GradientTransformation, params: Any, loss: Any = SCALAR) -> Divided:
    """Divides an optimizer's update over ranks, as its program allows.

    Args:
      optimizer: any optax transformation.
      params: the parameters that it trains, or their shapes and dtypes.
      loss: shape and dtype of the mean loss, for optimizers that ask for it.

    Returns:
      The update's program, and the leaves that it needs whole, one or several at a time.

    Example:
      >>> import jax, optax
      >>> params = {"b": jax.ShapeDtypeStruct((3,), "float32"), "w": jax.ShapeDtypeStruct((3, 4), "float32")}
      >>> divided(optax.adamw(0.1), params).home
      {}
      >>> divided(optax.contrib.muon(0.1), params).home
      {1: 'scan'}
      >>> divided(optax.flatten(optax.adam(0.1)), params).refused
      {0: 'concatenate of several leaves', 1: 'concatenate of several leaves'}
    """

    def call(grads: Any, opt_state: Any, params: Any, value: Any) -> Any:
        return updates_of(optimizer, grads, opt_state, params, value=value, grad=grads)

    forms = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), params)
    opt_state = jax.eval_shape(optimizer.init, forms)
    of_params = jax.tree.unflatten(jax.tree.structure(forms), map(Follows, range(len(jax.tree.leaves(forms)))))
    of_state = kinds_of_state(opt_state, forms, of_params)
    inputs = (*_kinds(of_params), *_kinds(of_state), *_kinds(of_params), Same())
    try:
        program = jax.make_jaxpr(call)(forms, opt_state, forms, loss)
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise ValueError(
            "with shard each replica updates its part, and the optimizer has a collective: leave it out, the gradients "
            f"are averaged already. JAX reports: {error}"
        ) from None
    # Updates are like parameters, and a state that an update makes is like the one that it is given.
    made = map(_alike, kinds(program, inputs), (*_kinds(of_params), *_kinds(of_state)))
    mixed = [kind for kind in made if isinstance(kind, Whole)]
    refused = {leaf: kind.why for kind in mixed for leaf in sorted(kind.leaves)}
    home = {leaf: stay.why for leaf, stay in sorted(stays(program, inputs).items())}
    return Divided(program, inputs, home, refused)


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

    return map_state(of_part, lambda x: Same(x.size == 1), params, opt_state)


def _alike(made: Kind, given: Kind) -> Kind:
    """Refuses (makes `Whole`) a kind that differs from that of the step before; parts may become equal numbers."""
    match made, given:
        case Follows(leaf), Same():
            return Whole(frozenset({leaf}), "a state that is in parts only afterwards")
        case Follows(one), Follows(other) if one != other:
            return Whole(frozenset({one, other}), "a state of one leaf that goes to another")
        case Same(uniform=False), Follows(leaf):
            return Whole(frozenset({leaf}), "elements that are set one by one")
    return made


def _kinds(tree: Any) -> list[Kind]:
    return [x for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Kind)) if isinstance(x, Kind)]
