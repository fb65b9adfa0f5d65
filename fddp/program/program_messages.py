"""The messages of a program, and the equations that wait for them."""

import re
from collections.abc import Collection, Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

from fddp.jax_internals import (
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    acts,
    acts_alike,
    joined_dim,
    parameters,
    permutes,
    scope_of,
)
from fddp.jaxpr import form_of, inner_equations, variables
from fddp.program.exchange import begin_p, end_p, exchange_p


class Message(NamedTuple):
    """A message of a program, or the end of one that an earlier program has started."""

    position: int
    """Position of its equation."""
    pieces: tuple[Var | Literal, ...]
    """The arrays that it sends, one after the other."""
    results: tuple[Var, ...]
    """The arrays of its result, one after the other; none if a later program receives it."""
    number: Var | Literal | None = None
    """Its number, where that passes from program to program, or those of a loop's messages."""

    @property
    def sources(self) -> tuple[Var | Literal, ...]:
        """What exists before it can start, or be received if it has started elsewhere."""
        if self.pieces or self.number is None:
            return self.pieces
        return (self.number,)


def messages_of(jaxpr: Jaxpr, maker: dict[Var, int]) -> tuple[list[Message], set[int]]:
    """The messages of a program, and the positions of equations that they make superfluous.

    A message copies its arrays into its memory, and its results out of it: so an equation that only
    joins arrays to a message, or splits its result, does not run.
    """
    readers = dict[Var | Literal, list[int]]()
    for at, eqn in enumerate(jaxpr.eqns):
        for var in set(variables(eqn.invars)):
            readers.setdefault(var, []).append(at)
    for var in variables(jaxpr.outvars):
        readers.setdefault(var, []).append(-1)
    messages = list[Message]()
    superfluous = set[int]()

    def joined(array: Var | Literal, reader: int) -> list[Var | Literal]:
        """The arrays that equations join for one reader, one after the other in memory."""
        at = maker.get(array, -1) if isinstance(array, Var) else -1
        if at < 0 or readers[array] != [reader]:
            return [array]
        if not in_rows(jaxpr.eqns[at], "concatenate", form_of(array), 1):
            return [array]
        superfluous.add(at)
        return [piece for x in jaxpr.eqns[at].invars for piece in joined(x, at)]

    def parts(array: Var, rows: int) -> list[Var]:
        """The arrays into which equations split each row, if no other one reads it."""
        at, *more = readers.get(array, [-1])
        if at < 0 or more or not in_rows(jaxpr.eqns[at], "split", form_of(array), rows):
            return [array]
        superfluous.add(at)
        return [part for x in jaxpr.eqns[at].outvars for part in parts(x, rows)]

    for at, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive not in (exchange_p, begin_p, end_p):
            continue
        (read,), (written,) = eqn.invars, eqn.outvars
        superfluous.add(at)
        flat = parameters(eqn)["kind"] == "sum"
        pieces = list[Var | Literal]()
        results = list[Var]()
        if eqn.primitive is not end_p:
            pieces = joined(read, at) if flat else [read]
        if eqn.primitive is not begin_p:
            rows = prod(form_of(read).shape) if eqn.primitive is end_p else 1
            results = parts(written, rows) if flat else [written]
        number = {begin_p: written, end_p: read}.get(eqn.primitive)
        messages.append(Message(at, tuple(pieces), tuple(results), number))
    return messages, superfluous


def in_rows(eqn: JaxprEqn, name: str, form: Any, rows: int) -> bool:
    """Returns True if an equation joins or splits each of the rows of an array.

    Also for a reshape, which changes neither the elements nor their order.
    """
    if eqn.primitive.name == "reshape":
        return not permutes(eqn)
    return eqn.primitive.name == name and prod(form.shape[: joined_dim(eqn)]) == rows


def name_of(eqn: JaxprEqn) -> str:
    """A message's name: the innermost scope around it ("bucket 0" of `bucket0`), or its kind."""
    scope = scope_of(eqn).split("/")[-1]
    return re.sub(r"(?<=[a-z])(?=\d+$)", " ", scope) or parameters(eqn)["kind"]


def waits_of(
    eqns: Sequence[JaxprEqn], maker: dict[Var, int], messages: Sequence[Message]
) -> list[int]:
    """For each equation the messages whose result it needs: a bit for each."""
    bits = {message.position: 1 << k for k, message in enumerate(messages) if message.results}
    waits = list[int]()
    for at, eqn in enumerate(eqns):
        wait = bits.get(at, 0)
        for var in variables(eqn.invars):
            if var in maker:
                wait |= waits[maker[var]]
        waits.append(wait)
    return waits


def needed(
    eqns: Sequence[JaxprEqn],
    maker: dict[Var, int],
    atoms: Iterable[Var | Literal],
    ran: Collection[int] = (),
) -> set[int]:
    """Positions of the equations that values need and that have not run; effects stay in order."""
    found = set[int]()
    pending = [maker[var] for var in variables(atoms) if var in maker]
    while pending:
        at = pending.pop()
        if at in found or at in ran:
            continue
        found.add(at)
        eqn = eqns[at]
        pending += [maker[var] for var in variables(eqn.invars) if var in maker]
        if acts(eqn):
            pending += [a for a in range(at) if acts_alike(eqn, eqns[a])]
    return found


def receives(eqn: JaxprEqn) -> bool:
    """Returns True if an equation receives a message, at any depth."""
    return eqn.primitive in (exchange_p, end_p) or any(map(receives, inner_equations(eqn)))


def has_messages(eqn: JaxprEqn) -> bool:
    """Returns True if an equation is a message, or has one in its programs."""
    return eqn.primitive is begin_p or receives(eqn) or any(map(has_messages, inner_equations(eqn)))
