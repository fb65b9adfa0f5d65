"""A bucket plan as text."""

from typing import TYPE_CHECKING

from fddp.buckets.sent_leaves import MiB
from fddp.wording import table

if TYPE_CHECKING:  # a plan prints itself by this module
    from fddp.buckets.plan import Bucket, BucketPlan


def text_of(plan: "BucketPlan") -> str:
    """Formats a plan as a table, with its summary, its scalars and its digest below."""
    rows = [("bucket", "leaves", "MiB", "dtype", "names, in the order they become ready")]
    for k, bucket in enumerate(plan.buckets):
        size = f"{bucket.nbytes / MiB:.3f}"
        names = _abridged(bucket.names) + _how_sent(bucket)
        rows.append((str(k), str(len(bucket.leaves)), size, str(bucket.dtype), names))
    lines = [*table(rows), summary_of(plan)]
    if plan.parts > 1:
        padding = _counted(plan.padding, "byte")
        lines.append(
            f"each is scattered to {plan.parts} replicas and gathered, with {padding} of padding"
        )
    if plan.collectives:
        lines.append(f"the loss has collectives of its own: {', '.join(plan.collectives)}")
    scalars = f"ride in {plan.carrier.name}"
    if plan.carrier.bucket is None:
        scalars = "travel in a separate all-reduce"
    lines.append(f"loss and metrics {scalars}; digest {plan.digest}")
    return "\n".join(lines)


def summary_of(plan: "BucketPlan") -> str:
    """Formats the numbers of leaves and buckets, and the size of all messages."""
    count = len({i for b in plan.buckets for i in b.leaves})
    total = sum(b.nbytes for b in plan.buckets) / MiB
    return (
        f"{count} of {len(plan.leaves)} leaves "
        f"in {_counted(len(plan.buckets), 'bucket')}, {total:.3f} MiB"
    )


def _abridged(names: tuple[str, ...], width: int = 64) -> str:
    """Joins the names, or the first and the last if they do not fit in a line."""
    text = ", ".join(names)
    return text if len(text) <= width else f"{names[0]}, …, {names[-1]}"


def _how_sent(bucket: "Bucket") -> str:
    if bucket.rows:
        return f" ({bucket.rows.most} of {bucket.rows.of} rows, with their numbers)"
    return rounds_text(bucket)


def rounds_text(bucket: "Bucket") -> str:
    return f" (in {bucket.rounds} rounds)" if bucket.rounds > 1 else ""


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
