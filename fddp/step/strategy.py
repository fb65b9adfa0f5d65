"""How replicas hold a state and compute a step of it.

`Strategy` itself is the plain strategy: every replica holds and updates the whole state. The rooms
`sharding` and `training` override its methods.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
from jaxtyping import PyTree

from fddp.buckets import (
    BucketPlan,
    Messages,
    pack_device_parts,
    unpack,
    unpack_device_parts,
    unpack_received,
)
from fddp.comm import Group, specs
from fddp.losses import Pending
from fddp.step.agreed import Agreed
from fddp.step.replica import Pack, Replica, Unpack
from fddp.step.schedules import Pieces, Runner, Schedule, Send
from fddp.step.state import TrainState
from fddp.step.step_optimizer import Optimizer

# (trained parameters, optimizer state, buffers), or their layouts: trees with None for leaves that
# every replica holds whole
Trees: TypeAlias = tuple[Any, Any, Any]


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """The plain strategy: every replica holds and updates the whole state."""

    name: str = ""
    """The user's option for it; "" for the plain strategy."""
    replicas: int | None = None
    """Number of replicas that share the rows; None: the group's size."""
    in_shards: bool = False
    """True if replicas hold part of the state in shards."""
    scatters_grads: bool = False
    """True if buckets are cut into one part per replica."""
    exact: bool = True
    """True if messages are summed whole over replicas, so that one may carry the scalars."""
    table_rows: bool = True
    """True if few rows of a gradient may be sent in place of all."""
    rounds: bool = True
    """True if a gradient may be summed in the rounds of the loop that makes it."""

    def check(self, replica: Replica, optimizer: Optimizer, params: PyTree) -> str:
        """Raises ValueError if an optimizer does not fit; returns a remark for the user, or ""."""
        del replica, optimizer, params
        return ""

    def check_batch(self, replica: Replica, batch: PyTree, rows: int) -> None:
        """Raises ValueError if a batch of new shapes, with `rows` per micro-batch, does not fit."""
        del replica, batch, rows

    def layouts(self, replica: Replica, whole: Trees) -> Trees:
        """Returns the layout of each leaf, from whole arrays or their shapes and dtypes."""
        del replica
        return jax.tree.map(lambda x: None, whole)

    def with_whole_params(
        self, group: Group, state: TrainState, replicated: TrainState
    ) -> TrainState:
        """Returns the replicated part of a state with whole parameters, for `no_sync`."""
        del group, state
        return replicated

    def gradient_replica(self, replica: Replica) -> Replica:
        """Returns the replica whose gradients a program computes, such as a virtual one."""
        return replica

    def pieces(self, replica: Replica, agreed: Agreed) -> Pieces:
        """Makes the pieces of a step; here one with whole states, which sums all gradients."""
        plan = agreed.plan
        packed, unpacked = packing(replica, plan, agreed.common.state.params)

        def run(
            state: TrainState, pending: Pending | None, shards: PyTree, rows: PyTree, send: Send
        ) -> tuple[Any, Any]:
            messages, saved = replica.local(packed, state, pending, rows)
            received, nbytes = send(messages)
            mean = replica.mean(plan, unpacked, state, received, saved, nbytes)
            return agreed.use(state, mean), shards

        return Pieces(run, replica.reductions(plan))

    def runner(self, schedule: Schedule, replica: Replica, agreed: Agreed) -> Runner:
        """Makes the runner of a step."""
        return schedule(replica.group, self.pieces(replica, agreed), replica.options.donate)


WHOLE_STATE = Strategy()
"""The plain strategy."""


def packing(replica: Replica, plan: BucketPlan, params: PyTree) -> tuple[Pack, Unpack]:
    """Returns the functions that pack whole gradients and the tail, and unpack their sums."""
    axes = replica.group.placement.other_axes
    layout = specs(replica.group.placement, params)

    # XLA packs nothing for a single replica if it sees where each leaf goes.
    comm = replica.group.communicator
    of_received = unpack_received if comm.size > 1 and not comm.in_lane else unpack

    def unpacked(messages: Messages) -> tuple[list[Any], Any]:
        return unpack_device_parts(axes, plan, messages, layout, of_received)

    return partial(pack_device_parts, axes, plan, where=layout), unpacked
