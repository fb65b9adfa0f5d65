"""Starts a watcher process for each rank, to detect a stuck, stopped, killed or early rank.

Watchers take no part in collectives. A rank records its activity; its watcher reads the records and
exchanges reports with the other watchers. A thread of the rank shows that its interpreter runs.
"""

import atexit
import gc
import json
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from mmap import mmap
from opcode import opname
from pathlib import Path
from queue import Empty
from types import FrameType
from typing import Any

from fddp.comm import Group, call, calls_at, host_keys, new_secret, own_addresses
from fddp.runtime.watching.abort import leave
from fddp.runtime.watching.recorder import Recorder
from fddp.runtime.watching.watcher.links import allow_files, write_stderr
from fddp.runtime.watching.watcher.shared_memory import EXITED, FINISHED, SIZE

SIGN_S = 0.5  # between two signs of life
START_S = 10.0
GRACE_S = 1.5
CONNECT_S = 2.0  # to one of rank 0's addresses
TOPIC = "watchers"
# Path prefixes of files outside the user's code: fddp, Python and installed packages.
NOT_THEIRS = (
    str(Path(__file__).parents[1]),
    "<",
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)
# The package `watcher` is independent: an import as a part of fddp would load JAX.
WATCHER = """
import json, sys
sys.path.insert(0, sys.argv[1])
from watcher.main import main
main(json.load(sys.stdin))
"""


def shared_recorder(processes: int) -> tuple[Recorder, int]:
    """Returns a recorder in shared memory, and the file of this memory."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("fddp")
    else:
        with tempfile.TemporaryFile() as unnamed:
            file = os.dup(unnamed.fileno())
    os.ftruncate(file, SIZE)
    return Recorder(mmap(file, SIZE), processes), file


def watched(
    group: Group,
    recorder: Recorder,
    file: int,
    stall_s: float | None,
    service_files: Sequence[int] = (),
    pmi_fd: int | None = None,
) -> Group:
    """Starts the watcher of a rank of several; returns the group with its journal."""
    # The watcher holds `service_files` open for its whole life, `pmi_fd` longer than the rank.
    group = replace(group, journal=recorder)
    if group.processes == 1 or os.name != "posix":
        return group
    shared, links = _links(group)
    job = {"rank": group.rank, "size": group.processes, "parent": os.getpid(), "memory": file}
    job |= {"stall_s": stall_s, "grace_s": GRACE_S, "pmi_fd": pmi_fd, **shared}
    numbers = [link.fileno() for link in links]
    files = [file, *numbers, *service_files]
    if pmi_fd is not None:
        files.append(pmi_fd)
    # A new session: a signal to the rank's process group must not end the watcher.
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", WATCHER, str(Path(__file__).parent)],
        pass_fds=files,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    stdin: Any = process.stdin
    with stdin:
        json.dump(job | {"links": numbers}, stdin)
    for link in links:
        link.close()
    process.returncode = 0  # never waited for: it outlives this process
    _finish_at_exit(recorder)
    threading.Thread(target=_live, args=(recorder,), name="fddp-life", daemon=True).start()
    return group


def _finish_at_exit(recorder: Recorder) -> None:
    """Records the end of the script: at its last line, or before it by `sys.exit`."""
    # Exit handlers see no exception, but the outermost frame has not returned then.
    script = _frames()[-1]
    ways = [EXITED + " SystemExit"]
    leave_python = sys.exit

    def exit_with(code: Any = None, /) -> None:
        ways.append(FINISHED if code in (None, 0) else f"{EXITED} sys.exit({code!r})")
        leave_python(code)

    def finish() -> None:
        last = opname[script.f_code.co_code[script.f_lasti]]
        recorder.say(FINISHED if last.startswith("RETURN") else ways[-1])

    sys.exit = exit_with
    atexit.register(finish)


def _live(recorder: Recorder) -> None:
    """Records signs of life and the place in the script until the watcher ends the process."""
    while not recorder.live().end:
        time.sleep(SIGN_S)
        recorder.at(_place())
    leave()


def _place() -> str:
    """The main thread's innermost line of user code; empty without one."""
    for frame in _frames():
        code = frame.f_code
        if not code.co_filename.startswith(NOT_THEIRS):
            return f"{code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})"
    return ""


def _frames() -> list[FrameType]:
    """The frames of the main thread, innermost first."""
    # Python 3.11 may collect garbage while it creates a frame object of another thread. A callback
    # of the collector lets that thread continue, and the result is no longer a frame.
    gc_enabled = gc.isenabled()
    gc.disable()
    try:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        frames = list[FrameType]()
        while frame:
            frames.append(frame)
            frame = frame.f_back
        return frames
    finally:
        if gc_enabled:
            gc.enable()


def _links(group: Group) -> tuple[dict[str, Any], list[socket.socket]]:
    """Connects all ranks to rank 0, for their watchers; returns also what all watchers know."""
    on_one_host = len(set(host_keys(group))) == 1
    host = "127.0.0.1" if on_one_host else ""
    if group.rank:
        shared = group.broadcast_object(None)
        for address in shared["addresses"]:
            with suppress(OSError):
                return shared, [call(tuple(address), TOPIC, str(group.rank), CONNECT_S)[1]]
        write_stderr(f"rank {group.rank} reaches no watcher at {shared['addresses']}.")
        return shared, []
    allow_files(group.processes)
    door = socket.create_server((host, 0), backlog=group.processes)
    port = door.getsockname()[1]
    with calls_at(door, TOPIC, "0") as called:
        folder = str(Path(tempfile.gettempdir()) / f"fddp-{new_secret()[:8]}")
        shared = {
            "addresses": [(x, port) for x in ([host] if host else own_addresses())],
            "flight": os.environ.get("FDDP_FLIGHT_DIR", folder),
            "began": time.time(),
        }
        group.broadcast_object(shared)
        links = list[socket.socket]()
        with suppress(Empty):  # a rank that reaches no address says so
            while len(links) < group.processes - 1:
                links.append(called.get(timeout=START_S)[1])
    return shared, links
