"""Holds claims on one core, where XLA has one thread: `one_core.py FOLDER NAME ...`."""

import os
import sys
from pathlib import Path

from on_ranks.hold import main

if __name__ == "__main__":
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    os.environ["NPROC"] = "1"
    main(Path(sys.argv[1]), *sys.argv[2:])
