"""Places starts and dones of messages in a program, so that messages travel while it computes.

Each equation of `exchange` becomes a start, where its array is ready, and a done, behind all starts
that need no message. `loop_messages` has moved the dones of a loop behind it. A token, float32 1.0,
goes through every start and done, so that messages leave in one order on all ranks. XLA runs what
is ready, first in, first out: data alone decides the order, neither effects nor barriers.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fddp.jax_internals import (
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    inner_programs,
    parameters,
    run_again,
)
from fddp.jaxpr import (
    Values,
    cheap,
    form_of,
    interpret,
    maker_positions,
    run_inner,
    straighten,
    variables,
)
from fddp.program.program_messages import (
    Message,
    has_messages,
    messages_of,
    name_of,
    needed,
    waits_of,
)

# XLA runs these equations as kernels of their own: it fuses no product with the token into them.
KERNELS = {"dot_general", "conv_general_dilated", "scan", "while", "cond", "sort", "fft"}
# The same for these, if they read an argument of the program.
MOVES = {"transpose", "reshape"}


def overlapped(
    closed: ClosedJaxpr, token: jax.Array, args: Sequence[Any]
) -> tuple[jax.Array, list[Any]]:
    """Runs a program under a trace, with a start and a done in place of each message.

    Returns the token of its last call, and its outputs.
    """
    program = straighten(closed)
    if not any(map(has_messages, program.jaxpr.eqns)):
        return token, interpret(closed, args, lambda eqn, read: None)
    run = _Run(program, token, args)
    run.all()
    return run.token, run.values.read_all(program.jaxpr.outvars)


class _Run:
    """The equations of a program that have run, and the messages in flight."""

    def __init__(self, program: ClosedJaxpr, token: jax.Array, args: Sequence[Any]) -> None:
        self.token = token
        self.values = Values(program, args)
        self.eqns = program.jaxpr.eqns
        self.maker = maker_positions(program.jaxpr)
        self.messages, self.ran = messages_of(program.jaxpr, self.maker)
        self.waits = waits_of(self.eqns, self.maker, self.messages)
        self.numbers = dict[int, tuple[Any, int]]()  # position of a started message → number, turn
        self.stage = 0  # how many messages have started
        self.stage_of = dict[Var, int]()  # arguments are missing
        self.stored = set(variables(program.jaxpr.outvars))  # XLA stores these in any case
        self.behind = dict[Var, Any]()  # inputs of this stage's equations, behind the last start
        self.entry: Var | None = None
        self.computed: jax.Array | None = None  # an array computed since the last done

    def all(self) -> None:
        """Starts each message as soon as its array is ready, and receives them in order.

        Everything that needs no message runs before the first done, which holds a thread of XLA.
        What needs a result, such as the update of its leaves, runs before the next done.
        """
        flying = deque[int]()
        waiting = dict(enumerate(self.messages))
        untied = 0  # a bit for each message
        received = 0
        while True:
            for k in [k for k, m in waiting.items() if not self._missing(m.sources) & ~received]:
                message = waiting.pop(k)
                # What follows a done of this program has waited for all of its starts.
                sources = needed(self.eqns, self.maker, message.sources, self.ran)
                self._compute(sorted(sources), tied=not received & untied)
                if message.pieces:
                    self._start(message)
                # A loop among the sources starts messages, too.
                if message.pieces or any(has_messages(self.eqns[at]) for at in sources):
                    self.stage += 1
                    untied |= 1 << k
                if message.results:
                    flying.append(k)
            computable = (at for at, wait in enumerate(self.waits) if not wait & ~received)
            self._compute([at for at in computable if at not in self.ran], tied=False)
            if not flying:
                return
            self._receive(self.messages[flying[0]])
            received |= 1 << flying.popleft()

    def _missing(self, atoms: Iterable[Var | Literal]) -> int:
        """The messages that values need: a bit for each."""
        missing = 0
        for var in variables(atoms):
            if var in self.maker:
                missing |= self.waits[self.maker[var]]
        return missing

    def _compute(self, positions: Sequence[int], tied: bool) -> None:
        """Runs equations; if `tied`, behind the last start."""
        self.behind = {}
        tied = tied and self.stage > 0
        self.entry = self._entry(positions) if tied else None
        for at in positions:
            eqn = self.eqns[at]
            read = self.values.read
            stages = (self.stage_of.get(var, -1) for var in variables(eqn.invars))
            # An operation that reads a value of this stage is behind already; a rematerialised
            # function or a loop may compute a part from the others.
            if tied and (inner_programs(eqn) or max(stages, default=-1) < self.stage):
                read = lambda atom, eqn=eqn: self._tied(atom, eqn)  # noqa: E731
            inputs = list(map(read, eqn.invars))
            if has_messages(eqn):
                self.token, outputs = run_inner(eqn, inputs, overlapped, self.token)
            else:
                outputs = run_again(eqn, inputs)
            self.values.update(zip(eqn.outvars, outputs))
            self.stage_of.update(dict.fromkeys(eqn.outvars, self.stage))
            if eqn.primitive.name in KERNELS:
                self.stored.update(variables(eqn.invars))
            self.ran.add(at)
            for x in outputs:
                if getattr(x, "size", 0) and jnp.issubdtype(x.dtype, jnp.floating):
                    self.computed = x

    def _entry(self, positions: Sequence[int]) -> Var | None:
        """The latest array of earlier stages that a kernel of this stage reads."""
        kernels = (self.eqns[at] for at in positions if self.eqns[at].primitive.name in KERNELS)
        read = (var for eqn in kernels for var in variables(eqn.invars))
        early = [var for var in read if self.stage_of.get(var, self.stage) < self.stage]
        return max(early, key=self.maker.__getitem__, default=None)

    def _tied(self, atom: Var | Literal, eqn: JaxprEqn) -> Any:
        """Reads an input of an equation behind the last start.

        A value of an earlier stage is multiplied by the token, which is 1 but unknown to XLA. A
        cheap value is computed again, if the earlier stage would store it for this reader alone.
        """
        value = self.values.read(atom)
        if isinstance(atom, Literal) or not jnp.issubdtype(value.dtype, jnp.floating):
            return value
        stage = self.stage_of.get(atom, -1)
        if stage >= self.stage:
            return value
        if atom in self.behind:
            return self.behind[atom]
        again = self.eqns[self.maker[atom]] if atom in self.maker else None
        if again and atom not in self.stored and cheap(again):
            inputs = [self._tied(x, again) for x in again.invars]
            self.behind.update(zip(again.outvars, run_again(again, inputs)))
            return self.behind[atom]
        name = eqn.primitive.name
        if (name in KERNELS and atom is not self.entry) or (stage < 0 and name in MOVES):
            return value
        self.behind[atom] = value * self.token.astype(value.dtype)
        return self.behind[atom]

    def _start(self, message: Message) -> None:
        eqn = self.eqns[message.position]
        params = parameters(eqn)
        pieces = list(map(jnp.asarray, self.values.read_all(message.pieces)))
        turn = self.stage if message.results else 0  # a later program receives from one lane
        late = params.get("late", False)
        self.token, number = params["carrier"].start(
            self.token, pieces, params["kind"], params["form"], name_of(eqn), turn, late
        )
        self.numbers[message.position] = number, turn
        if isinstance(message.number, Var):
            self.values.update([(message.number, number)])

    def _receive(self, message: Message) -> None:
        carrier = parameters(self.eqns[message.position])["carrier"]
        tokens = [self.token]
        if self.computed is not None:
            tokens.append(self.computed.ravel()[0].astype(jnp.float32))
        forms = list(map(form_of, message.results))
        number, turn = self.numbers.get(message.position, (None, 0))
        if message.number is not None:
            number = self.values.read(message.number)
        self.token, results = carrier.done(tokens, number, forms, turn)
        self.values.update(zip(message.results, results))
        self.stage_of.update(dict.fromkeys(message.results, self.stage))
