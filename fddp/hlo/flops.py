"""The cost of instructions: operations of matrix products and convolutions, and memory traffic.

Source: `HloCostAnalysis` and the custom calls of `gpu/cublas_cudnn.h` in XLA.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from fddp.hlo.module import Computation, Instruction, Module, find, read_integers

FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "replica-id", "optimization-barrier", "add-dependency", "opt-barrier"),
}
FUSIONS = ("fusion", "fusion-start")  # the second overlaps with the instructions after it
SLICES = {"slice", "dynamic-slice", "gather"}
UPDATE = "dynamic-update-slice"


@dataclass(frozen=True)
class Work:
    """Floating-point operations and dtype of a matrix product or convolution."""

    flops: int
    dtype: str


def work(module: Module, instruction: Instruction, computation: Computation) -> tuple[Work, ...]:
    """Finds the matrix products and convolutions of an instruction, of its fusion or its loop.

    A loop counts the operations of all its rounds, a conditional those of its costliest branch. An
    unknown library call has 0 operations.
    """
    direct = _own_work(instruction, computation)
    if direct is not None:
        return (direct,)
    if instruction.opcode not in (*FUSIONS, "call", "while", "conditional", "async-start"):
        return ()
    bodies = list[tuple[Work, ...]]()
    for called in map(module.computations.__getitem__, instruction.calls):
        works = (work(module, inner, called) for inner in called.values())
        bodies.append(tuple(chain.from_iterable(works)))
    if instruction.opcode == "conditional":
        return max(bodies, key=total_flops, default=())
    trips = instruction.trips
    return tuple(Work(trips * x.flops, x.dtype) for x in chain.from_iterable(bodies))


def total_flops(works: Iterable[Work]) -> int:
    return sum(product.flops for product in works)


def traffic(module: Module, instruction: Instruction, computation: Computation) -> int:
    """Counts the bytes that an instruction reads and writes.

    An array that a fusion only slices counts as its slices; an array that it updates in place
    counts as the update. A loop counts the bytes of all its rounds, a conditional those of the
    branch with the most traffic.
    """
    if instruction.opcode in FREE or instruction.opcode.endswith("-done"):
        return 0
    if instruction.opcode in ("while", "call", "conditional"):
        totals = list[int]()
        for called in map(module.computations.__getitem__, instruction.calls):
            totals.append(sum(traffic(module, inner, called) for inner in called.values()))
        if instruction.opcode == "conditional":
            return max(totals, default=0)
        return instruction.trips * sum(totals)
    if instruction.opcode == UPDATE:
        return 2 * _nbytes(computation[instruction.operands[1]])
    if instruction.opcode not in FUSIONS:
        inputs = map(computation.__getitem__, instruction.operands)
        return _nbytes(instruction) + sum(map(_nbytes, inputs))
    body = module.computations[instruction.calls[0]]
    *_, root = body.values()
    return _nbytes(root) - _kept(body) + _read(body)


def _nbytes(instruction: Instruction) -> int:
    return sum(array.nbytes for array in instruction.result)


def _kept(body: Computation) -> int:
    """Counts the bytes of a fusion's results outside of the slices that it writes."""
    *_, root = body.values()
    outputs = [root]
    if root.opcode == "tuple":
        outputs = [body[name] for name in root.operands]
    nbytes = 0
    for output in outputs:
        while output.opcode == "bitcast":
            output = body[output.operands[0]]
        if output.opcode == UPDATE:
            nbytes += _nbytes(output) - _nbytes(body[output.operands[1]])
    return nbytes


def _read(body: Computation) -> int:
    """Counts the bytes that a fusion reads of its parameters.

    If it only slices a parameter, the slices count; if it only updates a slice in place, nothing.
    """
    readers: dict[str, list[Instruction]] = {}
    for instruction in body.values():
        for name in instruction.operands:
            readers.setdefault(name, []).append(instruction)

    def size(instruction: Instruction) -> int:
        full = _nbytes(instruction)
        if instruction.name not in readers:
            return full
        return min(full, sum(size_read(instruction, user) for user in readers[instruction.name]))

    def size_read(instruction: Instruction, user: Instruction) -> int:
        if user.opcode == UPDATE and user.operands[0] == instruction.name:
            return 0
        if user.opcode == "bitcast":
            return size(user)
        if user.opcode in SLICES:
            return _nbytes(user)
        return _nbytes(instruction)

    return sum(size(line) for line in body.values() if line.opcode == "parameter")


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
    lhs = computation[instruction.operands[0]].result[0]
    dims = read_integers(find(contracting, instruction.attributes))
    contracted = math.prod(lhs.dims[d] for d in dims)
    return Work(2 * instruction.result[0].size * contracted, lhs.dtype)


def _convolution(instruction: Instruction, computation: Computation, kind: str) -> Work:
    """The work of a convolution: 2 × (elements of the output) × (kernel elements per output).

    cuDNN's backward passes have the labels of the forward pass, and its cost.
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
    flops = 2 * out.size * kernel.size
    if labels := find(r"dim_labels=\w+_(\w+)->", instruction.attributes):
        features = kernel.dims[labels.index("o")]
        flops //= max(features, 1)
    # A dilated input (the backward pass of a stride) is mostly zeros. Groups need no factor: the
    # output has the batch of one batch group, and the kernel the inputs of one feature group.
    for factor in read_integers(find(r"lhs_dilate=([\dx]+)", instruction.attributes)):
        flops //= factor
    return Work(flops, first.dtype)
