"""Loops: their programs, and how they run with other programs."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from fddp.jax_internals.jaxprs import ClosedJaxpr, JaxprEqn

Item = TypeVar("Item")


def scan_body(eqn: JaxprEqn) -> tuple[ClosedJaxpr, dict[str, Any]]:
    """The program of a round, and `length`, `reverse`, `unroll` as `jax.lax.scan` takes them. Relies on their names."""
    return eqn.params["jaxpr"], {name: eqn.params[name] for name in ("length", "reverse", "unroll")}


def shorter_scan(eqn: JaxprEqn, length: int, args: Sequence[Any]) -> list[Any]:
    """Runs some of a `scan`'s rounds. Relies on its parameters `length`, `unroll` and `jaxpr`, and on `bind`."""
    return eqn.primitive.bind(*args, **{**eqn.params, "length": length, "unroll": min(length, eqn.params["unroll"])})


def while_programs(eqn: JaxprEqn) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """The test and the body of a `while`. Relies on the parameters `cond_jaxpr` and `body_jaxpr`."""
    return eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]


def run_while(eqn: JaxprEqn, test: Callable[..., Any], body: Callable[..., Any], carry: Any, more: Any = ()) -> Any:
    """Runs a `while` by other functions of (carry, more). Relies on a test that `vmap` gives a result for each row.

    The loop then runs until no row goes on; `body` leaves the other rows of the carry unchanged.
    """
    if not while_programs(eqn)[0].out_avals[0].shape:  # pyright: ignore[reportAttributeAccessIssue]
        return jax.lax.while_loop(lambda state: test(*state), lambda state: body(*state), (carry, more))

    def each(state: Any) -> Any:
        going = test(*state)
        new, more = body(*state)
        goes = [jax.lax.broadcast_in_dim(going, x.shape, range(going.ndim)) for x in new]
        return list(map(jax.lax.select, goes, new, state[0])), more

    return jax.lax.while_loop(lambda state: jnp.any(test(*state)), each, (carry, more))


def loop_parts(eqn: JaxprEqn, items: Iterable[Item]) -> tuple[list[Item], list[Item], list[Item]]:
    """Parts what belongs to the inputs of a loop. Relies on the parameters that count them.

    Args:
      eqn: a `scan` or a `while`.
      items: one for each of its inputs.

    Returns:
      Those of a `scan`'s constants, carry and rows; of a `while`'s constants of the test, constants of the body and
      carry.
    """
    if "ft_in" in eqn.params:  # a scan's, since 0.11: a tree of constants, one of carry and one of rows
        first, second, _ = map(len, eqn.params["ft_in"].unpack())
    else:
        names = {"scan": ("num_consts", "num_carry"), "while": ("cond_nconsts", "body_nconsts")}
        first, second = (eqn.params[name] for name in names[eqn.primitive.name])
    items = list(items)
    return items[:first], items[first : first + second], items[first + second :]
