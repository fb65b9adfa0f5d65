"""Lists of a step's tasks: in one piece, or cut where messages leave and where sums arrive.

Making a list is a function of shapes: nothing is compiled, sent or run.

Source: `DDPOptimizer` in TorchDynamo, which cuts a compiled graph at bucket boundaries;
`_apply_optimizer_in_backward` in PyTorch, which updates a bucket while later buckets travel.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from fddp.buckets import Messages
from fddp.comm import Placement, as_program
from fddp.jaxpr import arrivals, collectives, take_more
from fddp.schedules.communications import communications, inputs_of, sums_of
from fddp.schedules.exchange_tasks import exchanged, in_turn
from fddp.schedules.pieces import ARGUMENTS, Pieces, Round
from fddp.schedules.stage_tasks import stages_of
from fddp.schedules.tasks import Compute, Task, TaskList
from fddp.schedules.uncut import (
    Late,
    Program,
    all_ready,
    arrival_times,
    traced_programs,
    with_split_loops,
)
from fddp.schedules.values import BEGIN, BYTES, MESSAGE, NEW, RESULT, SHARDS, STATE, Value, names_of


def in_one_piece(
    placement: Placement, pieces: Pieces, state: Any, pending: PyTree, shards: PyTree, rows: PyTree
) -> TaskList:
    """Makes the baseline's list: one round after the other, each followed by its messages.

    The values of this list are trees, so that one list fits arguments of any shape.
    """
    del state, pending, shards, rows

    def run_round(piece: Round, *values: Any) -> Sequence[Any]:
        arguments = values[: len(piece.reads)]
        returned = values[len(piece.reads) :]
        received: tuple[Any, Any] = (None, None)
        if returned:
            received = _received(*returned)
        return _leaving(*piece.run(*arguments, *received))

    def finish(state: Any, shards: PyTree, nbytes: Any, *returned: Any) -> Sequence[Any]:
        return pieces.finish(state, shards, *_received(*returned), nbytes)

    tasks = list[Task]()
    returned = ()
    for piece, sends in zip(pieces.rounds, communications([r.reductions for r in pieces.rounds])):
        saved = Value(f"kept by {piece.name}")
        reads = *map(Value, piece.reads), *returned
        writes = *inputs_of(sends), saved
        run = as_program(placement, partial(run_round, piece))
        tasks += [Compute(piece.name, reads, writes, run, piece.kind), *sends]
        returned = saved, *sums_of(sends)
    result = Value(RESULT)
    new_shards = Value(NEW)
    reads = Value(STATE), Value(SHARDS), BYTES, *returned
    run = as_program(placement, finish)
    tasks.append(Compute(pieces.name, reads, (result, new_shards), run, "update"))
    return TaskList(
        tuple(tasks),
        lambda *arguments: dict(zip(map(Value, ARGUMENTS), arguments)) | _no_messages(pieces),
        lambda values: (values[result], values[new_shards]),
    )


def half_together(k: int, count: int) -> int:
    """Groups updates by half of the remaining sums each; returns the last sum of k's group.

    Little work is left when the last sum arrives, and about log₂(count) programs are compiled.
    """
    return count - (1 << (count - k).bit_length() - 1)


def in_stages(
    placement: Placement,
    pieces: Pieces,
    state: Any,
    pending: PyTree,
    shards: PyTree,
    rows: PyTree,
    *,
    used: Callable[[int, int], int] = half_together,
    late: Late = all_ready,
) -> TaskList:
    """Cuts each round where its messages are ready, and the update where sums arrive.

    `used` maps (k, count) to the number of the message whose arrival starts the update of message
    k. `late` names the inputs of the first round that arrive after a step has started: the round
    is cut there, too. The values of the list are arrays, named by their paths in (state, pending,
    shards, rows) and in the result.
    """
    arguments = forms_of((state, pending, shards, rows))
    programs, sends, treedef = traced_programs(placement, pieces, arguments)
    results = programs[-1].writes
    *rounds, update = (with_split_loops(placement, program) for program in programs)
    arriving = late(rounds[0], update)

    tasks = list[Task]()
    collectives_before = 0
    for program, leaving in zip(rounds, sends):
        if program.sums and program.kind == "update":
            stages = _by_arrival(used, program)
            exchanges = []
        else:
            stages, exchanges = _by_message(placement, program, arriving, collectives_before)
        collectives_before += len(exchanges)
        for stage in stages:
            ready = (send for send in (*exchanges, *leaving) if send.reads[0] in stage.writes)
            tasks += [stage, *ready]
        arriving = {}
    tasks += _by_arrival(used, update)

    names = [name for word, tree in zip(ARGUMENTS, arguments) for name in names_of(word, tree)]
    begins = {begin for program in (*rounds, update) for begin in program.begins}
    constants = _no_messages(pieces) | {Value(BEGIN, begin): np.int32(begin) for begin in begins}
    return TaskList(
        tuple(tasks),
        lambda *arguments: dict(zip(names, jax.tree.leaves(arguments))) | constants,
        lambda values: treedef.unflatten([values[name] for name in results]),
    )


def _by_message(
    placement: Placement, program: Program, late: Mapping[Value, int], collectives_before: int
) -> tuple[list[Compute], list[Compute]]:
    """Cuts a round where a message is ready, and where it waits for an input or another replica.

    Returns its stages, and the collectives of the loss between them, numbered from
    `collectives_before` on.
    """
    times = arrival_times(program, late)
    split = exchanged(placement, program.closed, times, collectives_before)
    writes = [*program.writes, *split.passed]
    title = program.name.replace("backward", "stage")
    messages = sum(value.kind == MESSAGE for value in writes)
    groups = in_turn(split, messages)
    saved = list(range(messages, len(program.writes)))
    if not groups or split.tasks or take_more(program.closed, saved):
        groups.append([])  # so that no message waits for a value that it does not need
    groups[-1] += saved
    reads = [*program.reads, *split.received]
    stages = stages_of(title, program.kind, split.closed, reads, writes, groups, split.arrivals)
    return stages, split.tasks


def _by_arrival(used: Callable[[int, int], int], program: Program) -> list[Compute]:
    """Cuts an update into stages, in the order in which its sums arrive.

    The number of bytes is known when all sums have arrived. An update with collectives of its own,
    such as a norm, waits for all messages: it must not send between two of them.
    """
    count = max(1, len(program.sums))
    last = count - 1
    times = program.sums | {at: last for at, name in enumerate(program.reads) if name == BYTES}
    stage_of = arrivals(program.closed, times)
    if collectives(program.closed):
        stage_of = [last] * len(stage_of)
    elif not program.begins:  # equal slices of an output share a program, so each has a stage
        stage_of = [used(k, count) for k in stage_of]
    # Messages leave in order: a message that could leave before an earlier one waits for it.
    earliest = 0
    for number, value in enumerate(program.writes):
        if value.kind == MESSAGE:
            earliest = stage_of[number] = max(earliest, stage_of[number])
    groups: list[list[int]] = [[] for _ in range(count)]
    for number, stage in enumerate(stage_of):
        groups[stage].append(number)
    return stages_of(program.name, "update", program.closed, program.reads, program.writes, groups)


def _no_messages(pieces: Pieces) -> dict[Value, Any]:
    """The bytes of a step without messages, which no task writes."""
    if pieces.reductions:
        return {}
    return {BYTES: np.zeros(0, np.uint32)}


def _leaving(messages: Messages, saved: PyTree) -> Sequence[Any]:
    return *messages.arrays, (replace(messages, arrays=()), saved)


def _received(saved: PyTree, *sums: Any) -> tuple[Messages, Any]:
    messages, saved = saved
    return replace(messages, arrays=sums), saved


def forms_of(tree: PyTree) -> Any:
    """Shapes and dtypes of arrays; NumPy arrays get the dtypes that JAX would give them."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jax.typeof(x).dtype), tree)
