"""A script that starts two ranks and waits for them, which tell their numbers and stay: `spawns.py FOLDER`."""

import os
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
    fddp.launch(stay, 2, sys.argv[1])
