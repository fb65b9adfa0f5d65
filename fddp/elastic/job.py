"""The job of this process: its membership, and the group of the current view."""

import atexit
import sys
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from fddp.comm import Group, Journal
from fddp.elastic.connections import end_with_job, is_founded, own_host, request_entry
from fddp.elastic.jax_world import JaxWorld, forget_devices, form_world, start_meeting
from fddp.elastic.membership import Membership
from fddp.elastic.signs import BETWEEN, Limits
from fddp.elastic.views import View
from fddp.runtime import Launch, place_of, renew
from fddp.runtime.watching import from_transport, write_stderr

SILENCE_S = 5.0
STALL_S = 30.0
LEAVE_S = 30.0
REASON_S = 10.0  # an error of a transport may be noticed before the end of the rank that causes it


class ElasticJob:
    """This process in a job whose ranks come and go."""

    def __init__(self, launch: Launch, timeout_s: float, stall_s: float | None) -> None:
        """Founds the job or joins it; returns once its group exists."""
        if not Path("/proc/self/fd").exists():
            raise RuntimeError("fddp.init(elastic=True) needs Linux: it closes files in /proc.")
        stall_s = stall_s or STALL_S
        limits = Limits(launch.size, min(SILENCE_S, stall_s), stall_s)
        self._timeout_s, self._stall_s = timeout_s, stall_s
        self._world: JaxWorld | None = None
        self._journal = Journal()
        self.view = View(0, ())
        founds = launch.rank == 0 and not is_founded(launch.coordinator)
        address = (own_host(launch.coordinator), 0)
        if founds and launch.coordinator:
            address = place_of(launch.coordinator)
        self.membership = Membership(launch.rank, address, limits, self._break_off)
        deadline = time.monotonic() + timeout_s
        try:
            if founds:
                end_with_job()
                self.membership.found(launch.size)
            while self._world is None:
                if not founds:
                    me = self.membership.me
                    request_entry(self.membership.connect, me, launch.coordinator, deadline)
                with suppress(ConnectionError):  # the rank that answered has ended
                    self.regroup()
        except TimeoutError as error:
            raise RuntimeError(
                f"fddp.init(elastic=True, timeout_s={timeout_s:g}) could not join the other "
                f"ranks: {error}."
            ) from error

    @property
    def group(self) -> Group:
        """The ranks that are present."""
        if self._world is None:
            raise RuntimeError("the ranks are changing, and have no group now.")
        return self._world.group

    def regroup(self) -> None:
        """Waits for a group of all that remain or join; arrays on devices become invalid."""
        # Ranks may be in an evaluation, except at the start.
        limit_s = BETWEEN * self._stall_s if self.view.epoch else self._timeout_s
        serve = partial(start_meeting, self.membership.host)
        while True:
            self.view = view = self.membership.next_view(serve, limit_s, self.view.epoch)
            # Connections stay until all remaining ranks have left the group: one may still be in a
            # collective of its script, between two steps.
            if self._world is not None:
                self._world = None
                forget_devices()
            if self.membership.regroups():  # a rank was lost since
                continue
            try:
                rank = view.members.index(self.membership.me)
                self._world = form_world(view, rank, self._journal)
            except Exception as error:
                if not (from_transport(error) and self.membership.regroups(REASON_S)):
                    raise
                forget_devices()
                continue
            renew(self.group)
            if rank == 0:
                orders = ", ".join(str(member.order) for member in view.members)
                write_stderr(f"ranks {orders} train together.")
            return

    def _break_off(self) -> None:
        if self._world is not None:
            self._world.break_off()

    def leave(self) -> None:
        """Waits for the other ranks' ends, unless this rank has failed: its end is a loss."""
        if not hasattr(sys, "last_value"):  # set by an uncaught error
            self.membership.leave(LEAVE_S)


# Empty or one job: a process is in one world at a time, as in `runtime/world.py`.
_jobs: list[ElasticJob] = []


def join_job(launch: Launch, timeout_s: float, stall_s: float | None, undo: ExitStack) -> Group:
    """Founds or joins the job of this process; `undo` leaves it."""
    job = ElasticJob(launch, timeout_s, stall_s)
    _jobs[:] = [job]
    undo.callback(job.leave)
    atexit.register(undo.close)
    return job.group


def current_job() -> ElasticJob:
    """The job that `join_job` has founded or joined."""
    if not _jobs:
        raise ValueError("start the job by fddp.init(elastic=True) first.")
    return _jobs[0]
