"""Machines to compile for that are not here: so many hosts with so many GPUs of one kind.

XLA's compiler for NVIDIA's GPUs needs none of them: a description of the chip is enough. It comes with the package
`jax-cuda13-pjrt` (the extra `audit`).

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

from fddp.analysis.auditing.gpus import CHIPS, Chip
from fddp.comm import (
    AXIS,
    Group,
    Hosts,
    Recovery,
    axis_communicator,
    mesh_levels,
    mesh_placement,
    mesh_transport,
    replica_mesh,
)
from fddp.runtime import missing_compiler

# Seconds until the first byte of an all-reduce is there, inside a host and across hosts: NCCL's order of magnitude.
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
        """The number of replicas: one for each GPU."""
        return self.hosts * self.gpus

    def seconds(self, kind: str, nbytes: int, groups: Sequence[Sequence[int]] = ()) -> float:
        """Seconds that a collective takes at best: on a ring, but from each to each in an all-to-all.

        Args:
          kind: "all-reduce", say.
          nbytes: what each replica gives to it: its own part of what an all-gather makes, all that a reduce-scatter or
            an all-to-all divides.
          groups: the replicas that talk among themselves, or the pairs of a permutation, as `Collective.devices` has
            them; none: all are one group. Replicas are numbered host by host.

        Returns:
          Seconds; those of the slowest group.
        """
        return max(self._seconds(kind, nbytes, group) for group in groups or [range(self.size)])

    def _seconds(self, kind: str, nbytes: int, group: Sequence[int]) -> float:
        size = len(group)
        on_host = Counter(replica // self.gpus for replica in group)
        fewest = min(on_host.values())  # of the group, on one host
        links = self.chip.links * self.chip.link_bytes_per_s
        card = self.chip.network_bytes_per_s
        latency = LATENCY_S
        rate = links
        if len(on_host) > 1 and kind == "all-to-all":
            # A replica sends to each replica of other hosts by itself, through its own card.
            return NETWORK_LATENCY_S + (size - fewest) / size * nbytes / min(links, card)
        if len(on_host) > 1:
            # Where a ring leaves a host it goes through the cards of all of its replicas there.
            latency = NETWORK_LATENCY_S
            rate = min(links, fewest * card)
        # An all-reduce sends all but a part 1/n round twice; an all-gather sends each replica's whole array to all.
        share = {"all-reduce": 2 * (size - 1) / size, "all-gather": size - 1, "collective-permute": 1}
        return latency + share.get(kind, (size - 1) / size) * nbytes / rate

    def group(self) -> Group:
        """The replicas of this machine, as one process sees them that only compiles.

        Returns:
          A group whose programs can be lowered and compiled, and whose arrays are shapes.

        Raises:
          RuntimeError: the compiler is missing, or is not the one that belongs to this JAX.
        """
        return _compiling(self.mesh(), self.size, lambda ranks: self.group())

    def mesh(self) -> Mesh:
        """The devices, to compile for.

        Returns:
          A mesh of one axis.

        Raises:
          RuntimeError: as `group`.
        """
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
        except Exception as error:  # whatever the plugin says
            raise RuntimeError(
                f"XLA cannot compile for {self.name} here: {error}. Where there is no GPU, start Python with "
                "JAX_PLATFORMS=cpu, or import fddp before JAX computes anything."
            ) from error


def read_target(name: str) -> Target:
    """Reads the name of a target.

    Args:
      name: a chip and how many: "h100:8" is one host of eight, "h100:2x8" two hosts.

    Returns:
      The target.

    Raises:
      ValueError: an unknown chip, or no number of GPUs.
    """
    found = re.fullmatch(r"(\w+):(?:([1-9]\d*)x)?([1-9]\d*)", name) if isinstance(name, str) else None
    if found is None or found[1] not in CHIPS:
        raise ValueError(
            f"target must be a chip ({', '.join(CHIPS)}) and how many: 'h100:8' for one host, 'h100:2x8' for two; "
            f"got {name!r}."
        )
    return Target(name, CHIPS[found[1]], int(found[2] or 1), int(found[3]))


def _compiling(mesh: Mesh, size: int, make_subgroup: Callable[[Any], Group]) -> Group:
    """A group that is alone and puts nothing anywhere: arrays are their shapes."""

    def place(tree: Any, spec: PartitionSpec) -> Any:
        del spec
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)

    placement = mesh_placement(mesh, AXIS)
    communicator = axis_communicator(AXIS, size, "gpu")
    transport = mesh_transport(placement, communicator)
    return Group(
        rank=0,
        processes=1,
        size=size,
        backend="nccl",
        global_ranks=(0,),
        placement=placement._replace(place=place, feed=lambda rows: rows),
        communicator=communicator,
        transport=transport,
        hosts=Hosts(all_gather=lambda data: data[None], broadcast=lambda data, root: data),
        recovery=Recovery(lambda place, seconds: True),
        make_subgroup=make_subgroup,
        clone=lambda count: (transport,),
        levels=mesh_levels(placement, communicator, "gpu", lambda: (0,) * size),
    )
