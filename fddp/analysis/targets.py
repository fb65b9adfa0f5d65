"""Compile targets: hosts with GPUs of one kind, which need not be attached.

XLA's compiler for NVIDIA's GPUs needs only a description of the chip (`gpus/*.txtpb`). The compiler
comes with the package `jax-cuda13-pjrt` (the extra `audit`).

Source: `jax.experimental.topologies`.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from fddp.comm import AXIS, Group, Hosts, Transport, axis_communicator, mesh_placement, replica_mesh
from fddp.runtime import missing_compiler

CHIPS = {path.stem: path for path in sorted((Path(__file__).parent / "gpus").glob("*.txtpb"))}


class Target(NamedTuple):
    """Hosts with GPUs."""

    name: str
    chip: str
    hosts: int
    gpus: int
    """GPUs of each host."""

    @property
    def size(self) -> int:
        """Number of replicas: one per GPU."""
        return self.hosts * self.gpus

    def group(self) -> Group:
        """Returns a group for compilation only: programs can be lowered, arrays are shapes."""
        placement = mesh_placement(replica_mesh(self._devices()), AXIS)
        return Group(
            rank=0,
            size=self.size,
            backend="nccl",
            placement=placement._replace(place=_forms, as_program_rows=lambda rows: rows),
            communicator=axis_communicator(AXIS, self.size, "gpu"),
            transport=Transport(),
            hosts=Hosts((0,), lambda data: data[None], lambda data, root: data),
            make_subgroup=lambda ranks: self.group(),
        )

    def _devices(self) -> list[Any]:
        missing = missing_compiler()
        if missing:
            raise RuntimeError(missing)
        try:
            return topologies.get_topology_desc(
                platform="cuda",
                topology_name="",
                target_config=CHIPS[self.chip].read_text(),
                topology=f"1x{self.hosts}x{self.gpus}",
            ).devices
        except Exception as error:  # the plugin raises several types
            raise RuntimeError(
                f"XLA cannot compile for {self.name} here: {error}. Where there is no GPU, start "
                "Python with JAX_PLATFORMS=cpu, or import fddp before JAX computes anything."
            ) from error


def read_target(name: str) -> Target:
    """Parses the name of a target: "h100:8" is one host of eight GPUs, "h100:2x8" two hosts."""
    match = None
    if isinstance(name, str):
        match = re.fullmatch(r"(\w+):(?:([1-9]\d*)x)?([1-9]\d*)", name)
    if match is None or match[1] not in CHIPS:
        raise ValueError(
            f"target must be a chip ({', '.join(CHIPS)}) and how many: 'h100:8' for one host, "
            f"'h100:2x8' for two; got {name!r}."
        )
    return Target(name, match[1], int(match[2] or 1), int(match[3]))


def _forms(tree: PyTree, spec: PartitionSpec) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
