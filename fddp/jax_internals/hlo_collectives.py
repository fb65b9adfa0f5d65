"""The collectives of a scheduled program, and the computation that overlaps with each.

On a GPU an asynchronous all-reduce is two instructions, start and done; the instructions between
them overlap with it. A collective of a single instruction blocks the program, as does a collective
marked by XLA as synchronous.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from fddp.jax_internals.hlo import Array, ComputationSchedule, Instruction, Module

# The memory space of arrays that XLA registers with NCCL; from JAX 0.12 on it has another number.
REGISTERED = "S(1)", "S(7)"
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
PRODUCTS = ("dot", "convolution")
LIBRARIES = ("__cublas", "__cudnn", "__onednn", "__triton")
CALLERS = ("fusion", "fusion-start", "call", "while", "conditional", "async-start")


@dataclass(frozen=True)
class Collective:
    """A collective of a program."""

    kind: str
    """A name of `KINDS`."""
    arrays: tuple[Array, ...]
    """Its operands; several if XLA has merged several collectives."""
    groups: str
    """The groups of devices, as XLA writes them."""
    op_name: str
    """Path of Python functions and named scopes, as JAX writes it; may be empty."""
    asynchronous: bool
    """True if other instructions may run between its start and its done."""
    loops: int
    """Number of loops around it."""
    rounds: int
    """Number of executions: the product of these loops' rounds."""
    branches: int
    """Number of conditionals around it."""
    heavy: int
    """Number of matrix products and convolutions between start and done, in a round."""
    registered: bool = False
    """True if its buffers are registered with NCCL, which symmetric kernels need."""

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    @property
    def merged(self) -> bool:
        """True if XLA has merged several collectives into this one."""
        # An all-to-all has an array per replica anyway.
        return len(self.arrays) > 1 and self.kind != "all-to-all"

    def __str__(self) -> str:
        arrays = " + ".join(f"{array.dtype}{list(array.dims)}" for array in self.arrays)
        return f"{self.kind} of {arrays} among {self.groups or 'all'}"


def find_collectives(module: Module) -> tuple[Collective, ...]:
    """Finds the collectives of a program, in order of their start, with loops and branches last.

    Without a schedule, the order is that of the text.
    """
    schedules = (_of_schedule(module, schedule) for schedule in module.schedules())
    return tuple(chain.from_iterable(schedules))


def heavy_operations(module: Module, line: Instruction) -> int:
    """Counts the matrix products and convolutions of an instruction, its fusion or its loop.

    A loop counts those of all its rounds, a conditional those of its largest branch.
    """
    if line.opcode in PRODUCTS or line.target.startswith(LIBRARIES):
        return 1
    if line.opcode not in CALLERS:
        return 0
    counts = list[int]()
    for called in map(module.computations.__getitem__, line.calls):
        counts.append(sum(heavy_operations(module, inner) for inner in called.values()))
    if line.opcode == "conditional":
        return max(counts, default=0)
    return line.trips * sum(counts)


def _of_schedule(module: Module, schedule: ComputationSchedule) -> Iterator[Collective]:
    lines = schedule.lines
    counts = [heavy_operations(module, line) for line, _ in lines]
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
        yield Collective(
            kind=next(kind for kind in KINDS if sender.opcode.startswith(kind)),
            arrays=tuple(chain.from_iterable(computation[name].result for name in line.operands)),
            groups=sender.groups,
            op_name=line.op_name or sender.op_name,
            asynchronous=done > position,
            loops=schedule.loops,
            rounds=schedule.rounds,
            branches=schedule.branches,
            heavy=sum(counts[position + 1 : done]),
            registered=line.space in REGISTERED,
        )


def _sender(module: Module, line: Instruction) -> Instruction | None:
    """The collective that an instruction starts, itself or the content of an `async-start`."""
    lines = [line]
    if line.opcode == "async-start":
        lines = chain.from_iterable(module.computations[name].values() for name in line.calls)
    return next((x for x in lines if x.opcode.removesuffix("-start") in KINDS), None)
