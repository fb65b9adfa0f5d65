"""Parses the text of a compiled program, as `compiled.as_text()` returns it.

In a module with `is_scheduled=true` the order of the lines is the order of execution. This module
reads shapes, operands, and the computations that an instruction calls.

Source: `HloInstruction::ToString` in XLA.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

# Bytes of an element, for dtypes whose names do not give their bits.
BYTES = {"s4": 0.5, "u4": 0.5, "f4e2m1fn": 0.5, "c64": 8, "c128": 16, "token": 0, "opaque": 0}


@dataclass(frozen=True)
class Array:
    """An array of an instruction's result."""

    dtype: str
    """XLA's name of the dtype: "f32", "bf16", "s32"."""
    dims: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        bits = int(find(r"^[a-z]+(\d+)", self.dtype) or 8)
        return math.ceil(math.prod(self.dims) * BYTES.get(self.dtype, bits / 8))


@dataclass(frozen=True)
class Instruction:
    """A line of a computation."""

    name: str
    result: tuple[Array, ...]
    """The arrays of its result, with tuples flattened."""
    opcode: str
    operands: tuple[str, ...]
    """Names of the instructions that compute its inputs."""
    attributes: str
    """The text after the operands."""
    space: str
    """The memory space of its result, as XLA writes it: "S(7)"; empty: the default."""

    @cached_property
    def op_name(self) -> str:
        """Path of Python functions and named scopes, as JAX writes it; may be empty."""
        return find(r'op_name="([^"]*)"', self.attributes)

    @cached_property
    def target(self) -> str:
        """The library function of a custom call; else empty."""
        return find(r'custom_call_target="([^"]*)"', self.attributes)

    @cached_property
    def groups(self) -> str:
        """The device groups of a collective, as XLA writes them; else empty."""
        return find(r"(?:replica_groups|source_target_pairs)=(.*?)(?:, \w+=|$)", self.attributes)

    @cached_property
    def calls(self) -> tuple[str, ...]:
        """Names of the computations that run as part of it, in the order of the text."""
        keys = (
            r"calls|to_apply|body|branch_computations|called_computations"
            r"|true_computation|false_computation"
        )
        matches = re.findall(rf"\b(?:{keys})=(?:\{{([^}}]*)\}}|%?([\w.-]+))", self.attributes)
        return tuple(re.findall(r"[^\s,%]+", ",".join(map("".join, matches))))

    @cached_property
    def trips(self) -> int:
        """Number of rounds of a loop; 1 if XLA does not know it, and for other instructions."""
        return int(find(r'"known_trip_count":\{"n":"?(\d+)', self.attributes) or 1)


Computation = dict[str, Instruction]
"""Instructions by name, in order."""


class ComputationSchedule(NamedTuple):
    """Instructions in order of their start, each with its computation."""

    lines: tuple[tuple[Instruction, Computation], ...]
    loops: int
    """Number of loops around them."""
    rounds: int
    """Number of executions: the product of these loops' `trips`."""
    branches: int
    """Number of conditionals around them."""


@dataclass(frozen=True)
class Module:
    """A program as XLA runs it."""

    computations: dict[str, Computation]
    entry: str
    scheduled: bool
    """True if the order of instructions is the order in which they start."""

    def schedules(self) -> Iterator[ComputationSchedule]:
        """Yields the schedule of the program, then those of the bodies of its loops and branches.

        Calls are inlined. A loop or a conditional is a single line.
        """
        pending = [(self.entry, 0, 1, 0)]
        while pending:
            name, loops, rounds, branches = pending.pop(0)
            lines = list(self.lines(name))
            yield ComputationSchedule(tuple(lines), loops, rounds, branches)
            for line, _ in lines:
                if line.opcode == "while":
                    inner = (loops + 1, rounds * line.trips, branches)
                elif line.opcode == "conditional":
                    inner = (loops, rounds, branches + 1)
                else:
                    continue
                pending += [(called, *inner) for called in line.calls]

    def lines(self, name: str) -> Iterator[tuple[Instruction, Computation]]:
        """Yields the instructions of a computation, each with its computation; inlines calls."""
        computation = self.computations[name]
        for instruction in computation.values():
            if instruction.opcode == "call":
                yield from self.lines(instruction.calls[0])
            else:
                yield instruction, computation


def parse(text: str) -> Module:
    """Parses the text of `jax.stages.Compiled.as_text()`; without an entry, raises a ValueError.

    >>> text = '''HloModule f, is_scheduled=true
    ... ENTRY %main (x: f32[2,3], y: f32[3,4]) -> f32[2,4] {
    ...   %x = f32[2,3]{1,0} parameter(0)
    ...   %y = f32[3,4]{1,0} parameter(1)
    ...   ROOT %dot = f32[2,4]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    ... }'''
    >>> [line.opcode for line, _ in next(parse(text).schedules()).lines]
    ['parameter', 'parameter', 'dot']
    """
    computations: dict[str, Computation] = {}
    entry = None
    current: Computation = {}
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            head = re.match(r"(ENTRY )?%?([\w.-]+)", line)
            if head:
                current = computations.setdefault(head[2], {})
                if head[1]:
                    entry = head[2]
        elif line.startswith("  ") and " = " in line:
            instruction = _instruction(line)
            current[instruction.name] = instruction
    if entry is None:
        raise ValueError(f"no ENTRY computation in this HLO text, which begins {text[:80]!r}.")
    return Module(computations, entry, "is_scheduled=true" in text.partition("\n")[0])


def _instruction(line: str) -> Instruction:
    name, _, text = line.strip().removeprefix("ROOT ").partition(" = ")
    end = text.index(" ")
    if text.startswith("("):
        end = _closing(text, 0)
    shape = text[:end]
    text = text[end:].lstrip()
    opening = text.index("(")
    closing = _closing(text, opening)
    arrays = re.findall(r"\b([a-z]\w*)\[([\d,<= ]*)\]", re.sub(r"/\*.*?\*/|\{[^}]*\}", "", shape))
    return Instruction(
        name=name.lstrip("%"),
        result=tuple(Array(x, tuple(map(int, re.findall(r"\d+", dims)))) for x, dims in arrays),
        opcode=text[:opening],
        operands=tuple(re.findall(r"%([\w.-]+)", text[opening:closing])),
        attributes=text[closing:],
        space=find(r"(S\(\d+\))", shape),
    )


def _closing(text: str, opening: int) -> int:
    """Position after the closing parenthesis of the pair that starts at `opening`."""
    depth = 0
    for parenthesis in re.finditer(r"[()]", text[opening:]):
        depth += {"(": 1, ")": -1}[parenthesis[0]]
        if depth == 0:
            return opening + parenthesis.end()
    return len(text)


def find(pattern: str, text: str) -> str:
    """Returns the group of a pattern's first match; empty without a match."""
    match = re.search(pattern, text)
    return match[1] if match else ""
