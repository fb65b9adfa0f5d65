"""Compile targets: hosts with GPUs of one kind, which need not be attached.

XLA's compiler for NVIDIA's GPUs needs only a description of the chip (`gpus/*.txtpb`). The compiler
comes with the package `jax-cuda13-pjrt` (the extra `audit`).

Source: `jax.experimental.topologies`.
"""

import re
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from fddp.comm import AXIS, Group, Hosts, Transport, axis_communicator, mesh_placement, replica_mesh
from fddp.runtime import missing_compiler

CHIPS = {path.stem: path for path in sorted((Path(__file__).parent / "gpus").glob("*.txtpb"))}


def target_group(name: str) -> Group:
    """Makes a group of GPUs, one replica each, for compilation only: its arrays are shapes.

    "h100:8" is one host of eight GPUs, "h100:2x8" two hosts.
    """
    match = None
    if isinstance(name, str):
        match = re.fullmatch(r"(\w+):(?:([1-9]\d*)x)?([1-9]\d*)", name)
    if match is None or match[1] not in CHIPS:
        raise ValueError(
            f"target must be a chip ({', '.join(CHIPS)}) and how many: 'h100:8' for one host, "
            f"'h100:2x8' for two; got {name!r}."
        )
    if missing := missing_compiler():
        raise RuntimeError(missing)
    hosts, gpus = int(match[2] or 1), int(match[3])
    try:
        devices = topologies.get_topology_desc(
            platform="cuda",
            topology_name="",
            target_config=CHIPS[match[1]].read_text(),
            topology=f"1x{hosts}x{gpus}",
        ).devices
    except Exception as error:  # the plugin raises several types
        raise RuntimeError(
            f"XLA cannot compile for {name} here: {error}. Where there is no GPU, start "
            "Python with JAX_PLATFORMS=cpu, or import fddp before JAX computes anything."
        ) from error

    def place(tree: PyTree, spec: PartitionSpec) -> Any:
        del spec
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)

    placement = mesh_placement(replica_mesh(devices), AXIS)
    return Group(
        rank=0,
        size=hosts * gpus,
        backend="nccl",
        placement=placement._replace(place=place, as_program_rows=lambda rows: rows),
        communicator=axis_communicator(AXIS, hosts * gpus, "gpu"),
        transport=Transport(),
        hosts=Hosts((0,), all_gather=lambda data: data[None], broadcast=lambda data, root: data),
        make_subgroup=lambda ranks: target_group(name),
    )
