"""Compile targets: hosts with GPUs of one kind, which need not be attached.

XLA's compiler for NVIDIA's GPUs needs only a description of the chip. The compiler comes with the
package `jax-cuda13-pjrt` (the extra `audit`).

Source: `jax.experimental.topologies`.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import PyTree

from fddp.analysis.auditing.gpus import CHIPS, Chip
from fddp.comm import (
    AXIS,
    Group,
    Hosts,
    axis_communicator,
    mesh_levels,
    mesh_placement,
    mesh_transport,
    replica_mesh,
)
from fddp.runtime import missing_compiler

# Latency of an all-reduce inside a host and across hosts: NCCL's order of magnitude.
LATENCY_S = 20e-6
NETWORK_LATENCY_S = 60e-6


@dataclass(frozen=True)
class Target:
    """Hosts with GPUs.

    Example:
      >>> target = read_target("h100:2x8")
      >>> target.size, target.chip.name
      (16, 'NVIDIA H100 80GB HBM3')
    """

    name: str
    chip: Chip
    hosts: int
    gpus: int
    """GPUs of each host."""

    @property
    def size(self) -> int:
        """Number of replicas: one per GPU."""
        return self.hosts * self.gpus

    def seconds(self, kind: str, nbytes: int, groups: Sequence[Sequence[int]] = ()) -> float:
        """Returns the least seconds of a collective, for its slowest group.

        `kind` is XLA's name, such as "all-reduce". `nbytes` is one replica's input. `groups` is
        `Collective.devices`; empty for a single group of all replicas. Replicas are numbered host
        by host. An all-to-all sends directly, any other collective along a ring.
        """
        return max(self._seconds(kind, nbytes, group) for group in groups or [range(self.size)])

    def _seconds(self, kind: str, nbytes: int, group: Sequence[int]) -> float:
        size = len(group)
        host_sizes = Counter(replica // self.gpus for replica in group)
        fewest = min(host_sizes.values())  # replicas of the group on one host
        links = self.chip.links * self.chip.link_bytes_per_s
        card = self.chip.network_bytes_per_s
        latency = LATENCY_S
        rate = links
        if len(host_sizes) > 1 and kind == "all-to-all":
            # A replica sends separately to each replica of other hosts, through its own card.
            return NETWORK_LATENCY_S + (size - fewest) / size * nbytes / min(links, card)
        if len(host_sizes) > 1:
            # Between hosts a ring uses the cards of all its replicas on a host.
            latency = NETWORK_LATENCY_S
            rate = min(links, fewest * card)
        # An all-reduce sends (n − 1)/n of the array twice; an all-gather n − 1 arrays.
        share = {
            "all-reduce": 2 * (size - 1) / size,
            "all-gather": size - 1,
            "collective-permute": 1,
        }
        return latency + share.get(kind, (size - 1) / size) * nbytes / rate

    def group(self) -> Group:
        """Returns a group for compilation only: programs can be lowered, arrays are shapes."""
        return _compiling(self.mesh(), self.size, lambda ranks: self.group())

    def mesh(self) -> Mesh:
        """Returns the devices as a mesh with one axis."""
        return replica_mesh(self._devices())

    def _devices(self) -> list[Any]:
        missing = missing_compiler()
        if missing:
            raise RuntimeError(missing)
        try:
            return topologies.get_topology_desc(
                platform="cuda",
                topology_name="",
                target_config=self.chip.description,
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
    return Target(name, CHIPS[match[1]], int(match[2] or 1), int(match[3]))


def _compiling(mesh: Mesh, size: int, make_subgroup: Callable[[Sequence[int]], Group]) -> Group:
    """Returns the group of a single process without devices, with shapes in place of arrays."""

    def place(tree: PyTree, spec: PartitionSpec) -> Any:
        del spec
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)

    placement = mesh_placement(mesh, AXIS)
    communicator = axis_communicator(AXIS, size, "gpu")
    transport = mesh_transport(placement, communicator)
    return Group(
        rank=0,
        size=size,
        backend="nccl",
        placement=placement._replace(place=place, feed=lambda rows: rows),
        communicator=communicator,
        transport=transport,
        hosts=Hosts((0,), all_gather=lambda data: data[None], broadcast=lambda data, root: data),
        make_subgroup=make_subgroup,
        levels=mesh_levels(placement, communicator, "gpu", lambda: (0,) * size),
    )
