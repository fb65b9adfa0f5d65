"""The lists of tasks that a step can be: whole, or cut where messages leave and where their sums come back.

Making one is a function of forms: nothing is compiled, sent or run.

Source: `DDPOptimizer` in TorchDynamo, which cuts a compiled graph at bucket boundaries; `_apply_optimizer_in_backward`
in PyTorch, which updates a bucket while later ones travel.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from fddp.buckets import Messages
from fddp.comm import Placement, as_program, trace
from fddp.jax_internals import ClosedJaxpr, Literal
from fddp.jaxpr import arrivals, collectives, take_more
from fddp.schedules.border import Late, Program, arriving, in_parts, nothing_late
from fddp.schedules.exchange_tasks import exchanged, in_turn
from fddp.schedules.pieces import Pieces, Round
from fddp.schedules.stage_tasks import stages_of
from fddp.schedules.tasks import (
    BEGIN,
    BYTES,
    MESSAGE,
    NEW,
    RESULT,
    SHARDS,
    STATE,
    Communicate,
    Compute,
    Task,
    TaskList,
    Value,
    communications,
)
from fddp.wording import leaf_name

ARGUMENTS = (STATE, "pending", SHARDS, "rows")


def in_one_piece(placement: Placement, pieces: Pieces, state: Any, pending: Any, shards: Any, rows: Any) -> TaskList:
    """Makes the baseline's list: one round after the other, its messages behind it.

    Args:
      placement: where the replicas' programs run.
      pieces: the step.
      state: arguments of one replica, or their forms.
      pending: likewise.
      shards: likewise.
      rows: likewise.

    Returns:
      The list; its values are trees.
    """
    del state, pending, shards, rows  # one list fits all forms

    def speak(one: Round, *values: Any) -> Sequence[Any]:
        given = values[: len(one.reads)]
        came = values[len(one.reads) :]
        return _sent(*one.run(*given, *(_came(*came) if came else (None, None))))

    def finish(state: Any, shards: Any, nbytes: Any, *came: Any) -> Sequence[Any]:
        return pieces.finish(state, shards, *_came(*came), nbytes)

    tasks = list[Task]()
    came = ()
    for one, sends in zip(pieces.rounds, communications([one.reductions for one in pieces.rounds])):
        kept = Value(f"kept by {one.name}")
        reads = *map(Value, one.reads), *came
        tasks += [
            Compute(one.name, reads, (*_read(sends), kept), as_program(placement, partial(speak, one)), one.kind),
            *sends,
        ]
        came = kept, *_written(sends)
    results = Value(RESULT), Value(NEW)
    run = as_program(placement, finish)
    tasks.append(Compute(pieces.name, (Value(STATE), Value(SHARDS), BYTES, *came), results, run, "update"))
    return TaskList(
        tuple(tasks),
        lambda *arguments: dict(zip(map(Value, ARGUMENTS), arguments)) | _nothing_sent(pieces),
        lambda values: (values[results[0]], values[results[1]]),
    )


def half_together(k: int, count: int) -> int:
    """Groups updates: each group takes half of the sums that remain; returns the last sum of the group of sum k.

    Little is left to do when the last sum is back, and about log₂ of `count` programs have to be compiled.
    """
    return count - (1 << (count - k).bit_length() - 1)


def in_stages(
    placement: Placement,
    pieces: Pieces,
    state: Any,
    pending: Any,
    shards: Any,
    rows: Any,
    *,
    used: Callable[[int, int], int] = half_together,
    late: Late = nothing_late,
) -> TaskList:
    """Cuts each round where its messages are made, and where those of the round before come back.

    Args:
      placement: where the replicas' programs run.
      pieces: the step.
      state: arguments of one replica, or their forms.
      pending: likewise.
      shards: likewise.
      rows: likewise.
      used: (k, count) → the message, of so many, on whose return an update uses message k.
      late: names the arguments that come late, in their order: the first round is cut there as well.

    Returns:
      The list; its values are arrays, named by their paths in (state, pending, shards, rows) and in the result.
    """
    arguments = forms_of((state, pending, shards, rows))
    given: dict[str, Any] = dict(zip(ARGUMENTS, arguments))
    names = {word: names_of(word, tree) for word, tree in given.items()}
    sends = list[Communicate]()
    came = (None, None)
    held = list[Value]()
    programs = list[Program]()
    following = communications([one.reductions for one in pieces.rounds])

    def of(kinds: Sequence[str]) -> list[Value]:
        return [value for kind in kinds for value in names[kind]]

    for one, leave in zip(pieces.rounds, following):
        closed, (messages, kept) = trace(placement, one.run, *(given[word] for word in one.reads), *came)
        read = [*of(one.reads), *_written(sends), *held]
        before = len(of(one.reads))
        held = _passed_on(closed, read, len(jax.tree.leaves(messages)), names_of(f"kept by {one.name}", kept))
        back = {before + k: k for k in range(len(sends))}
        programs.append(Program(one.name, one.kind, closed, read, back, [*_read(leave), *held]))
        came = _back(leave, messages), kept
        sends = leave

    nbytes = jax.ShapeDtypeStruct((len(pieces.reductions),), np.uint32)
    closed, (result, new) = trace(placement, pieces.finish, given["state"], given[SHARDS], *came, nbytes)
    there = of((STATE, SHARDS))
    read = [*there, *_written(sends), *held, BYTES]
    results = [*names_of(RESULT, result), *names_of(NEW, new)]
    back = {len(there) + k: k for k in range(len(sends))}
    alias = _handed_on(closed, read, results)
    programs = [_named_anew(one, alias) for one in programs]
    read = [alias.get(name, name) for name in read]
    border = late(placement, programs[0], Program(pieces.name, "update", closed, read, back, results))
    programs = [border.first, *(in_parts(placement, program) for program in programs[1:])]

    tasks = list[Task]()
    comes = border.comes
    spoken = 0
    for program, leave in zip(programs, following):
        in_turn = program.back and program.kind == "update"
        made, exchanges = (_in_turn(used, program), ()) if in_turn else _as_made(placement, program, comes, spoken)
        spoken += len(exchanges)
        for task in made:
            tasks += [task, *(send for send in (*exchanges, *leave) if send.reads[0] in task.writes)]
        comes = {}
    tasks += _in_turn(used, border.last)

    treedef = jax.tree.structure((result, new))
    constant = _nothing_sent(pieces)
    constant |= {
        Value(BEGIN, begin): np.int32(begin) for program in [*programs, border.last] for begin in program.begins
    }
    return TaskList(
        tuple(tasks),
        lambda *arguments: border.enter(dict(zip(of(ARGUMENTS), jax.tree.leaves(arguments)))) | constant,
        lambda values: treedef.unflatten(list(map(border.leave(values).__getitem__, results))),
    )


def _as_made(
    placement: Placement, program: Program, late: Mapping[Value, int], spoken: int
) -> tuple[list[Compute], list[Compute]]:
    """Cuts a round where it makes a message, and where it waits for a message, a late argument or another replica.

    Gives its stages, and the collectives of the loss between them, numbered from `spoken` on.
    """
    apart = exchanged(placement, program.closed, arriving(program, late), spoken)
    made = [*program.made, *apart.given]
    title = program.name.replace("backward", "stage")
    messages = sum(value.kind == MESSAGE for value in made)
    groups = in_turn(apart, messages)
    kept = list(range(messages, len(program.made)))
    if not groups or apart.tasks or take_more(program.closed, kept):
        groups.append([])  # so that no message waits for what it does not need
    groups[-1] += kept
    read = [*program.read, *apart.came]
    return stages_of(title, program.kind, apart.closed, read, made, groups, apart.comes), apart.tasks


def _in_turn(used: Callable[[int, int], int], program: Program) -> list[Compute]:
    """Cuts an update into stages, as its messages come back one after the other.

    The work for a message is done when that message is back; the bytes that were sent are known when all are back. An
    update with collectives of its own, for a norm say, waits for all messages and is waited for: beside a message its
    collectives would mix with that.
    """
    count = max(1, len(program.back))
    back = program.back | {at: count - 1 for at, name in enumerate(program.read) if name == BYTES}
    alone = bool(collectives(program.closed))
    # What is written slice by slice has a stage for each message: equal slices share a program.
    used = (lambda k, count: k) if program.begins else used
    when = [count - 1 if alone else used(k, count) for k in arrivals(program.closed, back)]
    # Messages leave in their order: one that could leave before another waits for it.
    before = 0
    for number, value in enumerate(program.made):
        if value.kind == MESSAGE:
            before = when[number] = max(before, when[number])
    groups = [[number for number, k in enumerate(when) if k == of] for of in range(count)]
    return stages_of(program.name, "update", program.closed, program.read, program.made, groups)


def _passed_on(closed: ClosedJaxpr, given: Sequence[Value], first: int, names: Sequence[Value]) -> list[Value]:
    """Names the outputs of a program from `first` on: an input that it hands on unchanged keeps its name."""
    there = dict(zip(closed.jaxpr.invars, given))
    made = closed.jaxpr.outvars[first:]
    return [name if isinstance(var, Literal) else there.get(var, name) for var, name in zip(made, names)]


def _handed_on(closed: ClosedJaxpr, read: Sequence[Value], results: Sequence[Value]) -> dict[Value, Value]:
    """Names of values that were kept for the last program, and that it hands on as new shards → names of these."""
    there = {var: name for var, name in zip(closed.jaxpr.invars, read) if name.kind not in (STATE, SHARDS)}
    made = zip(closed.jaxpr.outvars, results)
    new = [(var, name) for var, name in made if name.kind == NEW and not isinstance(var, Literal) and var in there]
    return {there[var]: name for var, name in reversed(new)}


def _named_anew(program: Program, alias: Mapping[Value, Value]) -> Program:
    read, made = ([alias.get(name, name) for name in names] for names in (program.read, program.made))
    return program._replace(read=read, made=made)


def _nothing_sent(pieces: Pieces) -> dict[Value, Any]:
    """The bytes of a step without messages, which no task writes."""
    return {} if pieces.reductions else {BYTES: np.zeros(0, np.uint32)}


def _sent(messages: Messages, kept: Any) -> Sequence[Any]:
    return *messages.arrays, (replace(messages, arrays=()), kept)


def _came(kept: Any, *back: Any) -> tuple[Messages, Any]:
    messages, kept = kept
    return replace(messages, arrays=back), kept


def _back(sends: Sequence[Communicate], messages: Messages) -> Messages:
    """The forms in which messages come back."""
    arrays = [task.reduction.back(x) for task, x in zip(sends, messages.arrays)]
    return replace(messages, arrays=tuple(arrays))


def _read(sends: Sequence[Communicate]) -> tuple[Value, ...]:
    return tuple(task.reads[0] for task in sends)


def _written(sends: Sequence[Communicate]) -> tuple[Value, ...]:
    return tuple(task.writes[0] for task in sends)


def forms_of(tree: Any) -> Any:
    """The forms of arrays; NumPy's arrays get the dtypes that JAX would give them."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jax.typeof(x).dtype), tree)


def names_of(kind: str, tree: Any) -> list[Value]:
    """A value of this kind for each leaf of a tree, by its path."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    names = [leaf_name(path) for path in paths]
    # Two paths may read alike: {"a/b": …} and {"a": {"b": …}}.
    names = [name if names.count(name) == 1 else f"{name} {at}" for at, name in enumerate(names)]
    return [Value(kind, path=name) for name in names]
