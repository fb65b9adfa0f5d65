"""The cost of instructions: operations of matrix products and convolutions, and bytes of memory traffic.

Source: `HloCostAnalysis` and the custom calls of `gpu/cublas_cudnn.h` in XLA.
"""

import math
import re
from dataclasses import dataclass

from fddp.hlo.module import Computation, Instruction, Module

FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
FREE |= {"optimization-barrier", "add-dependency", "opt-barrier"}
FUSIONS = ("fusion", "fusion-start")  # the second runs beside what stands behind it
SLICES = {"slice", "dynamic-slice", "gather"}
UPDATE = "dynamic-update-slice"


@dataclass(frozen=True)
class Work:
    """Floating-point operations of one matrix product or convolution, and the dtype they are done in."""

    flops: int
    dtype: str


def work(module: Module, instruction: Instruction, computation: Computation) -> tuple[Work, ...]:
    """Finds the matrix products and convolutions of an instruction, those in its fusion or loop included.

    Args:
      module: the program.
      instruction: the instruction.
      computation: the computation that it stands in.

    Returns:
      One `Work` for each of them. Those in a loop have the operations of all its rounds. A conditional counts as its
      costliest branch. A library call of which nothing else is known has 0 operations.
    """
    own = _own_work(instruction, computation)
    if own is not None:
        return (own,)
    if instruction.opcode not in (*FUSIONS, "call", "while", "conditional", "async-start"):
        return ()
    parts = [
        tuple(one for inner in called.values() for one in work(module, inner, called))
        for called in (module.computations[name] for name in instruction.calls)
    ]
    if instruction.opcode == "conditional":
        return max(parts, key=lambda part: sum(one.flops for one in part), default=())
    return tuple(Work(instruction.trips * one.flops, one.dtype) for part in parts for one in part)


def traffic(module: Module, instruction: Instruction, computation: Computation) -> int:
    """Counts the bytes that an instruction reads and writes.

    An array that a fusion only slices counts by its slices, and one into which it writes a slice by that slice.

    Args:
      module: the program.
      instruction: the instruction.
      computation: the computation that it stands in.

    Returns:
      Bytes; 0 for instructions that move nothing. A loop counts the bytes of all its rounds, a conditional those of the
      branch that moves most.
    """
    if instruction.opcode in FREE or instruction.opcode.endswith("-done"):
        return 0
    if instruction.opcode in ("while", "call", "conditional"):
        called = (module.computations[name] for name in instruction.calls)
        inner = [sum(traffic(module, part, body) for part in body.values()) for body in called]
        return max(inner, default=0) if instruction.opcode == "conditional" else instruction.trips * sum(inner)
    if instruction.opcode == UPDATE:
        return 2 * _nbytes(computation[instruction.operands[1]])
    if instruction.opcode not in FUSIONS:
        return _nbytes(instruction) + sum(_nbytes(computation[name]) for name in instruction.operands)
    body = module.computations[instruction.calls[0]]
    *_, made = body.values()
    return _nbytes(made) - _kept(body) + _read(body)


def _nbytes(instruction: Instruction) -> int:
    return sum(array.nbytes for array in instruction.result)


def _kept(body: Computation) -> int:
    """Counts the bytes of a fusion's results that stay as they were, because only a slice is written."""
    *_, root = body.values()
    made = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
    while any(one.opcode == "bitcast" for one in made):
        made = [body[one.operands[0]] if one.opcode == "bitcast" else one for one in made]
    return sum(_nbytes(one) - _nbytes(body[one.operands[1]]) for one in made if one.opcode == UPDATE)


def _read(body: Computation) -> int:
    """Counts the bytes that a fusion reads: whole parameters, the slices of those that are only sliced.

    A parameter into which a slice is written is not read.
    """
    readers: dict[str, list[Instruction]] = {}
    for instruction in body.values():
        for name in instruction.operands:
            readers.setdefault(name, []).append(instruction)

    def size(instruction: Instruction) -> int:
        whole = _nbytes(instruction)
        users = readers.get(instruction.name, [])
        return min(whole, sum(part(instruction, user) for user in users)) if users else whole

    def part(instruction: Instruction, user: Instruction) -> int:
        if user.opcode == UPDATE and user.operands[0] == instruction.name:
            return 0
        if user.opcode == "bitcast":
            return size(user)
        return _nbytes(user) if user.opcode in SLICES else _nbytes(instruction)

    return sum(size(instruction) for instruction in body.values() if instruction.opcode == "parameter")


### Floating-point operations: twice the multiplications


def _own_work(instruction: Instruction, computation: Computation) -> Work | None:
    """The work of a single product or convolution; None for any other instruction."""
    if instruction.opcode == "dot":
        return _product(instruction, computation, r"lhs_contracting_dims=\{([\d,]*)\}")
    if instruction.opcode == "convolution":
        return _convolution(instruction, computation, "conv")
    target = instruction.target
    if target.startswith("__cublas"):
        return _product(instruction, computation, r'"lhs_contracting_dimensions":\[([^\]]*)\]')
    if target.startswith("__cudnn$conv"):
        return _convolution(instruction, computation, target.removeprefix("__cudnn$"))
    if target.startswith(("__cudnn", "__onednn", "__triton", "__cublas")):
        return Work(0, instruction.result[0].dtype)
    return None


def _product(instruction: Instruction, computation: Computation, contracting: str) -> Work:
    left = computation[instruction.operands[0]].result[0]
    found = re.search(contracting, instruction.attributes)
    over = math.prod(left.dims[int(d)] for d in re.findall(r"\d+", found[1])) if found else 1
    return Work(2 * instruction.result[0].size * over, left.dtype)


def _convolution(instruction: Instruction, computation: Computation, kind: str) -> Work:
    """The work of a convolution: 2 × (numbers of the output) × (numbers of the kernel that add to one of them).

    cuDNN's backward passes are written with the forward pass's labels, and cost as much as it.
    """
    first, second = (computation[name].result[0] for name in instruction.operands[:2])
    result = instruction.result[0]
    out = result
    kernel = second
    if kind.startswith("convBackwardInput"):
        out = first
    elif kind.startswith("convBackwardFilter"):
        out = second
        kernel = result
    labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.attributes)
    features = kernel.dims[labels[1].index("o")] if labels else 1
    flops = 2 * out.size * kernel.size // max(features, 1)
    # A dilated input (the backward pass of a stride) is mostly zeros. Groups need no factor: the output's batch is that
    # of one group of a batch, and the kernel's inputs are those of one group of features.
    dilated = re.search(r"lhs_dilate=([\dx]+)", instruction.attributes)
    for factor in re.findall(r"\d+", dilated[1] if dilated else ""):
        flops //= int(factor)
    return Work(flops, first.dtype)
