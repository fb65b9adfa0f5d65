"""Starts two ranks, which print their numbers and stay, and waits for them: `spawns.py FOLDER`."""

import os
import signal
import sys
import time
from pathlib import Path

import fddp


def stay(folder: str) -> None:
    group = fddp.init()
    group.barrier()
    (Path(folder) / f"rank{group.rank}").write_text(str(os.getpid()))
    time.sleep(600)


if __name__ == "__main__":
    # A suite that a shell runs in the background ignores SIGINT, and its children would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fddp.launch(stay, 2, sys.argv[1])
