"""The lists of tasks that a step can be: whole, or cut where messages leave and where their sums come back.

Making one is a function of forms: nothing is compiled, sent or run.

Source: `DDPOptimizer` in TorchDynamo, which cuts a compiled graph at bucket boundaries; `_apply_optimizer_in_backward`
in PyTorch, which updates a bucket while later ones travel.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from fddp.buckets import Messages
from fddp.comm import Placement, trace
from fddp.jax_internals import ClosedJaxpr, make_program
from fddp.jaxpr import Stage, arrivals, collectives, cut
from fddp.schedules.pieces import Pieces, Round
from fddp.schedules.tasks import BYTES, NEW, SHARDS, Communicate, Compute, Task, TaskList, communications

GIVEN = ("state", "pending", "rows")


def in_one_piece(placement: Placement, pieces: Pieces, state: Any, pending: Any, shards: Any, rows: Any) -> TaskList:
    """The baseline: the backward pass, all messages, the update.

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
    del placement, state, pending, shards, rows  # one list fits all forms
    first, *later = communications(pieces.spoken)

    def backward(state: Any, pending: Any, rows: Any) -> Sequence[Any]:
        return _sent(*pieces.local(state, pending, rows))

    def again(one: Round) -> Callable[..., Sequence[Any]]:
        def run(state: Any, shards: Any, kept: Any, *back: Any) -> Sequence[Any]:
            messages, kept = kept
            return _sent(*one.run(state, shards, replace(messages, arrays=back), kept))

        return run

    def finish(state: Any, kept: Any, nbytes: Any, *back: Any) -> Sequence[Any]:
        messages, kept = kept
        return pieces.finish(state, replace(messages, arrays=back), kept, nbytes)

    tasks: list[Task] = [Compute("backward", GIVEN, (*_read(first), "kept"), backward), *first]
    kept, back = "kept", _written(first)
    for one, sends in zip(pieces.rounds, later):
        reads, kept = ("state", SHARDS, kept, *back), f"kept by {one.name}"
        tasks += [Compute(one.name, reads, (*_read(sends), kept), again(one), "update"), *sends]
        back = _written(sends)
    last = "unpack" if pieces.rounds else "update"
    tasks.append(Compute(last, ("state", kept, BYTES, *back), ("result", NEW), finish, "update"))
    return TaskList(
        tuple(tasks),
        lambda state, pending, shards, rows: {"state": state, "pending": pending, SHARDS: shards, "rows": rows},
        lambda values: (values["result"], values[NEW]),
    )


def in_stages(placement: Placement, pieces: Pieces, state: Any, pending: Any, shards: Any, rows: Any) -> TaskList:
    """The backward pass cut where messages are made, what is done with them where they come back.

    Args:
      placement: where the replicas' programs run.
      pieces: the step.
      state: arguments of one replica, or their forms.
      pending: likewise.
      shards: likewise.
      rows: likewise.

    Returns:
      The list; its values are arrays, named by their paths in (state, pending, shards, rows) and in the result.
    """
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, pending, shards, rows))
    state, pending, shards, rows = given
    entering = [*_names("state", state), *_names("pending", pending), *_names(SHARDS, shards), *_names("rows", rows)]
    states = _names("state", state)
    there = [*states, *_names(SHARDS, shards)]
    (sends, *later), count = communications(pieces.spoken), len(pieces.reductions)

    closed, (messages, kept) = trace(placement, pieces.local, state, pending, rows)
    of_local = [name for name in entering if name.split("/")[0] != SHARDS]
    names = _names("kept", kept)
    groups = [[k] for k in range(count)]
    groups[-1] += range(count, len(closed.out_avals))
    stages = _stages("stage", "compute", closed, of_local, [*_read(sends), *names], groups)
    tasks: list[Task] = [task for pair in zip(stages, sends) for task in pair]

    for one, next_sends in zip(pieces.rounds, later):
        back = _back(sends, messages)
        closed, (messages, kept) = trace(placement, one.run, state, shards, back, kept)
        read = [*there, *_written(sends), *names]
        names = _names(f"kept by {one.name}", kept)
        stages, made = _in_turn(one.name, closed, read, len(there), [*_read(next_sends), *names], len(sends))
        for task, writes in zip(stages, made):
            tasks += [task, *(send for send in next_sends if send.reads[0] in writes)]
        sends = next_sends

    nbytes = jax.ShapeDtypeStruct((sum(map(len, pieces.spoken)),), np.uint32)
    back = _back(sends, messages)
    closed, (result, new) = trace(placement, pieces.finish, state, back, kept, nbytes)
    read, results = [*states, *_written(sends), *names, BYTES], [*_names("result", result), *_names(NEW, new)]
    title = "unpack" if pieces.rounds else "update"
    stages, _ = _in_turn(title, closed, read, len(states), results, len(sends))

    treedef = jax.tree.structure((result, new))
    return TaskList(
        (*tasks, *stages),
        lambda *arguments: dict(zip(entering, jax.tree.leaves(arguments))),
        lambda values: treedef.unflatten([values[name] for name in results]),
    )


def _in_turn(
    title: str, closed: ClosedJaxpr, given: Sequence[str], before: int, made: Sequence[str], count: int
) -> tuple[list[Compute], list[set[str]]]:
    """What is made of `count` messages that come back one after the other, given from number `before` on, in stages.

    What a message is for is done when it is back; how much was sent is known when all of them are. What speaks with the
    other replicas itself, for a norm say, waits for all and is waited for: beside a message it would mix with that.
    """
    back = {before + k: k for k in range(count)} | {at: count - 1 for at, name in enumerate(given) if name == BYTES}
    alone = bool(collectives(closed))
    when = [count - 1 if alone else _used(k, count) for k in arrivals(closed, back)]
    groups = [[number for number, k in enumerate(when) if k == of] for of in range(count)]
    return _stages(title, "update", closed, given, made, groups), [{made[k] for k in group} for group in groups]


def _sent(messages: Messages, kept: Any) -> Sequence[Any]:
    return *messages.arrays, (replace(messages, arrays=()), kept)


def _back(sends: Sequence[Communicate], messages: Messages) -> Messages:
    """The forms of what comes back of messages."""
    arrays = [task.reduction.back(x) for task, x in zip(sends, messages.arrays)]
    return replace(messages, arrays=tuple(arrays))


def _read(sends: Sequence[Communicate]) -> tuple[str, ...]:
    return tuple(task.reads[0] for task in sends)


def _written(sends: Sequence[Communicate]) -> tuple[str, ...]:
    return tuple(task.writes[0] for task in sends)


def _stages(
    title: str,
    kind: str,
    closed: ClosedJaxpr,
    given: Sequence[str],
    made: Sequence[str],
    groups: Sequence[Sequence[int]],
) -> list[Compute]:
    """The stages of a program as tasks, one for each group of its outputs."""
    jaxpr = closed.jaxpr
    outputs = [jaxpr.outvars[number] for group in groups for number in group]
    consts = dict(zip(jaxpr.constvars, closed.consts))
    stages = cut(make_program(closed, jaxpr.eqns, jaxpr.invars, outputs, consts), [len(group) for group in groups])

    handed = ((k, number) for k, stage in enumerate(stages) for number in stage.writes)
    names = [*given, *(f"{title} {k}/{number - len(given)}" for k, number in handed)]

    def task(k: int, stage: Stage, group: Sequence[int]) -> Compute:
        reads = tuple(names[number] for number in stage.reads)
        writes = (*(names[number] for number in stage.writes), *(made[number] for number in group))
        run = _handing(stage, len(given)) if writes else lambda *values: ()
        return Compute(f"{title} {k}", reads, writes, run, kind)

    return [task(k, stage, group) for k, (stage, group) in enumerate(zip(stages, groups))]


def _handing(stage: Stage, inputs: int) -> Callable[..., Sequence[Any]]:
    """A stage; what it hands on to later ones is each replica's own, and crosses with a first dim."""

    def run(*values: jax.Array) -> Sequence[Any]:
        read = [value if number < inputs else value[0] for number, value in zip(stage.reads, values)]
        made = stage.run(*read)
        handed = len(stage.writes)
        return *(value[None] for value in made[:handed]), *made[handed:]

    return run


def _used(k: int, count: int) -> int:
    """With which of `count` sums what needs sum k is used: of those that are left half go together.

    Little is to be done when the last one is back, and there are log₂ of `count` programs to compile.
    """
    return count - (1 << (count - k).bit_length() - 1)


def _names(title: str, tree: Any) -> list[str]:
    """A name for each leaf of a tree, by its path."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    names = ["/".join(filter(None, (title, jax.tree_util.keystr(path, simple=True, separator="/")))) for path in paths]
    # Two paths may read alike: {"a/b": …} and {"a": {"b": …}}.
    return [name if names.count(name) == 1 else f"{name} {at}" for at, name in enumerate(names)]
