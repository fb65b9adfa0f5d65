"""The lane of a group's programs: their messages travel in one order while they compute."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
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
from fddp.comm.lane_thread import Send, Stamps, end_lane, stamps, start_lane
from fddp.comm.loss_collectives import Subsets, has_collectives, run_translated
from fddp.comm.placement import REPLICATED, Placement, trace
from fddp.comm.rank_connections import connect_ranks
from fddp.comm.socket_send import SocketSend
from fddp.comm.transport import Hosts, MakeLanes
from fddp.jax_internals import gloo_host, named_like, without_jit
from fddp.program import NUMBER, TOKEN, Carrier, Kind, exchange, overlapped


def mesh_lanes(
    placement: Placement, rank: int, hosts: Hosts, levels: Sequence[Sequence[int]] = ()
) -> MakeLanes:
    """Makes lanes over TCP for processes on a mesh; `levels` are as in `SocketSend`."""

    def connect() -> SocketSend:
        return SocketSend(rank, connect_ranks(rank, hosts, gloo_host()), levels, hosts.ranks)

    axis = str(placement.axis_name)
    return lanes(placement, rank, lambda: jax.lax.axis_index(axis), connect)


def lanes(
    placement: Placement,
    rank: int,
    replica_index: Callable[[], jax.Array],
    connect: Callable[[], Send],
) -> MakeLanes:
    """Makes the programs of as many lanes as a caller needs; `connect` connects a lane.

    `placement` compiles programs without messages.
    """
    size = placement.axis_size
    axis = str(placement.axis_name)

    @cache
    def make(lane_count: int, journal: Journal) -> tuple[Placement, Communicator]:
        token = placement.place(np.float32(1), REPLICATED)
        lane = ProgramLane(size, token, [connect() for _ in range(lane_count)], journal)
        numbers = count()

        def carried(kind: Kind) -> Callable[[jax.Array], jax.Array]:
            return lambda x: exchange(lane.carrier, kind, x, size)

        communicator = replace(
            rank_communicator(size, replica_index, *map(carried, ("sum", "exchange", "gather"))),
            in_lane=True,
        )
        subsets = Subsets(rank, communicator)

        def program(f: Callable, in_specs: Any, out_specs: Any, donate: Sequence[int] = ()) -> Any:
            number = next(numbers)

            @named_like(f)
            def run(token: jax.Array, *args: Any) -> Any:
                closed, shapes = trace(placement, f, *args)
                leaves = jax.tree.leaves(args)
                if has_collectives(closed.jaxpr, axis):
                    translated = partial(run_translated, closed, axis, subsets)
                    closed, _ = trace(placement, translated, *leaves)
                elif without_jit():
                    return token, f(*args)  # with concrete values, not tracers
                token, outputs = overlapped(closed, lane.begun(token, number), leaves)
                return token, jax.tree.unflatten(jax.tree.structure(shapes), outputs)

            specs = (REPLICATED, *in_specs), (REPLICATED, out_specs)
            jitted = placement.program(run, *specs, donate=[1 + k for k in donate])
            return InOrder(lane, jitted, number)

        return placement._replace(program=program), communicator

    return make


class ProgramLane:
    """The messages of a group's programs, one after the other, in one order on all ranks."""

    def __init__(
        self, size: int, token: jax.Array, sends: Sequence[Send], journal: Journal
    ) -> None:
        self.last = [token]
        """The last program's token: the next program waits for it."""
        self.numbers = [start_lane(size, send, journal, self.last) for send in sends]
        """Those of its lanes."""
        self.carrier = _carrier(self.numbers)
        for lane in self.numbers:
            weakref.finalize(self, end_lane, lane).atexit = False

    def begun(self, token: jax.Array, program: int) -> jax.Array:
        """Begins a program, by its number, inside of it."""
        for lane in map(np.int64, self.numbers):
            (token,) = program_p.bind(token, forms=(), lane=lane, program=np.int64(program))
        return token


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

    def times(self) -> tuple[list[Stamps], float]:
        """Waits for the last call; returns its messages, and the time of its begin."""
        jax.block_until_ready(self._lane.last)
        ended = [x for lane in self._lane.numbers for x in stamps(lane)]
        last = max((x.call for x in ended if x.program == self._number), default=0)
        # The program before this one may have run when this one was called.
        begin = max([self._called, *(x.done for x in ended if x.call < last)])
        return [x for x in ended if x.call == last], begin

    def __wrapped__(self, *args: Any) -> Any:
        """Runs inside another program, whose data order it."""
        return self._program.__wrapped__(jnp.ones((), TOKEN.dtype), *args)[1]


def _carrier(lanes: Sequence[int]) -> Carrier:
    def start(
        token: jax.Array,
        arrays: Sequence[jax.Array],
        kind: Kind,
        form: Any,
        name: str,
        turn: int,
        late: bool,
    ) -> tuple[jax.Array, jax.Array]:
        return start_p.bind(
            token,
            *arrays,
            forms=(NUMBER,),
            lane=np.int64(lanes[turn % len(lanes)]),
            bytes=np.int64(form.size * form.dtype.itemsize),
            kind=kind,
            dtype=form.dtype.name,
            late=late,
            name=name,
        )

    def done(
        tokens: Sequence[jax.Array], number: jax.Array, forms: Sequence[Any], turn: int
    ) -> tuple[jax.Array, Sequence[jax.Array]]:
        shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in forms)
        lane = np.int64(lanes[turn % len(lanes)])
        token, *results = done_p.bind(number, *tokens, forms=shapes, lane=lane)
        return token, results

    return Carrier(start, done)


def _refuse_batches(*args: Any, **attributes: Any) -> Any:
    raise TypeError(
        "a step between processes cannot be called under jax.vmap: call it for each state, or "
        "under jax.lax.scan."
    )


def _custom_call(name: str, target: str, has_side_effect: bool = False) -> Primitive:
    """Makes the primitive of a custom call, which returns a token and arrays of `forms`."""
    primitive = Primitive(name)
    primitive.multiple_results = True

    @primitive.def_abstract_eval
    def outputs(first: Any, *args: Any, forms: Sequence[Any], **attributes: Any) -> list[Any]:
        return [first.update(shape=x.shape, dtype=x.dtype) for x in (TOKEN, *forms)]

    def lowering(ctx: Any, *args: Any, forms: Sequence[Any], **attributes: Any) -> Any:
        rule = jax.ffi.ffi_lowering(target, has_side_effect=has_side_effect)
        return rule(ctx, *args, **attributes)

    mlir.register_lowering(primitive, lowering, platform="cpu")
    batching.primitive_batchers[primitive] = _refuse_batches
    return primitive


# A profile shows the calls by these names: a wait is communication that nothing overlaps.
start_p = _custom_call("fddp_start", "fddp_start")
done_p = _custom_call("fddp_all_reduce_wait", "fddp_done")
# In a loop of steps nothing that begins one comes from the step before: XLA would begin it once.
program_p = _custom_call("fddp_program", "fddp_program", has_side_effect=True)
