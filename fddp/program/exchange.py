"""A message of a program, as one equation: `overlapped` makes a start and a done of it.

A message that outlives its program is two equations: `begin`, which returns its number, and `end`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

Kind: TypeAlias = Literal["sum", "gather", "exchange"]
# float32 1.0, unknown to XLA. It goes through every call, so that data orders the calls.
TOKEN = jax.ShapeDtypeStruct((), jnp.float32)
# The number of a message on its lane.
NUMBER = jax.ShapeDtypeStruct((), jnp.int32)


@dataclass(frozen=True, eq=False)
class Carrier:
    """The calls that start and end a message inside a program."""

    start: Callable[..., tuple[jax.Array, jax.Array]]
    """(token, arrays, kind, form of the result, name, turn, late) → (token, number of the message).
    If late, messages that start later may overtake it."""
    done: Callable[..., tuple[jax.Array, Sequence[jax.Array]]]
    """(tokens, number, forms, turn) → (token, arrays of these forms, one after the other)."""


def exchange(carrier: Carrier, kind: Kind, x: jax.Array, ranks: int) -> jax.Array:
    """Sends an array to all ranks, and returns their sum ("sum"), the arrays of all ranks in rows
    ("gather"), or row i of rank i ("exchange", which sends row i to rank i)."""
    shape = (ranks, *x.shape) if kind == "gather" else x.shape
    form = jax.ShapeDtypeStruct(shape, x.dtype)
    return exchange_p.bind(x, carrier=carrier, kind=kind, form=form)


exchange_p = Primitive("fddp_exchange")
begin_p = Primitive("fddp_begin")
end_p = Primitive("fddp_end")


@exchange_p.def_abstract_eval
@end_p.def_abstract_eval
def _of_form(x: Any, *, form: jax.ShapeDtypeStruct, **params: Any) -> Any:
    return x.update(shape=form.shape, dtype=form.dtype)


begin_p.def_abstract_eval(lambda x, **params: _of_form(x, form=NUMBER))


def _at_once(
    x: jax.Array, *, carrier: Carrier, kind: Kind, form: jax.ShapeDtypeStruct
) -> jax.Array:
    """Starts a message that `overlapped` has not seen, under `jax.disable_jit`, and awaits it."""
    token, number = carrier.start(jnp.ones((), TOKEN.dtype), [x], kind, form, kind, 0, False)
    return carrier.done([token], number, [form], 0)[1][0]


@exchange_p.def_impl
def _without_a_program(x: jax.Array, **params: Any) -> jax.Array:
    with jax.disable_jit(False):
        return jax.block_until_ready(jax.jit(partial(_at_once, **params))(x))


mlir.register_lowering(exchange_p, mlir.lower_fun(_at_once, multiple_results=False))
