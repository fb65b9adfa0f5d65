"""Starts a watcher process for each rank, to detect a stuck, stopped, killed or early rank.

Watchers take no part in collectives. A rank records its activity; its watcher reads the records and
exchanges reports with the other watchers. A thread of the rank shows that its interpreter runs.
"""

import atexit
import gc
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from mmap import mmap
from opcode import opname
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from fddp.comm import Group, new_secret, on_one_host, own_addresses, signature
from fddp.runtime.watching.leaving import leave
from fddp.runtime.watching.recorder import Recorder
from fddp.runtime.watching.watcher.shared_memory import EXITED, FINISHED, PORT, SIZE

SIGN_S = 0.5  # between two signs of life
START_S = 10.0
GRACE_S = 1.5
LENGTH = 4  # bytes of the length of rank 0's broadcast
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
    """Starts this rank's watcher if the job has several ranks; returns the group with its journal.

    Every rank calls it, with the results of `shared_recorder`. The watcher holds `service_files`
    open for its whole life, and the socket to mpiexec (`pmi_fd`) longer than the rank.
    """
    journal = recorder.journal()
    group = replace(group, journal=replace(journal, stall_s=stall_s or journal.stall_s))
    if group.processes == 1 or os.name != "posix":
        return group
    rank = group.rank
    identity = {"rank": rank, "size": group.processes, "parent": os.getpid(), "bind": ""}
    if on_one_host(group):
        identity["bind"] = "127.0.0.1"
    job = identity | {"memory": file, "stall_s": stall_s, "grace_s": GRACE_S, "pmi_fd": pmi_fd}
    if rank == 0:
        token = new_secret()
        flight = os.environ.get(
            "FDDP_FLIGHT_DIR", str(Path(tempfile.gettempdir()) / f"fddp-{token[:8]}")
        )
        shared = {"token": token, "flight": flight, "began": time.time()}
        _start(_keyed(job | shared), service_files)
        port = _port(recorder)
        hosts = [job["bind"]]
        if not job["bind"]:
            hosts = own_addresses()
        shared = json.dumps(shared | {"addresses": [(host, port) for host in hosts]}).encode()
        group.hosts.broadcast(np.frombuffer(len(shared).to_bytes(LENGTH), np.uint8), 0)
        group.hosts.broadcast(np.frombuffer(shared, np.uint8), 0)
    else:
        length = int.from_bytes(group.hosts.broadcast(np.zeros(LENGTH, np.uint8), 0).tobytes())
        shared = group.hosts.broadcast(np.zeros(length, np.uint8), 0).tobytes()
        _start(_keyed(job | json.loads(shared)), service_files)
    _finish_at_exit(recorder)
    threading.Thread(target=_live, args=(recorder,), name="fddp-life", daemon=True).start()
    return group


def _finish_at_exit(recorder: Recorder) -> None:
    """Records the end of the script: at its last line, or before it by `sys.exit`.

    Exit handlers see no exception, but the outermost frame has not returned then.
    """
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


def _keyed(job: dict) -> dict:
    """Derives the watchers' token from the broadcast token and the job's secret."""
    return job | {"token": signature("watchers", job["token"])}


def _start(job: dict, service_files: Sequence[int]) -> None:
    # A new session: a signal to the rank's process group must not end the watcher.
    files = [job["memory"], *service_files]
    if job["pmi_fd"] is not None:
        files.append(job["pmi_fd"])
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", WATCHER, str(Path(__file__).parent)],
        pass_fds=files,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    # Not as an argument: every user of this host could read the job's token.
    stdin: Any = process.stdin
    stdin.write(json.dumps(job).encode())
    stdin.close()
    process.returncode = 0  # never waited for: it outlives this process


def _port(recorder: Recorder) -> int:
    """The port of the watcher of rank 0; 0 if it did not start."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if port := PORT.read(recorder.memory)["port"]:
            return port
        time.sleep(0.01)
    return 0
