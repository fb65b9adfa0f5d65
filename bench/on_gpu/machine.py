"""The GPUs of this machine, the models for them, and the variables of a part."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax

from fddp.analysis.targets import CHIPS
from fddp.runtime import installed

ROOT = Path(__file__).parents[2]
# module:preset:rows of a replica, the quickest to compile first: models without enough time
# comes last. Of the GPT of 360 million parameters 8 layers of 32 are written out, and all are under
# a scan.
LARGE = ("mlp:1024:2048", "scanned:360m:4", "bert:base:32", "resnet:50:64", "gpt:360m@8:4")
MIDDLE = ("mlp:1024:512", "scanned:bytes:32", "bert:base:8", "resnet:18:32", "gpt:bytes:32")
TINY = ("mlp:tiny:16", "scanned:tiny:4", "bert:tiny:4", "resnet:tiny:8", "gpt:tiny:4")
LARGE_BYTES = 60e9
RANKS = 8  # at most
# On CPUs a part compiles for longer than it computes: JAX's own switch leaves optimizations out,
# and before JAX 0.11 XLA:CPU also has kernels that take longer to make than all the rest of a small
# program.
REHEARSAL = {
    "JAX_NUM_CPU_DEVICES": "1",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false" if jax.__version_info__ < (0, 11) else "",
}
# The model of the ranks: module:preset:rows of each, and a cap that makes several buckets of it.
RANKED = "gpt:tiny:8"
CAP_MB = 0.1


class Machine(NamedTuple):
    """The description of a machine that a part starts with."""

    platform: str
    """"gpu", or "cpu" where the parts are rehearsed."""
    kind: str
    gpus: int
    memory_bytes: int
    nccl: str
    """The version of the package; empty if there is none."""
    quick: bool

    @property
    def on_gpu(self) -> bool:
        """True if there is a GPU."""
        return self.platform == "gpu"

    @property
    def chip(self) -> str | None:
        """The name under which fddp can compile for the GPU, or None. On CPUs an H100 stands in."""
        return (
            next((chip for chip in CHIPS if chip in self.kind.lower()), None)
            if self.on_gpu
            else "h100"
        )

    @property
    def models(self) -> tuple[str, ...]:
        """Workloads that fit."""
        if self.quick:
            return TINY
        return LARGE if self.memory_bytes >= LARGE_BYTES else MIDDLE

    @property
    def held(self) -> str:
        """The model whose state is held in shards, with few rows: ranks may share a GPU."""
        return self.models[0] if self.quick else self.scanned

    @property
    def scanned(self) -> str:
        """Scanned layers, with few rows."""
        return f"{self.models[1].rpartition(':')[0]}:2"

    @property
    def timed(self) -> tuple[str, ...]:
        """The models with meaningful times; a rehearsal takes two, to be short."""
        return (self.models[0], self.models[-1]) if self.quick else self.models

    @property
    def ranks(self) -> int:
        """One for each GPU, and two where there is one GPU or none."""
        return max(2, min(RANKS, self.gpus))

    @property
    def rounds(self) -> int:
        """The number of times that something is timed."""
        return 3 if self.quick else 25


def look(quick: bool) -> Machine:
    """Reads the devices of this process from JAX; the process holds them as long as it lives."""
    devices = jax.local_devices()
    on_gpu = devices[0].platform in ("gpu", "cuda")
    stats = devices[0].memory_stats() or {}
    nccl = next(filter(None, (installed(f"nvidia-nccl-cu{version}") for version in (13, 12))), "")
    return Machine(
        platform="gpu" if on_gpu else "cpu",
        kind=devices[0].device_kind,
        gpus=len(devices) if on_gpu else 0,
        memory_bytes=int(stats.get("bytes_limit", 0)),
        nccl=nccl,
        quick=quick or not on_gpu,
    )


def variables(env: Mapping[str, str], cache: str) -> dict[str, str]:
    """The environment of a part: the checkout first, memory taken as it is needed, programs
    compiled once for all into the folder `cache`."""
    paths = [str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
    # JAX refuses the old name of this variable together with the new one.
    inherited = {x: env[x] for x in env if x != "XLA_PYTHON_CLIENT_MEM_FRACTION"}
    return inherited | {
        "PYTHONPATH": os.pathsep.join(paths),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_CLIENT_MEM_FRACTION": "0.9",
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }


def one_gpu(env: Mapping[str, str]) -> dict[str, str]:
    """Variables that show a process only the first of its visible GPUs."""
    return {"CUDA_VISIBLE_DEVICES": env.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}


def shared(machine: Machine, env: Mapping[str, str]) -> dict[str, str]:
    """The variables of ranks: a GPU each, or one GPU for all, which NCCL allows by a flag from 2.30
    on."""
    # Two threads of XLA:CPU. And no folder of programs: in those of plain JAX the ranks share the
    # work of compiling, and one that finds its program there would leave the others waiting.
    nccl_variables = {"NPROC": "2", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    if not machine.on_gpu or machine.gpus > 1:
        return nccl_variables
    fraction = f"{0.8 / machine.ranks:.2f}"
    sharing = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "XLA_CLIENT_MEM_FRACTION": fraction}
    return {**nccl_variables, **one_gpu(env), **sharing}
