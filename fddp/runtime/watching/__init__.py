"""Watches the ranks: a dead, stuck or early rank is named, and all ranks end together.

A rank's recorder writes its activity to shared memory. The package `watcher` runs in a separate
process for each rank, and loads nothing else of fddp. The last messages of each rank can be read
after the job. This room imports comm.
"""

from fddp.runtime.watching.abort import end_together as end_together
from fddp.runtime.watching.abort import flush_output as flush_output
from fddp.runtime.watching.abort import follows_another as follows_another
from fddp.runtime.watching.abort import from_transport as from_transport
from fddp.runtime.watching.abort import leave as leave
from fddp.runtime.watching.abort import poll as poll
from fddp.runtime.watching.flight_records import flight_text, read_flights
from fddp.runtime.watching.watchdog import shared_recorder, watched
from fddp.runtime.watching.watcher.links import allow_files, wait_readable, write_stderr
from fddp.runtime.watching.watcher.shared_memory import FAILED, LEFT
