"""A process beside each rank sees what a rank cannot say itself: that it is stuck, stopped, killed, or done too early.

Nothing here takes part in a collective. A rank writes down what it begins. Its watcher reads that and talks to the
other watchers. A thread of the rank shows that its interpreter runs.
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
from pathlib import Path
from typing import Any

import numpy as np

from fddp.comm import Group, leave, new_secret, on_one_host, own_addresses, signature
from fddp.watching.recorder import Recorder
from fddp.watching.watcher.shared_memory import FINISHED, PORT, SIZE

SIGN_S = 0.5  # between two signs of life
START_S = 10.0
GRACE_S = 1.5
LENGTH = 4  # bytes of the length of what rank 0 tells the others
# Beginnings of files that are not the user's: those of fddp, of Python and of installed packages.
NOT_THEIRS = (str(Path(__file__).parents[1]), "<", *(sysconfig.get_path(of) for of in ("stdlib", "purelib", "platlib")))
# The package `watcher` stands alone: to import it as a part of fddp would load JAX.
WATCHER = """
import json, sys
sys.path.insert(0, sys.argv[1])
from watcher.main import main
main(json.load(sys.stdin))
"""


def shared_recorder(processes: int) -> tuple[Recorder, int]:
    """Makes a recorder in memory that another process can read; also returns the file of that memory."""
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
    kept: Sequence[int] = (),
    pmi_fd: int | None = None,
) -> Group:
    """Starts this rank's watcher, if there are others; every rank of the job calls it.

    Args:
      group: all processes.
      recorder: from `shared_recorder`.
      file: its memory.
      stall_s: how long nothing may move while a rank waits in a step; None: 30 s, or ten steps.
      kept: files that the watcher is to hold open as long as it lives.
      pmi_fd: the socket by which mpiexec hears of this process; the watcher holds it too, and is the last to do so.

    Returns:
      The group, with the recorder's journal.
    """
    journal = recorder.journal()
    group = replace(group, journal=replace(journal, stall_s=stall_s or journal.stall_s))
    if group.processes == 1 or os.name != "posix":
        return group
    rank = group.rank
    alone = on_one_host(group)
    own = {"rank": rank, "size": group.processes, "parent": os.getpid(), "bind": "127.0.0.1" if alone else ""}
    job = own | {"memory": file, "stall_s": stall_s, "grace_s": GRACE_S, "pmi_fd": pmi_fd}
    if rank == 0:
        token = new_secret()
        flight = os.environ.get("FDDP_FLIGHT_DIR", str(Path(tempfile.gettempdir()) / f"fddp-{token[:8]}"))
        told = {"token": token, "flight": flight, "began": time.time()}
        _start(_keyed(job | told), kept)
        port = _port(recorder)
        hosts = ["127.0.0.1"] if alone else own_addresses()
        told = json.dumps(told | {"addresses": [(host, port) for host in hosts]}).encode()
        group.hosts.broadcast(np.frombuffer(len(told).to_bytes(LENGTH), np.uint8), 0)
        group.hosts.broadcast(np.frombuffer(told, np.uint8), 0)
    else:
        length = int.from_bytes(group.hosts.broadcast(np.zeros(LENGTH, np.uint8), 0).tobytes())
        told = group.hosts.broadcast(np.zeros(length, np.uint8), 0).tobytes()
        _start(_keyed(job | json.loads(told)), kept)
    atexit.register(recorder.say, FINISHED)
    threading.Thread(target=_live, args=(recorder,), name="fddp-life", daemon=True).start()
    return group


def _live(recorder: Recorder) -> None:
    """Shows that this interpreter runs, and where; ends the process when its watcher says so."""
    while not recorder.live().end:
        time.sleep(SIGN_S)
        recorder.at(_place())
    leave()


def _place() -> str:
    """The line of the user's code that the main thread is in, or has called from; empty where there is none."""
    # Python 3.11 may collect garbage while it makes a frame of another thread; a callback of the collector lets that
    # thread run on, and what comes back is no frame any more.
    collects = gc.isenabled()
    gc.disable()
    try:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame and frame.f_code.co_filename.startswith(NOT_THEIRS):
            frame = frame.f_back
        return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})" if frame else ""
    finally:
        if collects:
            gc.enable()


def _keyed(job: dict) -> dict:
    """The job with the token that watchers know: what the ranks sent each other is not enough to make it."""
    return job | {"token": signature("watchers", job["token"])}


def _start(job: dict, kept: Sequence[int]) -> None:
    # A session of its own: whatever ends the rank's group of processes must not silence the watcher.
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", WATCHER, str(Path(__file__).parent)],
        pass_fds=[file for file in (job["memory"], job["pmi_fd"], *kept) if file is not None],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    # Not as an argument, which every user of this host could read: the job's token is part of it.
    door: Any = process.stdin
    door.write(json.dumps(job).encode())
    door.close()
    process.returncode = 0  # nobody waits for it: it outlives this process


def _port(recorder: Recorder) -> int:
    """The port at which the watcher of rank 0 listens; 0 if it did not start."""
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if port := PORT.read(recorder.memory)["port"]:
            return port
        time.sleep(0.01)
    return 0
