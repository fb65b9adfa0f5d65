"""A list in which each replica stands for several virtual ones, and every program is of one of them.

The forward and backward pass of a virtual replica is cut at places that do not depend on the buckets. Other programs
pack the results of its stages into messages, and add those of its neighbours in the tree. So the same programs
always run: the number of replicas, the schedule and the size of the buckets decide only what is sent when.

Source: EasyScale (Li et al., SC 2023), whose workers stand for several threads of training.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fddp.comm import Placement, merges, of_one_replica, trace
from fddp.jaxpr import arrivals, ready_order
from fddp.losses import added
from fddp.schedules import Pieces
from fddp.schedules.lists import forms_of, names_of
from fddp.schedules.stage_tasks import stages_of
from fddp.schedules.tasks import (
    BYTES,
    MESSAGE,
    RESULT,
    STATE,
    Communicate,
    Compute,
    Task,
    TaskList,
    Value,
    communications,
)

# A stage ends after gradients of so many bytes: no option moves that place.
STAGE_BYTES = 2**20
FIRST = Value("first")


class Half(NamedTuple):
    """A sum that waits for more."""

    names: tuple[Value, ...]
    """Its values."""
    added: bool
    """Whether it was added here, so that its memory may be reused; somebody else may hold what a stage made."""


class Tree(NamedTuple):
    """A tree in which the contributions of virtual replicas are added, whatever messages carry the sums."""

    each: int
    """The number of virtual replicas for which a replica stands."""
    block: int
    """The number of them that it adds up before it sends."""
    first: Callable[[], jax.Array]
    """() → the number of its first virtual replica, for each replica."""
    pack: Callable[[tuple[Sequence[Any], Any]], Sequence[Any]]
    """Gradients and the tail → messages."""
    unpack: Callable[[Sequence[Any]], Any]
    """Sums of messages → sums."""
    keep: Callable[[Sequence[Any]], Any]
    """(what is kept, of each virtual replica) → what their replica keeps."""


def in_virtual_replicas(
    placement: Placement, pieces: Pieces, tree: Tree, state: Any, pending: Any, shards: Any, rows: Any
) -> TaskList:
    """Lists one virtual replica after the other; a message leaves when the last of them has made its part of it.

    Args:
      placement: where the replicas' programs run.
      pieces: one round, (state, rows, number of a virtual replica) → its gradients and the tail, and what is kept; and
        what finishes, (state, shards, sums, what is kept, bytes sent per message) → the step's result, and the shards.
      tree: adds what the round makes.
      state: arguments of one replica, or their forms.
      pending: nothing; there is no `no_sync`.
      shards: nothing, and nothing is made of them.
      rows: likewise, as for state.

    Returns:
      The list; its values are arrays of one replica each, for programs of one.
    """
    del pending
    (contributes,) = pieces.rounds
    state = forms_of(state)
    rows = forms_of(rows)
    number = jax.ShapeDtypeStruct((), np.int32)
    one = of_one_replica(rows, tree.each)
    of_state = names_of(STATE, state)
    of_rows = names_of("rows", rows)

    contribute, (made, kept) = trace(placement, contributes.run, state, one, number)
    parts = names_of("made", made)
    held = names_of("kept", kept)
    groups = _cuts(made[0], ready_order(contribute, len(made[0])), len(parts), len(held))
    read = [*of_state, *names_of("row", one), Value("number")]
    stages = stages_of("stage", "compute", contribute, read, [*parts, *held], groups)

    pack, messages = trace(placement, tree.pack, made)
    titles = [Value(MESSAGE, k) for k in range(len(messages))]
    packing = stages_of("pack", "compute", pack, parts, titles, [[k] for k in range(len(messages))])
    (sends,) = communications([contributes.reductions])
    tasks = [_dealt(tree.each, of_rows, read[len(of_state) :])]
    tasks += _contributions(tree, stages, packing, sends)

    unpack, came = trace(placement, tree.unpack, messages)
    back = names_of("came", came)
    when = arrivals(unpack, {k: k for k in range(len(sends))})
    groups = [[at for at, last in enumerate(when) if last == k] for k in range(len(sends))]
    tasks += stages_of("unpack", "update", unpack, [task.writes[0] for task in sends], back, groups)

    keep, _ = trace(placement, tree.keep, [kept] * tree.each)
    keeps = [_of(name, v) for v in range(tree.each) for name in held]
    tasks += stages_of("keep", "update", keep, keeps, held, [range(len(held))]) if held else []

    nbytes = jax.ShapeDtypeStruct((len(sends),), np.uint32)
    finish, (result, new) = trace(placement, pieces.finish, state, shards, came, kept, nbytes)
    results = names_of(RESULT, result)
    read = [*of_state, *back, *held, BYTES]
    tasks += stages_of("update", "update", finish, read, results, [range(len(results))])

    first = cache(lambda: placement.each(tree.first()))

    def enter(state: Any, pending: Any, shards: Any, rows: Any) -> dict[Value, Any]:
        given = dict(zip([*of_state, *of_rows], map(placement.each, jax.tree.leaves((state, rows)))))
        return given | {FIRST: first()}

    treedef = jax.tree.structure(result)
    return TaskList(tuple(tasks), enter, lambda values: (treedef.unflatten([values[name] for name in results]), new))


def _contributions(
    tree: Tree, stages: Sequence[Compute], packing: Sequence[Compute], sends: Sequence[Communicate]
) -> list[Task]:
    """Lists the stages of all virtual replicas; behind each stage the tasks that add and pack what it made.

    A sum that waits for its other half in the tree waits as it was made; a block that is whole is packed.
    """
    tasks = list[Task]()
    complete = merges(tree.block)
    sums = cache(_adding)
    packed = cache(lambda k, count: _packed(packing[k], count))
    waiting = [list[Half]() for _ in packing]
    blocks = [list[Value]() for _ in packing]
    for v in range(tree.each):
        there = set[Value]()
        left = 0
        last = v == tree.each - 1
        for stage in stages:
            tasks.append(_renamed(stage, v))
            there |= set(stage.writes)
            while left < len(packing) and there.issuperset(packing[left].reads):
                k = left
                count = complete[v % tree.block]
                halves = [waiting[k].pop() for _ in range(count)][::-1]
                own = Half(tuple(_of(name, v) for name in packing[k].reads), False)
                reads = tuple(name for half in (*halves, own) for name in half.names)
                if (v + 1) % tree.block == 0:
                    blocks[k].append(
                        sends[k].reads[0] if tree.each == tree.block else Value(f"block of message {k} up to", v)
                    )
                    tasks.append(Compute(f"pack message {k} of {v}", reads, (blocks[k][-1],), packed(k, count)))
                elif count:
                    names = tuple(Value(f"half of {value} up to", v) for value in packing[k].reads)
                    reuses = len(names) if halves[0].added else 0
                    tasks.append(Compute(f"add message {k} of {v}", reads, names, sums(count), reuses=reuses))
                    waiting[k].append(Half(names, True))
                else:
                    waiting[k].append(own)
                if last and tree.each > tree.block:
                    tasks.append(Compute(f"join message {k}", tuple(blocks[k]), sends[k].reads, _joined))
                if last:
                    tasks.append(sends[k])
                left += 1
    return tasks


def _adding(count: int) -> Callable[..., Sequence[Any]]:
    """Makes a program that adds the halves that waited, the last one first, to the values behind them."""

    def run(*values: Any) -> Sequence[Any]:
        width = len(values) // (count + 1)
        *waiting, made = (values[at : at + width] for at in range(0, len(values), width))
        for half in reversed(waiting):
            made = added(half, made)
        return made

    return run


def _packed(packing: Compute, count: int) -> Callable[..., Sequence[Any]]:
    """Makes the same program, which also packs the sum."""
    return lambda *values: packing.run(*_adding(count)(*values))


def _joined(*blocks: Any) -> Sequence[Any]:
    return (jnp.concatenate(blocks),)


def _dealt(each: int, rows: Sequence[Value], of_one: Sequence[Value]) -> Compute:
    """Deals a replica's rows out to its virtual replicas, each with its number."""

    def run(first: jax.Array, *rows: jax.Array) -> Sequence[Any]:
        parts = [jnp.split(x, each) for x in rows]
        return [one for v in range(each) for one in (*(part[v] for part in parts), first.reshape(()) + v)]

    writes = tuple(_of(name, v) for v in range(each) for name in of_one)
    return Compute("rows", (FIRST, *rows), writes, run)


def _cuts(grads: Sequence[Any], order: Sequence[int], parts: int, kept: int) -> list[list[int]]:
    """Picks the parts that each stage makes: the tail first, gradients in the order of readiness, what is kept last."""
    groups = [list(range(len(grads), parts))]
    filled = 0
    for i in order:
        groups[-1].append(i)
        filled += grads[i].size * grads[i].dtype.itemsize
        if filled >= STAGE_BYTES:
            groups = [*groups, []]
            filled = 0
    groups = [group for group in groups if group]
    groups[-1] += range(parts, parts + kept)
    return groups


def _renamed(task: Compute, v: int) -> Compute:
    """A task of virtual replica v."""
    reads, writes = (tuple(_of(name, v) for name in names) for names in (task.reads, task.writes))
    return task._replace(name=f"{task.name} of {v}", reads=reads, writes=writes)


def _of(value: Value, v: int) -> Value:
    return value if value.equal_everywhere else Value(f"{value} of", v)
