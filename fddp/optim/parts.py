"""What of an optimizer's update can be made from parts of the leaves, as ranks hold them that share its state (ZeRO).

It is found in the update's program: what goes element by element is made from parts of any size, a norm from one sum
over the ranks, and what mixes the elements of a leaf, as Muon does, needs that leaf whole.

Source: ZeRO (Rajbhandari et al., SC 2020), whose optimizers are on the user's honour.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fddp.jax_internals import ClosedJaxpr
from fddp.jaxpr import Follows, Kind, Same, Whole, kinds
from fddp.optim.layout import map_state, masked

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


class Divided(NamedTuple):
    """An optimizer's update, and what of it can be made from parts."""

    program: ClosedJaxpr
    """(gradients, state, parameters, loss) → (updates, state), of whole arrays, flattened."""
    inputs: tuple[Kind, ...]
    """What each of its arguments is; leaves are numbered as those of the parameters."""
    whole: dict[int, str]
    """Leaves that must be whole, and the equation that needs them so."""


def divided(optimizer: optax.GradientTransformation, params: Any, loss: Any = SCALAR) -> Divided:
    """Finds what of an optimizer's update can be made from parts.

    Args:
      optimizer: any optax transformation.
      params: the parameters that it trains, or their forms.
      loss: the form of the mean loss, which optimizers get that ask for it.

    Returns:
      The update's program, and the leaves that it needs whole.

    Example:
      >>> import jax, optax
      >>> params = {"b": jax.ShapeDtypeStruct((3,), "float32"), "w": jax.ShapeDtypeStruct((3, 4), "float32")}
      >>> divided(optax.adamw(0.1), params).whole
      {}
      >>> divided(optax.contrib.muon(0.1), params).whole
      {1: 'scan'}
    """
    update = optax.with_extra_args_support(optimizer).update

    def call(grads: Any, opt_state: Any, params: Any, value: Any) -> Any:
        return update(grads, opt_state, params, value=value, grad=grads)

    forms = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), params)
    opt_state = jax.eval_shape(optimizer.init, forms)
    numbers = jax.tree.unflatten(jax.tree.structure(forms), range(len(jax.tree.leaves(forms))))
    of_params = jax.tree.map(Follows, numbers)
    of_state = map_state(lambda part: _of_parts(part, forms, numbers), lambda x: Same(x.size == 1), forms, opt_state)
    inputs = (*_kinds(of_params), *_kinds(of_state), *_kinds(of_params), Same())
    program = jax.make_jaxpr(call)(forms, opt_state, forms, loss)
    mixed = [kind for kind in kinds(program, inputs) if isinstance(kind, Whole)]
    return Divided(program, inputs, {leaf: kind.why for kind in mixed for leaf in sorted(kind.leaves)})


def _of_parts(part: Any, params: Any, numbers: Any) -> Any:
    """What an optimizer's state holds for parameters: what has their shape follows them, one number is all ranks'."""

    def of(x: Any, param: Any, number: int) -> Any:
        if masked(x):
            return x
        if jnp.shape(x) == jnp.shape(param):
            return Follows(number)
        why = f"a state of shape {list(jnp.shape(x))}"
        return Same() if x.size == 1 else Whole(frozenset({number}), why)

    return jax.tree.map(of, part, params, numbers, is_leaf=masked)


def _kinds(tree: Any) -> list[Kind]:
    return [x for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Kind)) if isinstance(x, Kind)]
