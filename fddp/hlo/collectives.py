"""The collectives of a scheduled program, and the computation that each overlaps with.

On a GPU an all-reduce is two instructions, start and done; the instructions between them run beside it. A collective
that is one instruction, or that XLA has marked as synchronous, holds the program up.
"""

from dataclasses import dataclass

from fddp.hlo.device_groups import Devices, device_groups
from fddp.hlo.flops import work
from fddp.hlo.module import Array, Computation, Instruction, Module, Schedule

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclass(frozen=True)
class Collective:
    """One collective: when it starts and when it is waited for, as places in its schedule."""

    kind: str
    """"all-reduce", say."""
    arrays: tuple[Array, ...]
    """The arrays that it sends; several where XLA has merged several collectives."""
    groups: str
    """The groups of devices that talk among themselves, as XLA writes them."""
    op_name: str
    """The path of Python functions and named scopes it came from, as JAX writes it; may be empty."""
    start: int
    """The place where it starts."""
    done: int
    """The place where it is waited for; the place where it starts if it is synchronous."""
    loops: int
    """Number of loops around it."""
    rounds: int
    """Number of times that it is sent: the rounds of these loops."""
    branches: int
    """Number of conditionals around it."""
    heavy: int
    """Matrix products and convolutions that are scheduled between start and done; in a loop those of one round."""
    flops: int
    """Their floating-point operations, in all rounds."""
    pipelined: bool = False
    """Whether each round of its loop sends what the round before has made, so that all of a round can run beside it."""
    ahead: bool = False
    """Whether each round of its loop brings what the next round reads, so that all of a round can run beside it."""

    @property
    def asynchronous(self) -> bool:
        return self.done > self.start

    @property
    def inside(self) -> bool:
        """Whether it stands in a loop or in a branch, whose places are not the program's own."""
        return self.loops + self.branches > 0

    @property
    def devices(self) -> Devices:
        """The groups of devices as numbers: places in the order of the mesh; empty: all devices are one group."""
        return device_groups(self.groups)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def __str__(self) -> str:
        arrays = " + ".join(f"{array.dtype}{list(array.dims)}" for array in self.arrays)
        return f"{self.kind} of {arrays} among {self.groups or 'all'}"


def find_collectives(module: Module) -> tuple[Collective, ...]:
    """Finds a program's collectives.

    Args:
      module: the program; if it is not scheduled, places are those of its text.

    Returns:
      Its collectives in the order in which they start, those inside loops and branches last.
    """
    return tuple(collective for schedule in module.schedules() for collective in _of_schedule(module, schedule))


def _of_schedule(module: Module, schedule: Schedule) -> list[Collective]:
    lines = schedule.lines
    works = [work(module, line, computation) for line, computation in lines]
    ends = {line.operands[0]: at for at, (line, _) in enumerate(lines) if line.opcode.endswith("-done")}
    collectives = []
    for at, (line, computation) in enumerate(lines):
        sender = _sender(module, line)
        if sender is None:
            continue
        waits = module.scheduled and line.opcode.endswith("-start") and '"is_sync":true' not in line.attributes
        done = ends.get(line.name, at) if waits else at
        under = works[at + 1 : done]
        collectives.append(
            Collective(
                kind=next(kind for kind in KINDS if sender.opcode.startswith(kind)),
                arrays=tuple(x for name in line.operands for x in computation[name].result),
                groups=sender.groups,
                op_name=line.op_name or sender.op_name,
                start=at,
                done=done,
                loops=schedule.loops,
                rounds=schedule.rounds,
                branches=schedule.branches,
                heavy=sum(map(bool, under)),
                flops=schedule.rounds * sum(one.flops for found in under for one in found),
                pipelined=schedule.loops > 0 and all(_is_given(computation, name) for name in line.operands),
                ahead=schedule.loops > 0 and _is_handed_on(computation, line.name),
            )
        )
    return collectives


def _is_given(computation: Computation, name: str) -> bool:
    """Whether a value is there when its computation begins, be it under another name or as a copy."""
    instruction = computation[name]
    while instruction.opcode in ("copy", "bitcast", "get-tuple-element"):
        instruction = computation[instruction.operands[0]]
    return instruction.opcode == "parameter"


def _is_handed_on(computation: Computation, name: str) -> bool:
    """Whether nothing reads a value in its computation, which gives it back, be it under another name or as a copy."""
    readers = [line for line in computation.values() if name in line.operands]
    waits = ("copy", "bitcast", "get-tuple-element")
    same = (line.opcode in waits or line.opcode.endswith("-done") for line in readers)
    each = zip(readers, same)
    return all(_is_handed_on(computation, line.name) if on else line.opcode == "tuple" for line, on in each)


def _sender(module: Module, line: Instruction) -> Instruction | None:
    """The collective that an instruction starts: the instruction itself, or the one that an `async-start` wraps."""
    if line.opcode == "async-start":
        inner = (part for name in line.calls for part in module.computations[name].values())
        return next((part for part in inner if _is_collective(part)), None)
    return line if _is_collective(line) else None


def sends(module: Module, line: Instruction) -> bool:
    """Whether an instruction starts a collective."""
    return _sender(module, line) is not None


def _is_collective(line: Instruction) -> bool:
    return line.opcode.removesuffix("-start") in KINDS
