"""Parses a program as XLA compiled it: its scheduled instructions, from the text that `compiled.as_text()` gives.

In a module that says `is_scheduled=true` the order of the lines is the order of execution. This module reads shapes,
operands, and the computations that an instruction calls; `flops` reads what they cost.

Source: `HloInstruction::ToString` in XLA.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "f4e2m1fn": 0.5, "c64": 8, "c128": 16, "token": 0, "opaque": 0}


@dataclass(frozen=True)
class Array:
    """One array of an instruction's result."""

    dtype: str
    """XLA's name of the dtype: "f32", "bf16", "s32"."""
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        bits = re.match(r"[a-z]+(\d+)", self.dtype)
        return math.ceil(self.size * BYTES.get(self.dtype, int(bits[1]) / 8 if bits else 1))


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    result: tuple[Array, ...]
    """The arrays of its result, those inside tuples one after the other."""
    opcode: str
    operands: tuple[str, ...]
    """Names of the instructions whose results it reads."""
    attributes: str
    """The text behind the operands."""

    @cached_property
    def op_name(self) -> str:
        """The path of Python functions and named scopes it came from, as JAX writes it; may be empty."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @cached_property
    def target(self) -> str:
        """The library function of a custom call; else empty."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @cached_property
    def groups(self) -> str:
        """The devices that a collective joins, as XLA writes them; else empty."""
        found = re.search(r"(?:replica_groups|source_target_pairs)=(.*?)(?:, \w+=|$)", self.attributes)
        return found[1] if found else ""

    @cached_property
    def calls(self) -> tuple[str, ...]:
        """Names of the computations that run as part of it, in the order in which they are named."""
        keys = r"calls|to_apply|body|branch_computations|called_computations|true_computation|false_computation"
        found = re.findall(rf"\b(?:{keys})=(?:\{{([^}}]*)\}}|%?([\w.-]+))", self.attributes)
        return tuple(name.strip().lstrip("%") for many, one in found for name in (many or one).split(","))

    @cached_property
    def trips(self) -> int:
        """Number of rounds of a loop; 1 where XLA does not know it, and for all other instructions."""
        found = re.search(r'"known_trip_count":\{"n":"?(\d+)', self.attributes) if self.opcode == "while" else None
        return int(found[1]) if found else 1


Computation = dict[str, Instruction]
"""Instructions by name, in order."""


class Schedule(NamedTuple):
    """Instructions in the order in which they start, each with the computation it stands in."""

    lines: tuple[tuple[Instruction, Computation], ...]
    loops: int
    """Number of loops around them."""
    rounds: int
    """Number of times that they run: the rounds of these loops; a loop whose rounds XLA does not know counts as one."""
    branches: int
    """Number of conditionals around them."""


@dataclass(frozen=True)
class Module:
    """A program as XLA will run it."""

    computations: dict[str, Computation]
    entry: str
    scheduled: bool
    """Whether the order of instructions is the order in which they start."""

    def schedules(self) -> Iterator[Schedule]:
        """Yields the sequences of instructions that run: the program's own, then the bodies of its loops and branches.

        Yields:
          A sequence, with calls written in their places. A loop or a conditional is one line of it.
        """
        pending = [(self.entry, 0, 1, 0)]
        while pending:
            name, loops, rounds, branches = pending.pop(0)
            lines = list(self.lines(name))
            yield Schedule(tuple(lines), loops, rounds, branches)
            for line, _ in lines:
                if line.opcode == "while":
                    pending += [(called, loops + 1, rounds * line.trips, branches) for called in line.calls]
                elif line.opcode == "conditional":
                    pending += [(called, loops, rounds, branches + 1) for called in line.calls]

    def lines(self, name: str) -> Iterator[tuple[Instruction, Computation]]:
        """Yields the instructions of a computation, those of calls in their places.

        Args:
          name: of the computation.

        Yields:
          An instruction, and the computation that it stands in.
        """
        computation = self.computations[name]
        for instruction in computation.values():
            if instruction.opcode == "call":
                yield from self.lines(instruction.calls[0])
            else:
                yield instruction, computation


def parse(text: str) -> Module:
    """Reads a module.

    Args:
      text: the text that `jax.stages.Compiled.as_text()` returns.

    Returns:
      The module.

    Raises:
      ValueError: the text has no entry computation.

    Example:
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
                entry = head[2] if head[1] else entry
        elif line.startswith("  ") and " = " in line:
            instruction = _instruction(line)
            current[instruction.name] = instruction
    if entry is None:
        raise ValueError(f"no ENTRY computation in this HLO text, which begins {text[:80]!r}.")
    return Module(computations, entry, "is_scheduled=true" in text.partition("\n")[0])


def _instruction(line: str) -> Instruction:
    name, _, rest = line.strip().removeprefix("ROOT ").partition(" = ")
    end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    shape = rest[:end]
    rest = rest[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    arrays = re.findall(r"\b([a-z]\w*)\[([\d,<= ]*)\]", re.sub(r"/\*.*?\*/|\{[^}]*\}", "", shape))
    return Instruction(
        name=name.lstrip("%"),
        result=tuple(Array(dtype, tuple(int(d) for d in re.findall(r"\d+", dims))) for dtype, dims in arrays),
        opcode=rest[:opening],
        operands=tuple(re.findall(r"%([\w.-]+)", rest[opening:closing])),
        attributes=rest[closing:],
    )


def _closing(text: str, opening: int) -> int:
    """The place behind the parenthesis that closes the one at `opening`."""
    depth = 0
    for found in re.finditer(r"[()]", text[opening:]):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return opening + found.end()
    return len(text)
