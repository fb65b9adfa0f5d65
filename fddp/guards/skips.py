"""Steps that were skipped, as their gradients were not finite: who made them so says it, and nobody waits for it."""

import sys
from collections import deque
from typing import Any

import numpy as np

from fddp.buckets import BucketPlan
from fddp.comm import Group
from fddp.step import StepInfo

MOST = 16  # steps under way; more the host does not run ahead


class Skips:
    """The steps of a training that were skipped."""

    def __init__(self) -> None:
        self.count = 0
        """The number of them, as far as is known."""
        self._going = deque[tuple[int, StepInfo]]()

    def note(self, group: Group, plan: BucketPlan, chosen: tuple[int, ...], number: int, info: StepInfo) -> None:
        """Notes a step, and tells of those that are over whether they were skipped.

        Args:
          group: the replicas.
          plan: the order of readiness.
          chosen: numbers of the trained leaves.
          number: of the step.
          info: what it told.
        """
        if info.skipped is None:
            return
        self._going.append((number, info))
        while self._going and (len(self._going) > MOST or self._going[0][1].skipped.is_ready()):  # type: ignore
            number, info = self._going.popleft()
            if any(_here(info.skipped)):
                self.count += 1
                # A loss scale is searched by skipped steps: these are counted, and not printed.
                if info.broken is not None:
                    self._tell(group, plan, chosen, number, info)

    def _tell(self, group: Group, plan: BucketPlan, chosen: tuple[int, ...], number: int, info: StepInfo) -> None:
        ready = list(dict.fromkeys(i for bucket in plan.buckets for i in bucket.leaves))  # a stack may be in several
        name = f"fddp: rank {group.rank} of {group.processes}: step {number} was skipped"
        each = _here(info.broken)
        devices = len(each) // (group.size // group.processes)  # of a replica
        for replica, broken in enumerate(each[::devices]):
            leaves = [i for i in ready if i in chosen and broken[chosen.index(i)]]
            if leaves:
                of = f"its gradient of {plan.leaves[leaves[0]].name} was the first that is not finite"
                several = f" on replica {replica}" if group.size > group.processes else ""
                more = f" ({len(leaves)} of {len(ready)} are not)" if len(leaves) > 1 else ""
                print(f"{name}: {of}{several}{more}.", file=sys.stderr, flush=True)
                return
        if group.rank == 0:
            print(f"{name}: the mean gradients are not finite; its own are.", file=sys.stderr, flush=True)


def _here(x: Any) -> list[np.ndarray]:
    """The values of each of this process's replicas."""
    return [np.asarray(shard.data) for shard in x.addressable_shards]
