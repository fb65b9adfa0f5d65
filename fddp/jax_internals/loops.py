"""Loops: their programs, and runs of a loop with other programs."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax._src import core
from jax._src.state.discharge import discharge_state

from fddp.jax_internals.jaxprs import ClosedJaxpr, Jaxpr, JaxprEqn, inner_programs

Item = TypeVar("Item")


def scan_body(eqn: JaxprEqn) -> tuple[ClosedJaxpr, dict[str, Any]]:
    """Returns the program of a round, and `length`, `reverse` and `unroll` for `jax.lax.scan`.

    Relies on their names.
    """
    return eqn.params["jaxpr"], {name: eqn.params[name] for name in ("length", "reverse", "unroll")}


def while_programs(eqn: JaxprEqn) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """Returns test and body of a `while`. Relies on parameters `cond_jaxpr` and `body_jaxpr`."""
    return eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]


def run_while(
    eqn: JaxprEqn, test: Callable[..., Any], body: Callable[..., Any], carry: Any, more: Any = ()
) -> Any:
    """Runs a `while` with other functions of (carry, more).

    Relies on `vmap`, which gives the test a result for each row: the loop then runs until all rows
    are done, and rows that are done keep their carry.
    """
    if not while_programs(eqn)[0].out_avals[0].shape:  # pyright: ignore[reportAttributeAccessIssue]
        return jax.lax.while_loop(
            lambda state: test(*state), lambda state: body(*state), (carry, more)
        )

    def each(state: Any) -> Any:
        active = test(*state)
        new_carry, more = body(*state)
        masks = [jax.lax.broadcast_in_dim(active, x.shape, range(active.ndim)) for x in new_carry]
        return list(map(jax.lax.select, masks, new_carry, state[0])), more

    return jax.lax.while_loop(lambda state: jnp.any(test(*state)), each, (carry, more))


def loop_parts(eqn: JaxprEqn, items: Iterable[Item]) -> tuple[list[Item], list[Item], list[Item]]:
    """Splits one item per input of a loop into the three kinds of inputs.

    These are constants, carry and rows of a `scan`, or constants of the test, constants of the body
    and carry of a `while`. Relies on the parameters that count them.
    """
    # A scan's parameter since JAX 0.11: trees of constants, carry and rows.
    if "ft_in" in eqn.params:
        first, second, _ = map(len, eqn.params["ft_in"].unpack())
    else:
        names = {"scan": ("num_consts", "num_carry"), "while": ("cond_nconsts", "body_nconsts")}
        first, second = (eqn.params[name] for name in names[eqn.primitive.name])
    items = list(items)
    return items[:first], items[first : first + second], items[first + second :]


def without_refs(closed: ClosedJaxpr, axes: Sequence[tuple[str, int]] = ()) -> ClosedJaxpr:
    """Replaces the `jax.new_ref`s of a program by values; `axes` are those of its collectives.

    A Ref that the program closes over, or makes inside an inner program, is a ValueError. Relies on
    `discharge_state` and `extend_axis_env_nd`.
    """
    if any(
        isinstance(getattr(var.aval, "inner_aval", None), core.AbstractValue)
        for var in closed.jaxpr.constvars
    ):
        raise ValueError(
            "a loss closes over a Ref (jax.new_ref): return its value as model_state or aux."
        )
    if not _makes_refs(closed.jaxpr):
        return closed
    with core.extend_axis_env_nd(axes):
        plain = discharge_state(closed)
    if _makes_refs(plain.jaxpr):
        raise ValueError(
            "a loss creates a Ref (jax.new_ref) inside a loop or a branch: create it outside."
        )
    return plain


def _makes_refs(jaxpr: Jaxpr) -> bool:
    return any(
        eqn.primitive.name == "new_ref" or any(map(_makes_refs, inner_programs(eqn)))
        for eqn in jaxpr.eqns
    )
