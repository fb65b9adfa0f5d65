"""A queue of messages that outlive their steps, on a communicator for them only."""

from collections.abc import Callable
from concurrent.futures import Executor, Future, wait

from fddp.comm.transport import Transport


class Lane:
    """Jobs that send a step's messages after its return.

    A job starts when the previous job is over, so that messages of several steps never meet: over
    Gloo XLA has one communicator for each order of the devices, in all steps. All ranks add jobs in
    the order of their steps.
    """

    def __init__(self) -> None:
        self._last: Future[None] | None = None
        self._carriers = dict[Transport, tuple[Transport, ...]]()

    def carriers(self, transport: Transport) -> tuple[Transport, ...]:
        """Clones a transport once for all steps: MPI has about 2,000 communicators, never freed."""
        if transport not in self._carriers:
            self._carriers[transport] = transport.with_more(2)
        return self._carriers[transport]

    def add(self, thread: Executor, job: Callable[..., None], *args: object) -> Future[None]:
        """Starts a job on a thread when the previous job has ended, even with an error."""
        previous = self._last

        def follow() -> None:
            if previous:
                wait([previous])
            job(*args)

        self._last = thread.submit(follow)
        return self._last

    def wait(self) -> None:
        """Waits until all jobs have ended."""
        if self._last:
            wait([self._last])
