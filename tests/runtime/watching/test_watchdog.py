"""A rank's own thread records the rank's state for its watcher."""

import gc
import sys
import threading
from types import SimpleNamespace

import pytest

from fddp.runtime.watching import watchdog


class Frame:
    """A frame of fddp's own, so that the watchdog reads the one before; notes if garbage may be
    collected."""

    f_code = SimpleNamespace(co_filename=watchdog.NOT_THEIRS[0])

    def __init__(self, collecting: list[bool]):
        self.collecting = collecting

    @property
    def f_back(self) -> None:
        self.collecting.append(gc.isenabled())


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_the_frames_of_the_main_thread_are_read(
    monkeypatch, collects
):
    """CPython 3.11 lets that thread run on within such a collection, and its frames go away under
    the reader."""
    collecting: list[bool] = []
    monkeypatch.setattr(
        sys, "_current_frames", lambda: {threading.main_thread().ident: Frame(collecting)}
    )
    if not collects:
        gc.disable()
    try:
        assert (watchdog._place(), collecting, gc.isenabled()) == ("", [False], collects)
    finally:
        gc.enable()
