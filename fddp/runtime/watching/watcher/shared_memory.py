"""The layout of the memory shared by a rank and its watcher.

It needs only the standard library: both sides import this file, and a watcher must not load JAX.
The watcher writes `VERDICT` and `PROPOSAL`, the rank `REPORT` and the messages.
"""

import struct
from mmap import mmap
from typing import Any, NamedTuple

MESSAGES = 64  # number of recorded messages
LINE = 64  # bytes of a cache line; each record begins a line, because two processes write

### Activities of a rank: values of `doing`, in addition to names of tasks and collectives

BETWEEN = "between steps"
STEP = "step"  # before the first task of a step, when it may compile
LAUNCHED = "launched"  # XLA runs the step asynchronously
FINISHED = "finished"
EXITED = "left by"  # sys.exit, before the last line of the script
FAILED = "failed"
AFTER_ERROR = "after an error"  # of a transport: another rank may have left
LEFT = "left the world"  # the process continues independently
OF = " of "  # between a collective and the call of all ranks that needs it
ENDS = (FINISHED, EXITED, FAILED, LEFT)  # the final states begin so


class Record(NamedTuple):
    """Numbers, flags and texts of limited length, written in a single write."""

    place: int
    """Offset in the memory, in bytes."""
    layout: struct.Struct
    names: tuple[str, ...]

    @property
    def end(self) -> int:
        return self.place + self.layout.size

    def write(self, memory: mmap | bytearray, *values: float | str) -> None:
        """Writes all fields while another process may read them; truncates long texts."""
        fields = [x.encode(errors="replace") if isinstance(x, str) else x for x in values]
        packed = self.layout.pack(*fields)
        memory[self.place : self.end] = packed  # `pack_into` would fill it with zeros first

    def read(self, memory: mmap | bytearray) -> dict[str, Any]:
        """Reads all fields while another process may write them, until two reads agree."""
        packed = bytes(memory[self.place : self.end])
        while (second := bytes(memory[self.place : self.end])) != packed:
            packed = second
        return {
            name: x.rstrip(b"\0").decode(errors="replace") if isinstance(x, bytes) else x
            for name, x in zip(self.names, self.layout.unpack(packed))
        }


def message(number: int) -> Record:
    """The record of a message; it overwrites that of message `number - MESSAGES`."""
    return FIRST_MESSAGE._replace(
        place=FIRST_MESSAGE.place + number % MESSAGES * FIRST_MESSAGE.layout.size
    )


def _record(offset: int, **formats: str) -> Record:
    """Makes the record behind an offset; the formats of its fields are those of `struct`."""
    layout = struct.Struct("<" + "".join(formats.values()))
    return Record(-(-offset // LINE) * LINE, layout, tuple(formats))


### The records

REPORT = _record(
    0,
    life="Q",  # signs of life
    steps="Q",  # steps begun
    calls="Q",  # calls begun that all ranks make together: steps, and collectives of hosts
    messages="Q",  # messages begun
    moved="d",  # time at which the rank last moved, in seconds of the monotonic clock
    together="?",  # whether the rank is in a call of all ranks
    before="q",  # steps of the training before this process began
    typical="d",  # seconds of three of four steps, at least, from one begin to the next
    doing="120s",  # what the rank does
    sending="120s",  # the message under way; empty: none
    place="120s",  # where in the script the main thread is
    # The ranks agree on the call of `stops` at which all stop, once a rank must end soon.
    told="?",  # whether this rank was told to end soon
    asks="q",  # how often the rank has asked
    between_s="d",  # seconds between its last two questions
    agreed="q",  # the question at which it agrees to stop, negative if it is past that one
)
VERDICT = _record(
    REPORT.end,
    end="?",  # whether this rank is to end
    words="512s",  # why, for a person
)
PROPOSAL = _record(
    VERDICT.end,
    step="q",  # the question at which all ranks are to stop; 0: none
    settled="?",  # whether all have agreed to it
)
FIRST_MESSAGE = _record(
    PROPOSAL.end,
    number="Q",  # its number among the messages of the rank
    step="Q",  # the step that it belongs to
    begin="d",  # when it left
    end="d",  # when its sum was there; 0: not yet
    nbytes="Q",  # its bytes
    name="120s",  # its name
)
SIZE = message(MESSAGES - 1).end  # bytes of the memory
