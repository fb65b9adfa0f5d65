"""A lane: messages that steps leave under way on a communicator of its own, one job after the other."""

from collections.abc import Callable
from concurrent.futures import Executor, Future, wait

from fddp.comm.transport import Transport

Clone = Callable[[int], tuple[Transport, ...]]


class Lane:
    """Jobs that send messages after the step that added them has returned.

    A job begins when the one before it is over, so that messages of several steps never meet: over Gloo XLA keeps one
    communicator for each order of the devices, whichever step asks for it. All ranks add jobs in the same order, that
    of their steps.
    """

    def __init__(self) -> None:
        self._last: Future[None] | None = None
        self._carriers = dict[tuple[Transport, Clone], tuple[Transport, ...]]()

    def carriers(self, transport: Transport, clone: Clone) -> tuple[Transport, ...]:
        """Clones a transport once for all steps: MPI has about 2,000 communicators, and none is freed."""
        if (transport, clone) not in self._carriers:
            self._carriers[transport, clone] = clone(2)
        return self._carriers[transport, clone]

    def add(self, thread: Executor, job: Callable[..., None], *args: object) -> Future[None]:
        """Begins a job on a thread when the previous job is over, even if that failed; the future is done with it."""
        before = self._last

        def follow() -> None:
            if before:
                wait([before])
            job(*args)

        self._last = thread.submit(follow)
        return self._last

    def wait(self) -> None:
        """Waits until nothing is under way."""
        if self._last:
            wait([self._last])
