"""Computes the times of a grouping of the gradients from the stages of the finest one."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fddp.buckets import Bucket, BucketPlan
from fddp.comm import Group
from fddp.measuring import MeasuredStep


class Typical(NamedTuple):
    """A step as it mostly goes, on the slowest rank."""

    stages: tuple[float, ...]
    nbytes: tuple[int, ...]
    updates: tuple[float, ...]
    idle: float
    seconds: float


def typical(group: Group, steps: Sequence[MeasuredStep]) -> Typical:
    """Takes medians over steps, and maxima over ranks."""
    rows = [
        (*(span.seconds for span in (*step.timeline.compute, *step.timeline.updates)), step.idle, step.seconds)
        for step in steps
    ]
    *works, idle, seconds = group.all_reduce(np.median(np.array(rows), axis=0), op="max").tolist()
    stages = len(steps[0].timeline.compute)
    nbytes = tuple(span.nbytes for span in steps[0].timeline.communication if span.nbytes)
    return Typical(tuple(works[:stages]), nbytes, tuple(works[stages:]), idle, seconds)


def message_bytes(plan: BucketPlan, tail: int, replicas: int) -> tuple[int, ...]:
    """Bytes of each bucket's all-reduce, with the tail behind the one that carries it, or alone.

    A bucket that travels in rows counts as the all-reduce that takes as long: as a rule nothing else of it is sent.
    """

    def of(bucket: Bucket) -> int:
        return bucket.nbytes * replicas // 2 if bucket.rows else bucket.nbytes

    sizes = [(0 if one.bucket is None else of(plan.buckets[one.bucket])) + tail * one.scalars for one in plan.messages]
    return tuple(size for size, one in zip(sizes, plan.messages) if not one.rows)


def joined(fine: Sequence[float], order: Sequence[int], plan: BucketPlan, total: float) -> tuple[float, ...]:
    """Joins the stages (or updates) of the finest cut to those of a plan: a bucket waits for the last of its leaves.

    Args:
      fine: seconds of the stages of the finest cut, one for each leaf that travels, in order of readiness; and one
        before or behind them if a tail travels alone.
      order: those leaves.
      plan: buckets of the same leaves.
      total: seconds that all stages of this plan take together; each dispatch costs, so fewer stages take less.

    Returns:
      Seconds of each stage of the plan.
    """
    ends = np.cumsum(fine).tolist()
    if plan.messages[0].bucket is None:
        # A tail that rode behind a bucket of the finest cut, and is alone here, is ready at once.
        lead, ends = (ends[:1], ends[1:]) if len(fine) > len(order) else ([0.0], ends)
    else:
        lead = []
    done = dict(zip(order, ends))
    ready = np.maximum.accumulate([max(done[i] for i in bucket.leaves) for bucket in plan.buckets])
    ends = [*lead, *ready.tolist(), *ends[len(order) :]]
    return tuple((np.diff([0.0, *ends]) * total / ends[-1]).tolist())


def total_seconds(fine: Typical, coarse: Typical, stages: int) -> float:
    """Seconds of all stages of a cut into so many, on the straight line through two cuts that were measured."""
    more = len(fine.stages) - len(coarse.stages)
    each = (sum(fine.stages) - sum(coarse.stages)) / more if more else 0.0
    return sum(coarse.stages) + each * (stages - len(coarse.stages))


def different(plans: Mapping[float, BucketPlan]) -> dict[float, BucketPlan]:
    """Keeps the smallest of the caps that give the same plan, with that plan; in order."""
    smallest = {plan.digest: cap for cap, plan in sorted(plans.items(), key=lambda one: -one[0])}
    return {cap: plans[cap] for cap in sorted(smallest.values())}
