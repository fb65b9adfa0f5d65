"""Computes the stage times of a bucket plan from those of the finest plan, one bucket per leaf."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from fddp.buckets import BucketPlan, Caps
from fddp.comm import Group
from fddp.measuring import MeasuredStep

Cap = TypeVar("Cap", bound=Caps)


class Typical(NamedTuple):
    """The times of a typical step on the slowest rank, in seconds."""

    stages: tuple[float, ...]
    nbytes: tuple[int, ...]
    updates: tuple[float, ...]
    idle: float
    seconds: float


def typical(group: Group, steps: Sequence[MeasuredStep]) -> Typical:
    """Returns medians over steps, maximized over ranks."""
    rows = list[list[float]]()
    for step in steps:
        spans = (*step.timeline.compute, *step.timeline.updates)
        rows.append([*(span.seconds for span in spans), step.idle, step.seconds])
    *works, idle, seconds = group.all_reduce(np.median(np.array(rows), axis=0), op="max").tolist()
    stages = len(steps[0].timeline.compute)
    nbytes = tuple(span.nbytes for span in steps[0].timeline.communication if span.nbytes)
    return Typical(tuple(works[:stages]), nbytes, tuple(works[stages:]), idle, seconds)


def message_bytes(plan: BucketPlan, tail: int, replicas: int) -> tuple[int, ...]:
    """Returns the bytes of each all-reduce; the message with the scalars has `tail` bytes more.

    A bucket whose table rows are gathered counts as the all-reduce of equal duration: as a rule a
    step sends only its rows.
    """
    sizes = list[int]()
    for message in plan.messages:
        if message.rows:
            continue
        sizes.append(tail * message.scalars)
        if message.bucket is None:
            continue
        bucket = plan.buckets[message.bucket]
        if bucket.rows:
            sizes[-1] += bucket.nbytes * replicas // 2
        else:
            sizes[-1] += bucket.nbytes
    return tuple(sizes)


def stage_seconds(
    fine: Sequence[float], order: Sequence[int], plan: BucketPlan, total: float
) -> tuple[float, ...]:
    """Returns the seconds of each stage (or update) of a plan; a bucket waits for its last leaf.

    `fine` holds the seconds of the finest plan's stages, one for each leaf of `order` (in order of
    readiness), plus one before or after them if its scalars are a message of their own. `total` is
    the sum over the plan's stages: each dispatch costs time, so fewer stages take less in total.
    """
    ends = np.cumsum(fine).tolist()
    lead = list[float]()
    if plan.messages[0].bucket is None:
        # A separate message of scalars is ready at once if they shared a bucket in the finest plan.
        lead = [0.0]
        if len(fine) > len(order):
            lead = [ends.pop(0)]
    done = dict(zip(order, ends))
    ready = np.maximum.accumulate([max(done[i] for i in bucket.leaves) for bucket in plan.buckets])
    ends = [*lead, *ready.tolist(), *ends[len(order) :]]
    return tuple((np.diff([0.0, *ends]) * total / ends[-1]).tolist())


def total_seconds(fine: Typical, coarse: Typical, stages: int) -> float:
    """Interpolates the total seconds of a number of stages linearly between two measured plans."""
    more = len(fine.stages) - len(coarse.stages)
    total = sum(coarse.stages)
    if not more:
        return total
    per_stage = (sum(fine.stages) - total) / more
    return total + per_stage * (stages - len(coarse.stages))


def different(plans: Mapping[Cap, BucketPlan]) -> dict[Cap, BucketPlan]:
    """Returns the plans without duplicates, each under the first of its caps."""
    different_plans = dict[str, tuple[Cap, BucketPlan]]()
    for cap, plan in plans.items():
        different_plans.setdefault(plan.digest, (cap, plan))
    return dict(different_plans.values())
