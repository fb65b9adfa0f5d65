"""A list in which each replica stands for several virtual ones, and every program computes one.

The forward and backward pass of a virtual replica is cut at places that do not depend on the
buckets. Other programs pack the outputs of its stages into messages, and add those of its
neighbours in the tree. So the same programs always run: the number of replicas, the schedule and
the size of the buckets only decide which messages leave, and when.

Source: EasyScale (Li et al., SC 2023), whose workers stand for several threads of training.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fddp.comm import Placement, merges, of_one_replica, trace
from fddp.jaxpr import arrivals, ready_order
from fddp.losses import add_trees
from fddp.schedules import Pieces
from fddp.schedules.communications import communications
from fddp.schedules.lists import forms_of
from fddp.schedules.stage_tasks import stages_of
from fddp.schedules.tasks import Communicate, Compute, Task, TaskList
from fddp.schedules.values import BYTES, MESSAGE, RESULT, STATE, Value, names_of

# A stage ends after this many bytes of gradients; no option moves that place.
STAGE_BYTES = 2**20
FIRST = Value("first")


class Half(NamedTuple):
    """A sum that waits for its other half in the tree."""

    names: tuple[Value, ...]
    """Its values."""
    added: bool
    """True if it is a sum, whose memory may be reused; a stage's output may have other readers."""


class Tree(NamedTuple):
    """A tree that adds the contributions of virtual replicas, whatever messages carry the sums."""

    each: int
    """The number of virtual replicas per replica."""
    block: int
    """The number of them that a replica adds up before it sends."""
    first: Callable[[], jax.Array]
    """() → the number of each replica's first virtual replica."""
    pack: Callable[[tuple[Sequence[Any], Any]], Sequence[Any]]
    """Gradients and the tail → messages."""
    unpack: Callable[[Sequence[Any]], Any]
    """Sums of messages → sums."""
    keep: Callable[[Sequence[Any]], Any]
    """(saved values of each virtual replica) → saved values of their replica."""


def in_virtual_replicas(
    placement: Placement,
    pieces: Pieces,
    tree: Tree,
    state: Any,
    pending: PyTree,
    shards: PyTree,
    rows: PyTree,
) -> TaskList:
    """Lists one virtual replica after the other; a message leaves once the last has contributed.

    The one round of `pieces` maps (state, rows, number of a virtual replica) to its gradients and
    tail, and its saved values; `finish` maps (state, shards, sums, saved values, bytes sent per
    message) to the step's result and the shards. `tree` adds the round's outputs. There are neither
    pending gradients nor shards. The values of the list are arrays of one replica each.
    """
    del pending
    (contributes,) = pieces.rounds
    state = forms_of(state)
    rows = forms_of(rows)
    number = jax.ShapeDtypeStruct((), np.int32)
    virtual_rows = of_one_replica(rows, tree.each)
    state_names = names_of(STATE, state)
    row_names = names_of("rows", rows)

    contribute, (outputs, saved) = trace(placement, contributes.run, state, virtual_rows, number)
    output_names = names_of("made", outputs)
    saved_names = names_of("kept", saved)
    order = ready_order(contribute, len(outputs[0]))
    groups = _stage_outputs(outputs[0], order, len(output_names), len(saved_names))
    virtual_inputs = [*names_of("row", virtual_rows), Value("number")]
    reads = [*state_names, *virtual_inputs]
    writes = [*output_names, *saved_names]
    stages = stages_of("stage", "compute", contribute, reads, writes, groups)

    pack, messages = trace(placement, tree.pack, outputs)
    message_names = [Value(MESSAGE, k) for k in range(len(messages))]
    groups = [[k] for k in range(len(messages))]
    packing = stages_of("pack", "compute", pack, output_names, message_names, groups)
    (sends,) = communications([contributes.reductions])
    tasks = [_deal_rows(tree.each, row_names, virtual_inputs)]
    tasks += _contributions(tree, stages, packing, sends)

    unpack, sums = trace(placement, tree.unpack, messages)
    sum_names = names_of("came", sums)
    times = arrivals(unpack, {k: k for k in range(len(sends))})
    groups = [list[int]() for _ in sends]
    for at, last in enumerate(times):
        groups[last].append(at)
    received = [task.writes[0] for task in sends]
    tasks += stages_of("unpack", "update", unpack, received, sum_names, groups)

    if saved_names:
        keep, _ = trace(placement, tree.keep, [saved] * tree.each)
        reads = [*chain.from_iterable(_names_of(saved_names, v) for v in range(tree.each))]
        all_outputs = [range(len(saved_names))]
        tasks += stages_of("keep", "update", keep, reads, saved_names, all_outputs)

    nbytes = jax.ShapeDtypeStruct((len(sends),), np.uint32)
    finish, (result, new) = trace(placement, pieces.finish, state, shards, sums, saved, nbytes)
    results = names_of(RESULT, result)
    reads = [*state_names, *sum_names, *saved_names, BYTES]
    tasks += stages_of("update", "update", finish, reads, results, [range(len(results))])

    first = cache(lambda: placement.each(tree.first()))

    def enter(state: Any, pending: PyTree, shards: PyTree, rows: PyTree) -> dict[Value, Any]:
        arrays = map(placement.each, jax.tree.leaves((state, rows)))
        return dict(zip([*state_names, *row_names], arrays)) | {FIRST: first()}

    treedef = jax.tree.structure(result)
    return TaskList(
        tuple(tasks),
        enter,
        lambda values: (treedef.unflatten([values[name] for name in results]), new),
    )


def _contributions(
    tree: Tree, stages: Sequence[Compute], packing: Sequence[Compute], sends: Sequence[Communicate]
) -> list[Task]:
    """Lists the stages of all virtual replicas, each with tasks that add and pack its outputs.

    A sum that waits for its other half in the tree is not packed; a complete block is.
    """
    tasks = list[Task]()
    merged_at = merges(tree.block)
    sums = cache(_adding)
    packed = cache(lambda k, count: _packed(packing[k], count))
    waiting = [list[Half]() for _ in packing]
    blocks = [list[Value]() for _ in packing]

    def contribute(k: int, v: int) -> None:
        """Adds virtual replica v's part of message k."""
        count = merged_at[v % tree.block]
        halves = [waiting[k].pop() for _ in range(count)][::-1]
        leaf = Half(_names_of(packing[k].reads, v), False)
        reads = tuple(chain.from_iterable(half.names for half in (*halves, leaf)))
        if (v + 1) % tree.block == 0:
            (block,) = sends[k].reads
            if tree.each > tree.block:
                block = Value(f"block of message {k} up to", v)
            blocks[k].append(block)
            tasks.append(Compute(f"pack message {k} of {v}", reads, (block,), packed(k, count)))
        elif count:
            names = tuple(Value(f"half of {value} up to", v) for value in packing[k].reads)
            reuses = len(names) if halves[0].added else 0
            add = Compute(f"add message {k} of {v}", reads, names, sums(count), reuses=reuses)
            tasks.append(add)
            waiting[k].append(Half(names, True))
        else:
            waiting[k].append(leaf)

    def send(k: int) -> None:
        if tree.each > tree.block:
            join = Compute(f"join message {k}", tuple(blocks[k]), sends[k].reads, _joined)
            tasks.append(join)
        tasks.append(sends[k])

    for v in range(tree.each):
        ready = set[Value]()
        k = 0
        for stage in stages:
            tasks.append(_renamed(stage, v))
            ready |= set(stage.writes)
            while k < len(packing) and ready.issuperset(packing[k].reads):
                contribute(k, v)
                if v == tree.each - 1:
                    send(k)
                k += 1
    return tasks


def _adding(count: int) -> Callable[..., Sequence[Any]]:
    """Makes a program that adds `count` waiting halves, last one first, to the values behind."""

    def run(*values: Any) -> Sequence[Any]:
        width = len(values) // (count + 1)
        *halves, total = (values[at : at + width] for at in range(0, len(values), width))
        for half in reversed(halves):
            total = add_trees(half, total)
        return total

    return run


def _packed(packing: Compute, count: int) -> Callable[..., Sequence[Any]]:
    """Makes the same program, which also packs the sum."""
    return lambda *values: packing.run(*_adding(count)(*values))


def _joined(*blocks: Any) -> Sequence[Any]:
    return (jnp.concatenate(blocks),)


def _deal_rows(each: int, rows: Sequence[Value], virtual_inputs: Sequence[Value]) -> Compute:
    """Deals a replica's rows out to its virtual replicas, each with its number."""

    def run(first: jax.Array, *rows: jax.Array) -> Sequence[Any]:
        slices = [jnp.split(x, each) for x in rows]
        outputs = list[Any]()
        for v in range(each):
            outputs += [*(split[v] for split in slices), first.reshape(()) + v]
        return outputs

    writes = chain.from_iterable(_names_of(virtual_inputs, v) for v in range(each))
    return Compute("rows", (FIRST, *rows), tuple(writes), run)


def _stage_outputs(
    grads: Sequence[Any], order: Sequence[int], outputs: int, saved: int
) -> list[list[int]]:
    """Groups outputs by stage: the tail first, gradients as they are ready, saved values last."""
    groups = [list(range(len(grads), outputs))]
    filled = 0
    for i in order:
        groups[-1].append(i)
        filled += grads[i].size * grads[i].dtype.itemsize
        if filled >= STAGE_BYTES:
            groups = [*groups, []]
            filled = 0
    groups = list(filter(None, groups))
    groups[-1] += range(outputs, outputs + saved)
    return groups


def _renamed(task: Compute, v: int) -> Compute:
    """A task of virtual replica v."""
    return task._replace(
        name=f"{task.name} of {v}", reads=_names_of(task.reads, v), writes=_names_of(task.writes, v)
    )


def _names_of(names: Sequence[Value], v: int) -> tuple[Value, ...]:
    return tuple(_of(name, v) for name in names)


def _of(value: Value, v: int) -> Value:
    if value.equal_everywhere:
        return value
    return Value(f"{value} of", v)
