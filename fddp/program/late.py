"""Splits a program in two: the first starts all messages, and the second receives the late ones.

Source: ByteScheduler (Peng et al., SOSP 2019), whose messages cross the border between steps.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import jax

from fddp.jax_internals import ClosedJaxpr, Literal, Var, acts, acts_alike, named_as, parameters
from fddp.jaxpr import Values, maker_positions, straighten, variables
from fddp.program.exchange import begin_p, end_p, exchange_p
from fddp.program.program_messages import needed, receives


@dataclass(frozen=True, eq=False)
class SplitProgram:
    """A program in two: `first` returns the early outputs, and `second` the others."""

    program: ClosedJaxpr
    early: tuple[int, ...]
    """Positions of the outputs that `first` returns."""
    before: tuple[int, ...]
    """Positions of the equations of `first`, in order."""
    begun: tuple[int, ...]
    """Positions of the messages that `first` starts and `second` receives, in order."""
    after: tuple[int, ...]
    """Positions of the equations of `second`."""
    passed: tuple[int, ...]
    """Positions of the inputs that `second` reads."""
    computed: tuple[Var, ...]
    """Other values that `second` reads: numbers of messages, and results of `first`."""

    def first(self, *args: Any, late: bool = False) -> tuple[list[Any], list[Any]]:
        """Returns the early outputs, and the values of `computed`.

        If `late`, messages that `second` needs first may overtake the others.
        """
        jaxpr = self.program.jaxpr
        values = Values(self.program, args)
        begun = set(self.begun)
        for at in self.before:
            eqn = jaxpr.eqns[at]
            if at in begun:
                x = values.read(eqn.invars[0])
                with named_as(eqn):
                    values[eqn.outvars[0]] = begin_p.bind(x, late=late, **parameters(eqn))
            else:
                values.run([eqn])
        return values.outputs(self.early), values.read_all(self.computed)

    def received(self, computed: Iterable[Any], *rounds: int) -> list[Any]:
        """Receives the messages: values of `first`, with results in place of numbers.

        The last one is received first: a forward pass reads first what a backward pass computes
        last. A loop of so many `rounds` has stacked them.
        """
        values = dict(zip(self.computed, computed))
        for eqn in (self.program.jaxpr.eqns[at] for at in reversed(self.begun)):
            form = parameters(eqn)["form"]
            form = jax.ShapeDtypeStruct((*rounds, *form.shape), form.dtype)
            number = values[eqn.outvars[0]]
            values[eqn.outvars[0]] = end_p.bind(number, **(parameters(eqn) | {"form": form}))
        return list(values.values())

    def rest(self, passed: Iterable[Any], received: Iterable[Any]) -> list[Any]:
        """Returns the other outputs, from inputs and received values."""
        jaxpr = self.program.jaxpr
        values = Values(self.program, [])
        values.update(zip([jaxpr.invars[k] for k in self.passed], passed))
        values.update(zip(self.computed, received))
        values.run(jaxpr.eqns[at] for at in self.after)
        return values.outputs(k for k in range(len(jaxpr.outvars)) if k not in self.early)


def split_late(
    closed: ClosedJaxpr,
    early: Collection[int],
    passes: int,
) -> SplitProgram:
    """Splits a program where the outputs at the positions `early` need no further message.

    `first` receives the messages that they need, and starts the others if it can. `second` may read
    the first `passes` inputs again; it reads copies of the others.
    """
    program = straighten(closed)
    jaxpr = program.jaxpr
    eqns = jaxpr.eqns
    maker = maker_positions(jaxpr)

    def sources(atoms: Iterable[Var | Literal]) -> set[int]:
        return needed(eqns, maker, atoms)

    before = sources(jaxpr.outvars[k] for k in early)
    late = set[int]()  # positions of the equations that need another message, or are one
    begun = list[int]()
    for at, eqn in enumerate(eqns):
        waits = any(maker.get(var) in late for var in variables(eqn.invars)) or (
            acts(eqn) and any(acts_alike(eqn, eqns[earlier]) for earlier in late)
        )
        if at not in before and (waits or receives(eqn)):
            late.add(at)
            if not waits:
                before |= sources(eqn.invars)
                if eqn.primitive is exchange_p:
                    begun.append(at)
    acting = [at for at, eqn in enumerate(eqns) if acts(eqn)]
    now = [at for at in acting if at not in late]
    before |= sources(x for at in now for x in eqns[at].invars).union(now)
    outputs = [x for k, x in enumerate(jaxpr.outvars) if k not in early]
    last = set(acting) - before
    after = sources([*outputs, *(x for at in last for x in eqns[at].invars)]).union(last)
    after = after - before - set(begun)

    read = variables([*outputs, *(x for at in after for x in eqns[at].invars)])
    numbers = [eqns[at].outvars[0] for at in begun]
    made_after = {x for at in after for x in eqns[at].outvars}
    crossing = {*read, *numbers} - made_after - set(jaxpr.constvars)
    passed = tuple(k for k, var in enumerate(jaxpr.invars[:passes]) if var in crossing)
    computed = sorted(
        crossing.difference(jaxpr.invars[:passes]), key=lambda var: maker.get(var, -1)
    )
    return SplitProgram(
        program,
        tuple(early),
        tuple(sorted(before.union(begun))),
        tuple(begun),
        tuple(sorted(after)),
        passed,
        tuple(computed),
    )
