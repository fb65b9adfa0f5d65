"""Finds faults in the program that XLA made of a step, and says in words what to do about them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fddp.analysis.auditing.carried import merged
from fddp.buckets import MiB

if TYPE_CHECKING:
    from fddp.analysis.auditing.report import Audit


# What to do about a message in a loop that nothing hides: one of a step's messages, or one of the loss's own.
AWAITED = (
    "XLA awaits it where it starts. It does so if the GPU's memory is short: give each replica fewer rows. With a "
    "bucket_cap_mb that holds all rounds they travel at once, outside of the loop."
)
OF_THE_LOSS = (
    "move it out of the loop. (What accumulation_steps sends stands outside of loops.) On GPUs a sum that only leaves "
    "the loop, and that no later round reads, is hidden under the next round."
)


def problems(audit: "Audit") -> Iterator[str]:
    """Finds all that keeps a step's traffic from being hidden, or from being as planned; yields a sentence for each."""
    collectives = audit.collectives
    among = [k for k, within in enumerate(audit.within) if not within]
    if not among:
        yield "nothing is sent: this step has one replica, or its replicas train alone, so there is no traffic to hide."
        return
    for k in among:
        collective = collectives[k]
        if merged(collective):
            yield (
                f"merged: XLA made one {collective.kind} of {len(collective.arrays)}, "
                f"{collective.nbytes / MiB:.1f} MiB, which leaves when the last of them is ready; on GPUs the compiler "
                f"option xla_gpu_{collective.kind.replace('-', '_')}_combine_threshold_bytes=0 keeps them apart."
            )
        if collective.loops and not collective.heavy:
            yield (
                f"in a loop: {collective.op_name or collective.kind} ({audit.label(k)}) is sent in each of "
                f"{collective.rounds} rounds, and nothing heavy is computed beside it; "
                f"{AWAITED if audit.carries[k] else OF_THE_LOSS}"
            )
    found = [message for message in audit.carries if message is not None]
    missing = [message for message in audit.messages if message not in found]
    if missing and not any(merged(collectives[k]) for k in among):
        yield f"not as planned: no collective carries {_listed(missing)}."
    # Of a bucket whose rows travel nothing else is left to send, as a rule.
    left = {f"bucket {k}" for k, bucket in enumerate(audit.plan.buckets) if bucket.rows}
    # A message that a loop sends in its rounds has the loop's place; its last round XLA may send behind the loop.
    looped = {audit.carries[k] for k in audit.sent if collectives[k].loops}
    sent = [message for message in found if message in audit.messages and message not in left | looped]
    if sent != sorted(sent, key=audit.messages.index):
        yield f"out of order: messages start in the order {_listed(sent)}; early ones wait for late ones."
    chosen = sorted({audit.label(k) for k in audit.sent if collectives[k].branches} - left)
    if chosen:
        yield (
            f"in a branch: {_listed(chosen)}. Whether, or how, it is sent is decided at run time (a hook that begins "
            "later, skip_all_reduce_unused_params), XLA computes nothing beside a conditional, and the estimate leaves "
            "what it sends out."
        )
    alone = [k for k in audit.sent if not collectives[k].inside and audit.carries[k] not in looped]
    yield from _exposed(audit, alone, sum(collectives[k].rounds for k in audit.sent if collectives[k].loops))


def _exposed(audit: "Audit", sent: Sequence[int], rounds: int) -> Iterator[str]:
    """Finds traffic with nothing under it, beside what is sent in so many rounds; the last bucket never has any."""
    asynchronous = audit.where != "cpu"  # there no collective is, whatever it carries
    gathers = [k for k in sent if str(audit.carries[k]).startswith("gather") and asynchronous]
    bare = [k for k in gathers if not audit.collectives[k].heavy]
    sent = [k for k in sent if k not in gathers]
    if bare and bare == gathers and min(sent) < min(gathers):
        yield (
            f"at the end: {_listed(map(audit.label, gathers))}. New parameters are gathered when everything is "
            "computed; that is what shard='optimizer' takes for the memory that it gives."
        )
    elif len(bare) > max(1, len(gathers) // 2):
        yield _bare(audit, bare)
    # A tail that travels alone is tiny, and where it comes last there is nothing left to hide it under.
    held = [k for k in sent if not audit.collectives[k].asynchronous and audit.carries[k] != "tail"]
    # Where XLA hides traffic it makes synchronous only what has nothing beside it, and beside a loop with sums it has
    # little to choose from.
    hides = any(one.asynchronous for one in audit.collectives)
    alone = [k for k in sent if (rounds or hides or k not in held) and not audit.collectives[k].heavy]
    if held and audit.where == "cpu":
        yield (
            f"synchronous: {_named(audit, held)}. XLA:CPU overlaps nothing inside a program; one process a "
            "replica with schedule='staged' does, and target='h100:8' shows what GPUs would do."
        )
    elif not rounds and audit.looped > audit.flops / 2 and not any(audit.collectives[k].heavy for k in sent):
        # XLA makes synchronous what has nothing beside it.
        yield (
            f"ready at once: {audit.looped / audit.flops:.0%} of the operations are in loops, and a loop (lax.scan "
            "over layers?) delivers all its gradients when it ends, so nothing is left to hide traffic under. Those of "
            "layers are summed inside of the loop if they are more than bucket_cap_mb, and more than what is ready "
            "before it; where they cannot be (a hook), write the layers as a Python loop."
        )
    elif held and not rounds and not hides:
        yield (
            f"synchronous: {_named(audit, held)}. The program waits for all that it sends: nothing can be computed "
            "beside it (smaller buckets, or more rows for each replica, may help), or XLA does without its scheduler, "
            "for which fddp sets xla_gpu_enable_latency_hiding_scheduler."
        )
    elif len(sent) + rounds == 1 and alone:
        yield (
            "nothing to overlap with: one bucket holds everything and leaves when the backward pass is over; give a "
            "smaller bucket_cap_mb."
        )
    elif len(alone) > max(1, (len(sent) + rounds) // 2):
        yield _bare(audit, alone)


def _bare(audit: "Audit", alone: Sequence[int]) -> str:
    return (
        f"nothing to overlap with: nothing heavy is computed while {_named(audit, alone)} are on their way; give each "
        "replica more rows, or larger buckets."
    )


def _named(audit: "Audit", numbers: Sequence[int]) -> str:
    """Lists what collectives carry, with their kinds where a message takes several: scattered, then summed."""
    taken = Counter(audit.carries)
    kinds = (f" ({audit.collectives[k].kind})" if taken[audit.carries[k]] > 1 else "" for k in numbers)
    return _listed(dict.fromkeys(audit.label(k) + kind for k, kind in zip(numbers, kinds)))


def _listed(items: Iterable[Any]) -> str:
    return ", ".join(map(str, items))
