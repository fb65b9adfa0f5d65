"""The lane of a group's programs: their messages travel in one order while they compute."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from time import monotonic
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from fddp.comm.communicator import Communicator, rank_communicator
from fddp.comm.journal import Journal
from fddp.comm.lane_thread import DTYPES, KINDS, TIMES, Send, end_lane, stamps, start_lane
from fddp.comm.loss_collectives import Words, has_collectives, run_translated
from fddp.comm.placement import REPLICATED, Placement, trace
from fddp.jax_internals import named_like, without_jit
from fddp.program import (
    NUMBER,
    TOKEN,
    Carrier,
    Kind,
    MessageTimes,
    Timeline,
    exchange,
    overlapped,
    timeline_of,
)


class ProgramLane:
    """The messages of a group's programs, one after the other, in one order on all ranks."""

    def __init__(
        self, size: int, token: jax.Array, sends: Sequence[Send], journal: Journal
    ) -> None:
        self._size = size
        self.last = [token]
        """The last program's token: the next program waits for it."""
        lanes = self._lanes = [start_lane(size, send, journal, self.last) for send in sends]
        self._programs = count()
        self.carrier = Carrier(partial(_start, lanes), partial(_done, lanes))
        for lane in lanes:
            weakref.finalize(self, end_lane, lane).atexit = False

    def communicator(self, replica_index: Callable[[], jax.Array]) -> Communicator:
        """Makes the collectives of a replica inside a program of the lane."""

        def of(kind: Kind) -> Callable[[jax.Array], jax.Array]:
            return lambda x: exchange(self.carrier, kind, x, self._size)

        communicator = rank_communicator(
            self._size, replica_index, of("sum"), of("exchange"), of("gather")
        )
        return replace(communicator, in_lane=True)

    def placement(self, placement: Placement, words: Words) -> Placement:
        """Makes the collectives of programs, and by `words` those of losses, messages of the lane.

        `placement` compiles programs without messages.
        """
        axis = str(placement.axis_name)

        def program(f: Callable, in_specs: Any, out_specs: Any, donate: Sequence[int] = ()) -> Any:
            number = next(self._programs)

            @named_like(f)
            def run(token: jax.Array, *args: Any) -> Any:
                closed, shapes = trace(placement, f, *args)
                leaves = jax.tree.leaves(args)
                if has_collectives(closed.jaxpr, axis):
                    translated = partial(_translated, closed, axis, words)
                    closed, _ = trace(placement, translated, *leaves)
                elif without_jit():
                    return token, f(*args)  # with concrete values, not tracers
                for lane in self._lanes:
                    token = program_p.bind(token, lane=np.int64(lane), program=np.int64(number))
                token, outputs = overlapped(closed, token, leaves)
                return token, jax.tree.unflatten(jax.tree.structure(shapes), outputs)

            specs = (REPLICATED, *in_specs), (REPLICATED, out_specs)
            jitted = placement.program(run, *specs, donate=[1 + k for k in donate])
            return InOrder(self, jitted, number)

        return placement._replace(program=program)

    def timeline(self, program: int, called: float) -> Timeline:
        """The timeline of the last call of a program, which waits for the call's messages.

        `called` is the time of the call, at which the program before it may still have run.
        """
        jax.block_until_ready(self.last)
        ended = [x for lane in self._lanes for x in stamps(lane)]
        last = max((x.call for x in ended if x.program == program), default=0)
        begin = max([called, *(x.done for x in ended if x.call < last)])
        messages = [
            MessageTimes(x.name.decode(), x.nbytes, *(getattr(x, time) for time in TIMES))
            for x in ended
            if x.call == last
        ]
        return timeline_of(messages, begin)


class InOrder:
    """A program whose messages follow those of the earlier programs of its lane.

    The jitted `program(token, *arguments)` returns the next token and the results.
    """

    def __init__(self, lane: ProgramLane, program: Any, number: int) -> None:
        self._lane = lane
        self._program = program
        self._number = number
        self._called = 0.0

    def __call__(self, *args: Any) -> Any:
        self._called = monotonic()
        self._lane.last[0], results = self._program(*self._lane.last, *args)
        return results

    def lower(self, *args: Any) -> jax.stages.Lowered:
        return self._program.lower(*self._lane.last, *args)

    def timeline(self) -> Timeline:
        """When the last call computed, and when its messages travelled."""
        return self._lane.timeline(self._number, self._called)

    def __wrapped__(self, *args: Any) -> Any:
        """Runs inside another program, whose data order it."""
        return self._program.__wrapped__(jnp.ones((), TOKEN.dtype), *args)[1]


def _translated(closed: Any, axis: str, words: Words, *leaves: Any) -> list[Any]:
    return run_translated(closed, leaves, axis, words)


def _start(
    lanes: Sequence[int],
    token: jax.Array,
    arrays: Sequence[jax.Array],
    kind: Kind,
    form: Any,
    name: str,
    turn: int,
    late: bool,
) -> tuple[jax.Array, jax.Array]:
    dtype = form.dtype
    if dtype not in DTYPES:
        dtype = np.dtype(f"uint{8 * dtype.itemsize}")
    token, number = start_p.bind(
        token,
        *arrays,
        lane=np.int64(lanes[turn % len(lanes)]),
        bytes=np.int64(form.size * form.dtype.itemsize),
        kind=np.int64(KINDS.index(kind)),
        dtype=np.int64(DTYPES.index(dtype)),
        late=late,
        name=name,
    )
    return token, number


def _done(
    lanes: Sequence[int],
    tokens: Sequence[jax.Array],
    number: jax.Array,
    forms: Sequence[Any],
    turn: int,
) -> tuple[jax.Array, Sequence[jax.Array]]:
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in forms)
    lane = np.int64(lanes[turn % len(lanes)])
    results = done_p.bind(number, *tokens, shapes=shapes, lane=lane)
    return results[0], results[1:]


# A profile shows the calls by these names: a wait is communication that nothing overlaps.
program_p = Primitive("fddp_program")
start_p = Primitive("fddp_start")
done_p = Primitive("fddp_all_reduce_wait")
start_p.multiple_results = done_p.multiple_results = True
program_p.def_abstract_eval(lambda token, **attributes: token)


@start_p.def_abstract_eval
def _token_and_number(token: Any, *arrays: Any, **attributes: Any) -> list[Any]:
    return [token, token.update(dtype=NUMBER.dtype)]


@done_p.def_abstract_eval
def _forms(
    number: Any, token: Any, *tokens: Any, shapes: Sequence[Any], **attributes: Any
) -> list[Any]:
    return [token, *(token.update(shape=x.shape, dtype=x.dtype) for x in shapes)]


def _done_lowering(ctx: Any, *args: Any, shapes: Sequence[Any], **attributes: Any) -> Any:
    return jax.ffi.ffi_lowering("fddp_done")(ctx, *args, **attributes)


# In a loop of steps nothing that begins one comes from the step before: XLA would begin it once.
_program_lowering = jax.ffi.ffi_lowering("fddp_program", has_side_effect=True)
mlir.register_lowering(program_p, _program_lowering, platform="cpu")
mlir.register_lowering(start_p, jax.ffi.ffi_lowering("fddp_start"), platform="cpu")
mlir.register_lowering(done_p, _done_lowering, platform="cpu")


def _refuse_batches(*args: Any, **attributes: Any) -> Any:
    raise TypeError(
        "a step between processes cannot be called under jax.vmap: call it for each state, or "
        "under jax.lax.scan."
    )


for primitive in (program_p, start_p, done_p):
    batching.primitive_batchers[primitive] = _refuse_batches
