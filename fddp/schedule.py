"""Three pieces of a step, and how they are launched.

`local` makes a replica's gradients and packs them, a reduction makes each wire's sum over replicas, `finish` uses them.
A schedule says only which of these share an XLA program and what waits for what; the mathematics is the pieces' own.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import repeat
from time import perf_counter
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from fddp.communicator import MOST, psum_bytes
from fddp.flat import Wires
from fddp.member import EVERYWHERE, Member, lifted, lowered, trace
from fddp.reduction import PLAIN, Reduction, all_summed, summed
from fddp.stages import Stage, cut
from fddp.timeline import Span, Timeline


class Pieces(NamedTuple):
    """A step, per replica."""

    local: Callable[[Any, Any, Any], tuple[Wires, Any]]
    """(state, pending, rows) → what this replica sends, and what it keeps for itself."""
    reductions: tuple[Reduction, ...]
    """How each wire is summed; further ones plainly."""
    finish: Callable[[Any, Wires, Any, Any], Any]
    """(state, what came back, what was kept, bytes sent per wire) → the step's result, equal on all replicas."""


# What the reductions remember from step to step, one tree for each that is named.
Memory = tuple[Any, ...]


class Runner(NamedTuple):
    """A step that can be run."""

    run: Callable[[Any, Any, Memory, Any], tuple[Any, Memory]]
    """(state, pending, memory, rows) → the step's result, and what to remember; state is equal everywhere, pending and
    memory each replica's own, rows this process's, wherever they are."""
    lower: Callable[[Any, Any, Memory, Any], jax.stages.Lowered] | None
    """The step as XLA gets it, where it is one program."""
    timeline: Callable[[], Timeline] | None
    """When the last step computed and communicated, where it is several programs."""


# (member, pieces, donate) -> runner; donate: whether the step may reuse the state's memory
Schedule = Callable[[Member, Pieces, bool], Runner]


def fused(member: Member, pieces: Pieces, donate: bool) -> Runner:
    """One XLA program with an all-reduce per bucket in it; XLA's scheduler overlaps where it can (GPU, TPU).

    Args:
      member: the replicas' programs and sums.
      pieces: the step.
      donate: whether the program may reuse the state's memory.

    Returns:
      The runner.
    """

    def step(state: Any, pending: Any, memory: Memory, rows: Any) -> tuple[Any, Memory]:
        wires, kept = pieces.local(state, pending, rows)
        mine = (*lowered(memory), *repeat((), len(wires.arrays) - len(memory)))
        totals, new, sent = all_summed(member.communicator, pieces.reductions, wires.arrays, mine)
        result = pieces.finish(state, replace(wires, arrays=totals), kept, sent)
        return result, lifted(new[: len(memory)])

    own = member.own
    program = member.program(step, (EVERYWHERE, own, own, own), (EVERYWHERE, own), donate=(0, 2) if donate else ())

    def run(state: Any, pending: Any, memory: Memory, rows: Any) -> tuple[Any, Memory]:
        result = program(state, pending, memory, member.feed(rows))
        return jax.block_until_ready(result) if member.crowded else result

    def lower(state: Any, pending: Any, memory: Memory, rows: Any) -> jax.stages.Lowered:
        return program.lower(state, pending, memory, member.feed(rows))

    return Runner(run, lower, None)


def after(member: Member, pieces: Pieces, donate: bool) -> Runner:
    """The baseline: traffic starts when the backward is done, one all-reduce at a time (paper, section 3.2.1).

    Args:
      member: the replicas' programs and sums.
      pieces: the step.
      donate: whether the last program may reuse the state's memory.

    Returns:
      The runner.
    """
    own = member.own
    local = member.program(pieces.local, (EVERYWHERE, own, own), own)
    send, finish = _sending(member, pieces, donate), _finish(member, pieces, donate)
    spans: list[Span] = []

    def run(state: Any, pending: Any, memory: Memory, rows: Any) -> tuple[Any, Memory]:
        spans.clear()
        clock = perf_counter()
        wires, kept = jax.block_until_ready(local(state, pending, member.feed(rows)))
        spans.append(Span("compute", "backward", clock, perf_counter()))
        sends: list[Sent] = []
        for wire in wires.arrays:
            sends.append(send(len(sends), memory, lambda: sends[0], wire))
        return finish(state, wires, kept, memory, sends, spans)

    return Runner(run, None, lambda: Timeline(tuple(spans)))


def staged(member: Member, pieces: Pieces, donate: bool) -> Runner:
    """The backward cut where buckets become ready: the main thread runs stages, another sends what they made.

    For hosts whose XLA overlaps nothing by itself (CPU). All-reduces leave in plan order on every rank, one at a time
    on each lane of the member.

    Args:
      member: the replicas' programs and sums.
      pieces: the step.
      donate: whether the last program may reuse the state's memory.

    Returns:
      The runner; stages are cut and compiled once for each form of its arguments.
    """
    own, lanes = member.own, _lanes(member, pieces)
    send, finish = _sending(member, pieces, donate), _finish(member, pieces, donate)
    programs: dict[Any, _Staged] = {}
    spans: list[Span] = []

    def run(state: Any, pending: Any, memory: Memory, rows: Any) -> tuple[Any, Memory]:
        rows = member.place(rows, own)
        leaves, treedef = jax.tree.flatten((state, pending, rows))
        form = (treedef, tuple((x.shape, x.dtype) for x in leaves))
        if form not in programs:
            programs[form] = _compile(member, pieces, state, pending, rows)
        wires, kept, sends = _launch(programs[form], leaves, partial(send, memory=memory), len(lanes), spans)
        return finish(state, wires, kept, memory, sends, spans)

    return Runner(run, None, lambda: Timeline(tuple(spans)))


class Sent(NamedTuple):
    """A wire that has come back."""

    total: jax.Array
    memory: Any
    nbytes: Any
    """Bytes that each replica sent."""
    span: Span


class _Staged(NamedTuple):
    stages: tuple[Stage, ...]
    programs: tuple[Callable[..., list[jax.Array]], ...]
    wires: Any
    """Structure of (wires, kept)."""


def _compile(member: Member, pieces: Pieces, state: Any, pending: Any, rows: Any) -> _Staged:
    everywhere, own = jax.tree.leaves(state), jax.tree.leaves((pending, rows))
    replica = (
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state),
        *(
            jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0] // member.share, *x.shape[1:]), x.dtype), tree)
            for tree in (pending, rows)
        ),
    )
    closed, (wires, kept) = trace(member, pieces.local, *replica)
    groups = [1] * len(wires.arrays)
    groups[-1] += len(jax.tree.leaves(kept))
    stages = cut(closed, groups)
    specs = [EVERYWHERE] * len(everywhere) + [member.own] * len(own)
    programs = tuple(_program(member, stage, specs) for stage in stages)
    return _Staged(stages, programs, jax.tree.structure((wires, kept)))


def _program(member: Member, stage: Stage, specs: list[PartitionSpec]) -> Callable[..., list[jax.Array]]:
    """Compiles a stage; what stages hand to each other is each replica's own and crosses with a first dim."""
    given = len(specs)

    def body(*values: jax.Array) -> list[jax.Array]:
        read = [value if number < given else value[0] for number, value in zip(stage.reads, values)]
        made = stage.run(*read)
        handed = len(stage.writes)
        return [value[None] for value in made[:handed]] + made[handed:]

    in_specs = tuple(specs[number] if number < given else member.own for number in stage.reads)
    return member.program(body, in_specs, member.own)


def _launch(
    staged: _Staged, leaves: list[jax.Array], send: Callable[..., Sent], lanes: int, spans: list[Span]
) -> tuple[Wires, Any, list[Sent]]:
    values = dict(enumerate(leaves))
    sends: list[Future[Sent]] = []
    kept: list[jax.Array] = []
    spans.clear()
    clock = perf_counter()
    made: jax.Array | None = None

    # Threads live as long as the step: nothing is left behind, whatever happens.
    with ExitStack() as stack:
        threads = [
            stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix=f"fddp-all-reduce-{number}"))
            for number in range(lanes)
        ]

        def leave(wire: jax.Array) -> None:
            nonlocal clock
            jax.block_until_ready(wire)
            spans.append(Span("compute", f"stage {len(sends)}", clock, clock := perf_counter()))
            k = len(sends)
            sends.append(threads[k % len(threads)].submit(send, k, first=lambda: sends[0].result(), wire=wire))

        for stage, program in zip(staged.stages, staged.programs):
            results = program(*(values[number] for number in stage.reads))
            for number in stage.frees:
                del values[number]
            values.update(zip(stage.writes, results))
            # One stage is queued behind the one that runs, so that the core never waits for Python.
            if made is not None:
                leave(made)
            made, *kept = results[len(stage.writes) :]
            del results
        if made is not None:
            leave(made)
        done = [send.result() for send in sends]
    return *jax.tree.unflatten(staged.wires, [*(sent.total for sent in done), *kept]), done


def _sending(member: Member, pieces: Pieces, donate: bool) -> Callable[..., Sent]:
    """Makes `send(k, memory, first, wire)`: the sum of wire k between programs; blocks the calling thread."""
    own, lanes = member.own, _lanes(member, pieces)

    def program(reduction: Reduction) -> Callable[..., Any]:
        def run(wire: jax.Array, mine: Any) -> tuple[Any, Any, Any]:
            total, mine, sent = summed(member.communicator, reduction, None, wire, lowered(mine))
            return total, lifted(mine), sent

        return member.program(run, (own, own), (EVERYWHERE, own, EVERYWHERE), donate=(1,) if donate else ())

    programs = [program(reduction) for reduction in pieces.reductions]

    def send(k: int, memory: Memory, first: Callable[[], Sent], wire: jax.Array) -> Sent:
        start = perf_counter()
        reduction = pieces.reductions[k] if k < len(pieces.reductions) else PLAIN
        mine = memory[k] if k < len(memory) else ()
        size = wire.size // member.share
        if reduction.leaves is not None and not np.asarray(first().total)[list(reduction.leaves)].any():
            total, sent, size = member.place(np.zeros(size, wire.dtype), EVERYWHERE), 0, 0
        elif reduction.apply is None:
            total, sent = lanes[k % len(lanes)].reduce(wire), psum_bytes(member.communicator, size, wire.dtype)
        else:
            total, mine, sent = jax.block_until_ready(programs[k](wire, mine))
        nbytes = size * wire.dtype.itemsize
        return Sent(total, mine, sent, Span("communication", reduction.name, start, perf_counter(), nbytes))

    return send


def _lanes(member: Member, pieces: Pieces) -> tuple[Member, ...]:
    """What carries the wires between programs, in turn; hooks share one communicator, where two at once would mix."""
    hooked = any(reduction.apply for reduction in pieces.reductions)
    return (member,) if hooked or not member.lanes else member.lanes


def _finish(member: Member, pieces: Pieces, donate: bool) -> Callable[..., tuple[Any, Memory]]:
    in_specs = (EVERYWHERE, EVERYWHERE, member.own, EVERYWHERE)
    program = member.program(pieces.finish, in_specs, EVERYWHERE, donate=(0,) if donate else ())

    def finish(
        state: Any, wires: Wires, kept: Any, memory: Memory, sends: list[Sent], spans: list[Span]
    ) -> tuple[Any, Memory]:
        spans.extend(send.span for send in sends)
        wires = replace(wires, arrays=tuple(send.total for send in sends))
        sent = np.array([min(int(send.nbytes), MOST) for send in sends], np.uint32)
        return program(state, wires, kept, sent), tuple(send.memory for send in sends[: len(memory)])

    return finish
