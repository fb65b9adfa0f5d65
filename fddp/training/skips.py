"""Counts steps skipped for non-finite gradients, and prints the first such gradient."""

import sys
from collections import deque
from typing import Any

import numpy as np

from fddp.buckets import BucketPlan
from fddp.comm import Group
from fddp.step import StepInfo

MOST = 16  # steps in flight: the host runs no further ahead


class Skips:
    """The skipped steps of a training."""

    def __init__(self) -> None:
        self.count = 0
        """Number of skipped steps among those read so far."""
        self._going = deque[tuple[int, StepInfo]]()

    def note(
        self, group: Group, plan: BucketPlan, chosen: tuple[int, ...], number: int, info: StepInfo
    ) -> None:
        """Adds step `number`, then counts and prints the skipped steps that have ended."""
        if info.skipped is None:
            return
        self._going.append((number, info))
        while self._going and (
            len(self._going) > MOST or self._going[0][1].skipped.is_ready()  # type: ignore
        ):
            number, info = self._going.popleft()
            if any(_here(info.skipped)):
                self.count += 1
                # A loss scale is found by skipped steps: they are counted, but not printed.
                if info.broken is not None:
                    self._report(group, plan, chosen, number, info)

    def _report(
        self, group: Group, plan: BucketPlan, chosen: tuple[int, ...], number: int, info: StepInfo
    ) -> None:
        # A stack may be in several buckets.
        ready = list(dict.fromkeys(i for bucket in plan.buckets for i in bucket.leaves))
        skip = f"fddp: rank {group.rank} of {group.processes}: step {number} was skipped"
        flags = _here(info.broken)
        devices = len(flags) // (group.size // group.processes)  # of a replica
        for replica, broken in enumerate(flags[::devices]):
            leaves = [i for i in ready if i in chosen and broken[chosen.index(i)]]
            if leaves:
                name = plan.leaves[leaves[0]].name or "the parameter"
                reason = f"its gradient of {name} was the first that is not finite"
                if group.size > group.processes:
                    reason += f" on replica {replica}"
                if len(leaves) > 1:
                    reason += f" ({len(leaves)} of {len(ready)} are not)"
                print(f"{skip}: {reason}.", file=sys.stderr, flush=True)
                return
        if group.rank == 0:
            reason = "the mean gradients are not finite; its own are"
            print(f"{skip}: {reason}.", file=sys.stderr, flush=True)


def _here(x: Any) -> list[np.ndarray]:
    """Returns the values of each of this process's devices."""
    return [np.asarray(shard.data) for shard in x.addressable_shards]
