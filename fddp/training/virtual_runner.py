"""Runs a step of virtual replicas, program by program, on each device of a process.

One program computes the contribution of a virtual replica, one adds two contributions, and one
divides the sum and updates the state. The others only move numbers. So the same arithmetic always
runs: the number of replicas decides how often a program runs, and what is sent.

Source: EasyScale (Li et al., SC 2023), whose workers stand for several threads of training.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from time import perf_counter
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.profiler import TraceAnnotation
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from fddp.comm import MOST, REPLICATED, Group, tree_bytes, tree_reduce, tree_sum
from fddp.hooks import Reduction
from fddp.losses import add_trees
from fddp.step.schedules import Runner, Span, StepInputs, StepOutputs, Timeline, report_first_call

# The reduction of a message, for its names, and the form of a block's message.
Message: TypeAlias = tuple[Reduction, jax.ShapeDtypeStruct]


def one_by_one(
    group: Group,
    messages: Sequence[Message],
    each: int,
    block: int,
    donate: bool,
    *,
    contribute: Callable[[Any, tuple[Any, jax.Array]], tuple[Any, Any]],
    pack: Callable[[Any], Sequence[jax.Array]],
    unpack: Callable[[Sequence[jax.Array]], Any],
    finish: Callable[[Any, Any, Any, jax.Array], Any],
) -> Runner:
    """Makes the runner of a step with `each` virtual replicas per replica.

    A replica adds up each `block` of them before it sends. If `donate`, the update may reuse the
    memory of the state. The functions of one device are:
    - `contribute`: (state, (rows, number)) of a virtual replica → its contribution, and its marks
      of non-finite gradients or None
    - `pack`: contribution → messages; `unpack`: sums of messages → sum of contributions
    - `finish`: (state, sum of contributions, marks, bytes sent per message) → the step's result
    """
    placement = group.placement
    local = group.size // group.processes
    spans = list[Span]()

    def program(f: Callable[..., Any], name: str, donate: Sequence[int] = ()) -> Callable[..., Any]:
        return report_first_call(jax.jit(f, donate_argnums=donate), name, group)

    deal = program(partial(_dealt, each), "rows")
    contribute = program(contribute, "a virtual replica")
    add = program(add_trees, "a sum")
    pack = program(partial(_packed, pack), "pack")
    unpack = program(unpack, "unpack")
    finish = program(finish, "update", (0,) if donate else ())

    summed = placement.program(
        lambda x: tree_reduce(group.communicator, x, each // block),
        (placement.per_replica,),
        REPLICATED,
    )

    @contextmanager
    def span(kind: str, name: str, nbytes: int = 0) -> Iterator[None]:
        start = perf_counter()
        with TraceAnnotation(name):
            yield
        spans.append(Span(kind, name, start, perf_counter(), nbytes))

    def on_each(kind: str, name: str, program: Callable[..., Any], *columns: Any) -> list[Any]:
        """Runs a program on each device, with an item of each column, and waits for the results."""
        group.journal.say(name)
        with span(kind, name):
            return jax.block_until_ready([program(*inputs) for inputs in zip(*columns)])

    def per_device(tree: PyTree) -> list[Any]:
        """Splits a tree into one per device."""
        leaves, treedef = jax.tree.flatten(tree)
        return [treedef.unflatten(parts) for parts in zip(*map(placement.per_device, leaves))]

    def together(trees: Sequence[Any], where: PartitionSpec) -> Any:
        """Joins one tree per device: the inverse of `per_device`."""
        return jax.tree.map(lambda *parts: placement.join_devices(parts, where), *trees)

    def send(message: Message, parts: Sequence[jax.Array]) -> jax.Array:
        reduction, form = message
        nbytes = form.size * form.dtype.itemsize
        blocks = together(parts, placement.per_replica)
        journal = group.journal.message(reduction.title, nbytes)
        with journal, span("communication", reduction.name, nbytes):
            return jax.block_until_ready(summed(blocks))

    @cache
    def constants() -> tuple[jax.Array, jax.Array]:
        """The numbers of this process's virtual replicas, and the bytes sent per message."""
        first = group.rank * local * each
        numbers = np.arange(first, first + local * each, dtype=np.int32)
        sent = [tree_bytes(group.size, each // block, form) for _, form in messages]
        nbytes = np.array([min(n, MOST) for n in sent], np.uint32)
        return placement.place(numbers, placement.per_replica), placement.place(nbytes, REPLICATED)

    def blocks_of(states: Sequence[Any], dealt: Sequence[Any]) -> tuple[Any, Any]:
        """Returns the sums of each device's blocks, and the marks of its virtual replicas."""
        marks = list[Any]()

        def contribution(v: int) -> list[Any]:
            rows = [parts[v] for parts in dealt]
            sums, marked = zip(*on_each("compute", f"replica {v}", contribute, states, rows))
            marks.append(marked)
            return list(sums)

        added = partial(on_each, "compute", "sum", add)
        numbers = [range(first, first + block) for first in range(0, each, block)]
        blocks = [tree_sum(block, added, contribution) for block in numbers]
        return zip(*blocks), zip(*marks)

    def run(inputs: StepInputs) -> StepOutputs:
        spans.clear()
        numbers, nbytes = constants()
        rows = placement.place(inputs.rows, placement.per_replica)
        states = per_device(inputs.state)
        dealt = on_each("compute", "rows", deal, per_device((rows, numbers)))
        packed, marks = zip(*on_each("compute", "pack", pack, *blocks_of(states, dealt)))
        sums = list(map(send, messages, zip(*packed)))
        totals = on_each("update", "unpack", unpack, per_device(sums))
        results = on_each("update", "update", finish, states, totals, marks, per_device(nbytes))
        return StepOutputs(together(results, REPLICATED), inputs.shards, inputs.memory)

    return Runner(run, timeline=lambda: Timeline(tuple(spans)))


def _dealt(each: int, rows: PyTree) -> list[Any]:
    """Deals a replica's rows out to its virtual replicas."""
    leaves, treedef = jax.tree.flatten(rows)
    return [treedef.unflatten(x) for x in zip(*(jnp.split(x, each) for x in leaves))]


def _packed(
    pack: Callable[[Any], Sequence[jax.Array]], blocks: Sequence[Any], marks: Sequence[Any]
) -> tuple[list[jax.Array], Any]:
    """Packs the blocks of a replica behind each other, and joins its marks."""
    messages = [jnp.concatenate(parts) for parts in zip(*map(pack, blocks))]
    return messages, jax.tree.map(lambda *flags: jnp.any(jnp.stack(flags), axis=0), *marks)
