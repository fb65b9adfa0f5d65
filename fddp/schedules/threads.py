"""The staged schedule: stages on the main thread, all-reduces on another, updates as what was sent comes back.

Source: `DDPOptimizer` in TorchDynamo, which cuts a compiled graph at bucket boundaries; `_apply_optimizer_in_backward`
in PyTorch, which updates a bucket while later ones travel.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import jax
import numpy as np

from fddp.comm import REPLICATED, Group, trace
from fddp.hooks import Memory
from fddp.jax_internals import with_configuration, without_jit
from fddp.jaxpr import arrivals
from fddp.schedules.pieces import Pieces, Runner
from fddp.schedules.send import Sent, bytes_of, lanes_of, remembered, sending
from fddp.schedules.stage_programs import Relay, relay
from fddp.schedules.timeline import Span, Timeline


def staged(group: Group, pieces: Pieces, donate: bool) -> Runner:
    """The backward cut where buckets become ready: the main thread runs stages, another sends what they made.

    For hosts whose XLA overlaps nothing by itself (CPU). All-reduces leave in plan order on every rank, one at a time
    on each of the clones of the transport.

    Args:
      group: the replicas.
      pieces: the step.
      donate: whether the last program may reuse the state's memory.

    Returns:
      The runner; stages are cut and compiled once for each form of its arguments.
    """
    own, lanes, send = (
        group.placement.per_replica,
        lanes_of(group, pieces.reductions),
        sending(group, pieces.reductions),
    )
    cuts: dict[Any, Cut] = {}
    spans: list[Span] = []

    def run(state: Any, pending: Any, memory: Memory, rows: Any) -> tuple[Any, Memory]:
        if without_jit():
            raise ValueError(
                "under jax.disable_jit() a loss runs operation by operation, and schedule='staged' has cut it into "
                "compiled stages: make the step with schedule='fused' or 'after' to look inside."
            )
        rows = group.placement.place(rows, own)
        (equal, of_state), (mine, of_rest) = jax.tree.flatten(state), jax.tree.flatten((pending, rows))
        leaves = [*equal, *mine]
        form = (of_state, of_rest, tuple((x.shape, x.dtype) for x in leaves))
        if form not in cuts:
            cuts[form] = cut_step(group, pieces, donate, state, pending, rows)
        now = cuts[form]
        spans.clear()
        # Threads live as long as the step: nothing is left behind, whatever happens.
        names = [f"fddp-all-reduce-{number}" for number in range(len(lanes))]
        threads = [ThreadPoolExecutor(1, thread_name_prefix=name) for name in names]
        try:
            sender = with_configuration(partial(send, memory=memory))
            sends, kept = _launch(now.backward, leaves, sender, threads, spans)
            result = land(group, now.update, equal, [one.result for one in sends], kept, spans)
        finally:
            # Nothing is called off: after an error, too, each lane sends what was made before, the same on all ranks.
            for thread in threads:
                thread.shutdown()
        done = [one.result() for one in sends]
        spans.extend(one.span for one in done)
        return now.result.unflatten(result), remembered(done, memory)

    return Runner(run, None, lambda: Timeline(tuple(spans)))


class Cut(NamedTuple):
    """A step in stages."""

    backward: Relay
    """`Pieces.local`: stage k makes wire k; the last one also what is kept."""
    update: Relay
    """`Pieces.finish`: stage k needs no wire after k; some of the first have nothing to do."""
    result: Any
    """Structure of what that makes."""


def cut_step(group: Group, pieces: Pieces, donate: bool, state: Any, pending: Any, rows: Any) -> Cut:
    """Cuts a step where wires leave, and where they come back.

    Args:
      group: the replicas.
      pieces: the step.
      donate: whether updates may reuse the state's memory.
      state: arguments, or their forms.
      pending: likewise.
      rows: likewise.

    Returns:
      Both halves, compiled.
    """
    own = group.placement.per_replica

    def scaled(x: Any, times: int = 1, parts: int = 1) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((x.shape[0] * times // parts, *x.shape[1:]) if x.ndim else (), x.dtype)

    equal, all_mine = jax.tree.map(scaled, state), jax.tree.map(scaled, (pending, rows))
    mine = jax.tree.map(partial(scaled, parts=group.placement.replicas_in_array), all_mine)
    closed, (wires, kept) = trace(group.placement, pieces.local, equal, *mine)
    states, count = len(jax.tree.leaves(equal)), len(wires.arrays)
    given = jax.tree.leaves((equal, all_mine))
    specs = [REPLICATED] * states + [own] * (len(given) - states)
    groups = [[k] for k in range(count)]
    groups[-1] += range(count, len(closed.out_avals))
    backward = relay(group.placement, closed, groups, given, specs, own)

    sent = jax.ShapeDtypeStruct((count,), np.uint32)
    closed, result = trace(group.placement, pieces.finish, equal, wires, kept, sent)
    all_kept = jax.tree.leaves(jax.tree.map(partial(scaled, times=group.placement.replicas_in_array), kept))
    given = [*jax.tree.leaves((equal, wires)), *all_kept, sent]
    specs = [REPLICATED] * (states + count) + [own] * len(all_kept) + [REPLICATED]
    # How much was sent is known when all of it is back.
    back = arrivals(closed, {states + k: k for k in range(count)} | {len(given) - 1: count - 1})
    when = [_used(k, count) for k in back]
    groups = [[number for number, k in enumerate(when) if k == wire] for wire in range(count)]
    update = relay(group.placement, closed, groups, given, specs, REPLICATED, donate=range(states) if donate else ())
    return Cut(backward, update, jax.tree.structure(result))


def _used(k: int, count: int) -> int:
    """With which wire what needs wire k is used: of those that are left half go together.

    Little is to be done when the last one is back, and there are log₂ of `count` programs to compile.
    """
    return count - (1 << (count - k).bit_length() - 1)


def _launch(
    backward: Relay,
    leaves: Sequence[jax.Array],
    send: Callable[..., Sent],
    threads: Sequence[ThreadPoolExecutor],
    spans: list[Span],
) -> tuple[list[Future[Sent]], list[jax.Array]]:
    """Runs the backward pass and sends each wire as soon as it is there; also what is kept."""
    values, sends, clock = dict(enumerate(leaves)), list[Future[Sent]](), perf_counter()
    made: jax.Array | None = None
    kept: list[jax.Array] = []

    def leave(wire: jax.Array) -> None:
        nonlocal clock
        jax.block_until_ready(wire)
        k, lane = len(sends), len(sends) % len(threads)
        spans.append(Span("compute", f"stage {k}", clock, clock := perf_counter()))
        before, first = sends[lane :: len(threads)][-1:], lambda: sends[0].result()
        sends.append(threads[lane].submit(_follow, before, send, k, first=first, wire=wire))

    for k in range(len(backward.stages)):
        try:
            results = backward.run(k, values)
        finally:
            # One stage is queued behind the one that runs, so that the core never waits for Python. What was made
            # leaves even if the next stage fails: an error may show here, or only when its wire is waited for.
            if made is not None:
                leave(made)
        made, *kept = results
        del results
    if made is not None:
        leave(made)
    return sends, kept


def _follow(before: Sequence[Future[Sent]], send: Callable[..., Sent], *args: Any, **kwargs: Any) -> Sent:
    """Sends after what went before on the same lane; after an error there nothing more, the same on all ranks."""
    for one in before:
        one.result()
    return send(*args, **kwargs)


def land(
    group: Group,
    update: Relay,
    leaves: Sequence[jax.Array],
    back: Sequence[Callable[[], Sent]],
    kept: Any,
    spans: list[Span],
) -> list[jax.Array]:
    """Uses wires as they come back, while later ones travel.

    Args:
      group: the replicas.
      update: the second half of a step.
      leaves: of the state.
      back: for each wire, what waits until it is back.
      kept: what the replica kept for itself.
      spans: where to write down how long each update took.

    Returns:
      The leaves of the step's result.
    """
    values, out = dict[int, Any](enumerate(leaves)), dict[int, jax.Array]()
    values.update(enumerate(kept, len(leaves) + len(back)))
    for k, outputs in enumerate(update.groups):
        values[len(leaves) + k] = back[k]().total
        if k == len(back) - 1:
            values[len(leaves) + len(back) + len(kept)] = bytes_of(group, [one() for one in back])
        clock = perf_counter()
        out.update(zip(outputs, jax.block_until_ready(update.run(k, values))))
        spans.append(Span("update", f"update {k}", clock, perf_counter()))
    return [out[number] for number in range(len(out))]
