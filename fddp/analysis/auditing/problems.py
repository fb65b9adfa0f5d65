"""Finds faults in a step's compiled program, and describes each with advice."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from fddp.analysis.auditing.carried import merged
from fddp.buckets import MiB

if TYPE_CHECKING:
    from fddp.analysis.auditing.report import Audit


# Advice for an exposed message in a loop: one of the step's messages, or one of the loss's own.
AWAITED = (
    "XLA waits for it at its start, as it does if the GPU's memory is short: give each replica "
    "fewer rows. With a bucket_cap_mb larger than all rounds they travel at once, outside of the "
    "loop."
)
OF_THE_LOSS = (
    "move it out of the loop. (accumulation_steps sends outside of loops.) On GPUs a sum that no "
    "later round reads is hidden under the next round."
)


def problems(audit: "Audit") -> Iterator[str]:
    """Yields a sentence for each exposed message, and for each deviation from the plan."""
    collectives = audit.collectives
    traffic = [k for k, within in enumerate(audit.within) if not within]
    if not traffic:
        yield (
            "nothing is sent: this step has one replica, or its replicas train alone, so there is "
            "no traffic to hide."
        )
        return
    for k in traffic:
        collective = collectives[k]
        if merged(collective):
            yield (
                f"merged: XLA made one {collective.kind} of {len(collective.arrays)}, "
                f"{collective.nbytes / MiB:.1f} MiB, which is sent when the last of them is ready; "
                "on GPUs the compiler option "
                f"xla_gpu_{collective.kind.replace('-', '_')}_combine_threshold_bytes=0 keeps them "
                "apart."
            )
        if collective.loops and not collective.heavy:
            advice = OF_THE_LOSS
            if audit.carries[k]:
                advice = AWAITED
            yield (
                f"in a loop: {collective.op_name or collective.kind} ({audit.label(k)}) is sent in "
                f"each of {collective.rounds} rounds, and no heavy operation overlaps with it; "
                f"{advice}"
            )
    carried = [message for message in audit.carries if message is not None]
    missing = [message for message in audit.messages if message not in carried]
    if missing and not any(merged(collectives[k]) for k in traffic):
        yield f"not as planned: no collective carries {_listed(missing)}."
    # As a rule only the table rows of such a bucket travel.
    row_buckets = {f"bucket {k}" for k, bucket in enumerate(audit.plan.buckets) if bucket.rows}
    # The messages of a loop start at its place, but XLA may send the last round after the loop.
    looped = {audit.carries[k] for k in audit.sent if collectives[k].loops}
    fixed = set(audit.messages) - row_buckets - looped
    ordered = [message for message in carried if message in fixed]
    if ordered != sorted(ordered, key=audit.messages.index):
        yield (
            f"out of order: messages start in the order {_listed(ordered)}; early ones wait for "
            "late ones."
        )
    branched = sorted({audit.label(k) for k in audit.sent if collectives[k].branches} - row_buckets)
    if branched:
        yield (
            f"in a branch: {_listed(branched)}. It is sent conditionally, at run time (a hook "
            "that begins later). XLA overlaps nothing with a "
            "conditional, and the estimate excludes its traffic."
        )
    outside = list[int]()
    rounds = 0
    for k in audit.sent:
        if collectives[k].loops:
            rounds += collectives[k].rounds
        elif not collectives[k].inside and audit.carries[k] not in looped:
            outside.append(k)
    yield from _exposed(audit, outside, rounds)


def _exposed(audit: "Audit", numbers: Sequence[int], rounds: int) -> Iterator[str]:
    """Yields sentences on exposed messages outside loops; `rounds` counts the messages in loops."""
    asynchronous = audit.where != "cpu"  # XLA:CPU has no asynchronous collectives
    gathers = [k for k in numbers if str(audit.carries[k]).startswith("gather") and asynchronous]
    bare = [k for k in gathers if not audit.collectives[k].heavy]
    numbers = [k for k in numbers if k not in gathers]
    if bare and bare == gathers and min(numbers) < min(gathers):
        yield (
            f"at the end: {_listed(map(audit.label, gathers))}. New parameters are gathered after "
            "all computation: the price of the memory that shard='optimizer' saves."
        )
    elif len(bare) > max(1, len(gathers) // 2):
        yield _bare(audit, bare)
    # A separate tail is tiny, and as the last message it has no computation left to hide under.
    blocking = [k for k in numbers if not audit.collectives[k].asynchronous]
    synchronous = [k for k in blocking if audit.carries[k] != "tail"]
    # If XLA hides any traffic, it makes only messages without concurrent computation synchronous.
    # Next to a loop with sums it has little choice.
    hides = any(collective.asynchronous for collective in audit.collectives)
    unhidden = [k for k in numbers if not audit.collectives[k].heavy]
    nothing_heavy = unhidden == numbers
    if not (rounds or hides):
        unhidden = [k for k in unhidden if k not in synchronous]
    if synchronous and audit.where == "cpu":
        yield (
            f"synchronous: {_named(audit, synchronous)}. XLA:CPU overlaps nothing inside a "
            "program; one process a replica with schedule='staged' does, and target='h100:8' shows "
            "what GPUs would do."
        )
    elif not rounds and audit.looped > audit.flops / 2 and nothing_heavy:
        # XLA makes messages without concurrent computation synchronous.
        yield (
            f"ready at once: {audit.looped / audit.flops:.0%} of the operations are in loops, and "
            "a loop (lax.scan over layers?) delivers all its gradients when it ends, so no "
            "computation is left to hide traffic. Gradients of layers are summed inside the loop "
            "if they exceed bucket_cap_mb and the gradients that are ready before it; if a hook "
            "prevents that, write the layers as a Python loop."
        )
    elif synchronous and not rounds and not hides:
        yield (
            f"synchronous: {_named(audit, synchronous)}. The program waits for all messages: no "
            "computation can overlap with them (smaller buckets, or more rows per replica, may "
            "help), or XLA ran without its scheduler, which fddp enables by "
            "xla_gpu_enable_latency_hiding_scheduler."
        )
    elif len(numbers) + rounds == 1 and unhidden:
        yield (
            "nothing to overlap with: one bucket holds everything and is sent after the backward "
            "pass; give a smaller bucket_cap_mb."
        )
    elif len(unhidden) > max(1, (len(numbers) + rounds) // 2):
        yield _bare(audit, unhidden)


def _bare(audit: "Audit", numbers: Sequence[int]) -> str:
    return (
        "nothing to overlap with: nothing heavy is computed while "
        f"{_named(audit, numbers)} are in flight; give each replica more rows, or larger "
        "buckets."
    )


def _named(audit: "Audit", numbers: Sequence[int]) -> str:
    """Lists the labels of collectives, with the kind if several carry the same message."""
    counts = Counter(audit.carries)
    labels = list[str]()
    for k in numbers:
        label = audit.label(k)
        if counts[audit.carries[k]] > 1:
            label += f" ({audit.collectives[k].kind})"
        labels.append(label)
    return _listed(dict.fromkeys(labels))


def _listed(names: Iterable[object]) -> str:
    return ", ".join(map(str, names))
