"""The cost of instructions: operations of matrix products and convolutions, and memory traffic.

Source: `HloCostAnalysis` and the custom calls of `gpu/cublas_cudnn.h` in XLA.
"""

import math
import re
from dataclasses import dataclass

from fddp.hlo.module import Computation, Instruction, Module

FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
}
FREE |= {"optimization-barrier", "add-dependency", "opt-barrier"}
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
    bodies = [
        tuple(product for inner in called.values() for product in work(module, inner, called))
        for called in (module.computations[name] for name in instruction.calls)
    ]
    if instruction.opcode == "conditional":
        return max(bodies, key=lambda branch: sum(product.flops for product in branch), default=())
    return tuple(
        Work(instruction.trips * product.flops, product.dtype)
        for body in bodies
        for product in body
    )


def traffic(module: Module, instruction: Instruction, computation: Computation) -> int:
    """Counts the bytes that an instruction reads and writes.

    An array that a fusion only slices counts as its slices; an array that it updates in place
    counts as the update. A loop counts the bytes of all its rounds, a conditional those of the
    branch with the most traffic.
    """
    if instruction.opcode in FREE or instruction.opcode.endswith("-done"):
        return 0
    if instruction.opcode in ("while", "call", "conditional"):
        called = (module.computations[name] for name in instruction.calls)
        totals = [sum(traffic(module, inner, body) for inner in body.values()) for body in called]
        return (
            max(totals, default=0)
            if instruction.opcode == "conditional"
            else instruction.trips * sum(totals)
        )
    if instruction.opcode == UPDATE:
        return 2 * _nbytes(computation[instruction.operands[1]])
    if instruction.opcode not in FUSIONS:
        return _nbytes(instruction) + sum(
            _nbytes(computation[name]) for name in instruction.operands
        )
    body = module.computations[instruction.calls[0]]
    *_, root = body.values()
    return _nbytes(root) - _kept(body) + _read(body)


def _nbytes(instruction: Instruction) -> int:
    return sum(array.nbytes for array in instruction.result)


def _kept(body: Computation) -> int:
    """Counts the bytes of a fusion's results outside of the slices that it writes."""
    *_, root = body.values()
    outputs = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
    while any(output.opcode == "bitcast" for output in outputs):
        outputs = [
            body[output.operands[0]] if output.opcode == "bitcast" else output for output in outputs
        ]
    return sum(
        _nbytes(output) - _nbytes(body[output.operands[1]])
        for output in outputs
        if output.opcode == UPDATE
    )


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
        users = readers.get(instruction.name, [])
        return min(full, sum(size_read(instruction, user) for user in users)) if users else full

    def size_read(instruction: Instruction, user: Instruction) -> int:
        if user.opcode == UPDATE and user.operands[0] == instruction.name:
            return 0
        if user.opcode == "bitcast":
            return size(user)
        return _nbytes(user) if user.opcode in SLICES else _nbytes(instruction)

    return sum(
        size(instruction) for instruction in body.values() if instruction.opcode == "parameter"
    )


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
    match = re.search(contracting, instruction.attributes)
    contracted = math.prod(lhs.dims[int(d)] for d in re.findall(r"\d+", match[1])) if match else 1
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
    labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.attributes)
    features = kernel.dims[labels[1].index("o")] if labels else 1
    flops = 2 * out.size * kernel.size // max(features, 1)
    # A dilated input (the backward pass of a stride) is mostly zeros. Groups need no factor: the
    # output has the batch of one batch group, and the kernel the inputs of one feature group.
    dilated = re.search(r"lhs_dilate=([\dx]+)", instruction.attributes)
    for factor in re.findall(r"\d+", dilated[1] if dilated else ""):
        flops //= int(factor)
    return Work(flops, first.dtype)
