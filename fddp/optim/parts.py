"""Divides an optimizer's update over ranks that hold parts of the leaves and of its state (ZeRO).

The program of the update decides how. Elementwise equations run on parts of any size. A norm takes
one sum over the ranks. A leaf whose elements are mixed, as in Muon, is gathered on one rank, its
owner. An update that mixes several leaves cannot be divided.

Source: ZeRO (Rajbhandari et al., SC 2020), which assumes an elementwise optimizer.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from fddp.jax_internals import ClosedJaxpr, unbound_axis
from fddp.jaxpr import Follows, Kind, Same, Whole, result_kinds, whole_leaves
from fddp.optim.state_leaves import map_state, masked, nodes_of
from fddp.optim.updates import updates_of

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


class Divided(NamedTuple):
    """An optimizer's update, and the leaves that it needs whole."""

    program: ClosedJaxpr
    """(gradients, state, parameters, loss) → (updates, state), of whole arrays, flattened."""
    inputs: tuple[Kind, ...]
    """Kind of each argument; leaves have the numbers of the parameters."""
    owned: dict[int, str]
    """Leaf gathered on its owner → the first equation that needs it whole."""
    refused: dict[int, str]
    """Leaf with an indivisible update → the reason."""


def divided(optimizer: optax.GradientTransformation, params: PyTree, loss: Any = SCALAR) -> Divided:
    """Divides an optimizer's update over ranks, as far as its program allows."""

    def call(grads: PyTree, opt_state: PyTree, params: PyTree, value: Any) -> Any:
        return updates_of(optimizer, grads, opt_state, params, value=value, grad=grads)

    forms = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), params)
    opt_state = jax.eval_shape(optimizer.init, forms)
    of_params = list(map(Follows, range(len(jax.tree.leaves(forms)))))
    of_state = nodes_of(Kind, kinds_of_state(opt_state, forms))
    inputs = (*of_params, *of_state, *of_params, Same())
    try:
        program = jax.make_jaxpr(call)(forms, opt_state, forms, loss)
    except NameError as error:
        if unbound_axis(error) is None:
            raise
        raise ValueError(
            "with shard each replica updates its part, and the optimizer has a collective: leave "
            f"it out, the gradients are averaged already. JAX reports: {error}"
        ) from None
    # Updates must lie like the parameters, and the new state like the old one.
    outputs = map(_alike, result_kinds(program, inputs), (*of_params, *of_state))
    mixed = [kind for kind in outputs if isinstance(kind, Whole)]
    refused = {leaf: kind.why for kind in mixed for leaf in sorted(kind.leaves)}
    owned = dict(sorted(whole_leaves(program, inputs).items()))
    return Divided(program, inputs, owned, refused)


def kinds_of_state(opt_state: PyTree, params: PyTree, param_kinds: Any = None) -> Any:
    """Finds the kind of each array of an optimizer's state."""
    if param_kinds is None:
        param_kinds = jax.tree.unflatten(
            jax.tree.structure(params), map(Follows, range(len(jax.tree.leaves(params))))
        )

    def of(x: Any, param: Any, follows: Follows) -> Any:
        if masked(x):
            return x
        if jnp.shape(x) == jnp.shape(param) or x.size != 1:
            return follows
        return Same()

    def of_part(subtree: Any) -> Any:
        return jax.tree.map(of, subtree, params, param_kinds, is_leaf=masked)

    return map_state(of_part, lambda x: Same(x.size == 1), params, opt_state)


def _alike(after: Kind, before: Kind) -> Kind:
    """Returns `Whole` for an output that differs in kind from its input at the next step."""
    match after, before:
        case Follows(leaf), Same():
            return Whole(frozenset({leaf}), "a state that is in parts only afterwards")
        case Follows(source), Follows(target) if source != target:
            return Whole(frozenset({source, target}), "a state of one leaf that goes to another")
        case Same(uniform=False), Follows(leaf):
            return Whole(frozenset({leaf}), "elements that are set one by one")
    return after
