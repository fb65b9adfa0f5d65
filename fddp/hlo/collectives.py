"""The collectives of a scheduled program, and the computation that overlaps with each.

On a GPU an asynchronous all-reduce is two instructions, start and done; the instructions between
them overlap with it. A collective of a single instruction blocks the program, as does a collective
marked by XLA as synchronous.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from fddp.hlo.device_groups import Devices, device_groups
from fddp.hlo.flops import total_flops, work
from fddp.hlo.module import Array, Computation, ComputationSchedule, Instruction, Module

RENAMING = ("copy", "bitcast", "get-tuple-element")
# The memory space of arrays that XLA registers with NCCL; from JAX 0.12 on it has another number.
REGISTERED = "S(1)", "S(7)"
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclass(frozen=True)
class Collective:
    """A collective, with the positions of its start and its done in the schedule."""

    kind: str
    """A name of `KINDS`."""
    arrays: tuple[Array, ...]
    """Its operands; several if XLA has merged several collectives."""
    groups: str
    """The groups of devices, as XLA writes them."""
    op_name: str
    """Path of Python functions and named scopes, as JAX writes it; may be empty."""
    start: int
    """Position of its start."""
    done: int
    """Position of its done; equal to `start` if it is synchronous."""
    loops: int
    """Number of loops around it."""
    rounds: int
    """Number of executions: the product of these loops' rounds."""
    branches: int
    """Number of conditionals around it."""
    heavy: int
    """Number of instructions between start and done with products or convolutions, in a round."""
    flops: int
    """Floating-point operations of these instructions, in all rounds."""
    pipelined: bool = False
    """True if each round sends values of the previous round, and so overlaps with all of it."""
    ahead: bool = False
    """True if each round receives values of the next round, and so overlaps with all of it."""
    registered: bool = False
    """True if its buffers are registered with NCCL, which symmetric kernels need."""

    @property
    def asynchronous(self) -> bool:
        return self.done > self.start

    @property
    def inside(self) -> bool:
        """True if it is in a loop or a branch: its positions are not those of the program."""
        return self.loops + self.branches > 0

    @property
    def devices(self) -> Devices:
        """The groups as positions in the mesh; empty if all devices form one group."""
        return device_groups(self.groups)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def __str__(self) -> str:
        arrays = " + ".join(f"{array.dtype}{list(array.dims)}" for array in self.arrays)
        return f"{self.kind} of {arrays} among {self.groups or 'all'}"


def find_collectives(module: Module) -> tuple[Collective, ...]:
    """Finds the collectives of a program, in order of their start, with loops and branches last.

    Without a schedule, positions are those in the text.
    """
    schedules = (_of_schedule(module, schedule) for schedule in module.schedules())
    return tuple(chain.from_iterable(schedules))


def _of_schedule(module: Module, schedule: ComputationSchedule) -> Iterator[Collective]:
    lines = schedule.lines
    works = [work(module, line, computation) for line, computation in lines]
    done_positions = {
        line.operands[0]: position
        for position, (line, _) in enumerate(lines)
        if line.opcode.endswith("-done")
    }
    for position, (line, computation) in enumerate(lines):
        sender = _sender(module, line)
        if sender is None:
            continue
        done = position
        starts = module.scheduled and line.opcode.endswith("-start")
        if starts and '"is_sync":true' not in line.attributes:
            done = done_positions.get(line.name, position)
        overlapped = works[position + 1 : done]
        in_loop = schedule.loops > 0
        yield Collective(
            kind=next(kind for kind in KINDS if sender.opcode.startswith(kind)),
            arrays=tuple(chain.from_iterable(computation[name].result for name in line.operands)),
            groups=sender.groups,
            op_name=line.op_name or sender.op_name,
            start=position,
            done=done,
            loops=schedule.loops,
            rounds=schedule.rounds,
            branches=schedule.branches,
            heavy=sum(map(bool, overlapped)),
            flops=schedule.rounds * sum(map(total_flops, overlapped)),
            pipelined=in_loop and all(_is_given(computation, name) for name in line.operands),
            ahead=in_loop and _is_handed_on(computation, line.name),
            registered=line.space in REGISTERED,
        )


def _is_given(computation: Computation, name: str) -> bool:
    """Returns True if a value is an input of its computation, possibly renamed or copied."""
    instruction = computation[name]
    while instruction.opcode in RENAMING:
        instruction = computation[instruction.operands[0]]
    return instruction.opcode == "parameter"


def _is_handed_on(computation: Computation, name: str) -> bool:
    """Returns True if a computation only returns a value, possibly renamed or copied."""
    for line in computation.values():
        if name not in line.operands or line.opcode == "tuple":
            continue
        renames = line.opcode in RENAMING or line.opcode.endswith("-done")
        if not (renames and _is_handed_on(computation, line.name)):
            return False
    return True


def _sender(module: Module, line: Instruction) -> Instruction | None:
    """The collective that an instruction starts, itself or the content of an `async-start`."""
    lines = [line]
    if line.opcode == "async-start":
        lines = chain.from_iterable(module.computations[name].values() for name in line.calls)
    return next(filter(_is_collective, lines), None)


def sends(module: Module, line: Instruction) -> bool:
    """Returns True if an instruction starts a collective."""
    return _sender(module, line) is not None


def _is_collective(line: Instruction) -> bool:
    return line.opcode.removesuffix("-start") in KINDS
