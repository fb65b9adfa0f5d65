"""Data of GPUs: the description for XLA's compiler, and the peak rates for estimates.

Sources: NVIDIA's data sheets and architecture papers of A100 80GB SXM, H100 SXM and H200 SXM; the
fields of XLA's `GpuTargetConfigProto`. Rates are peaks of dense products; networks are those of
NVIDIA's own eight-GPU hosts.
"""

from dataclasses import dataclass, replace

# XLA's numbers (PrimitiveType) of the dtypes of tensor cores, by their names in HLO.
NUMBERS = {
    "bytes": (2, 6),
    "f16": (10,),
    "bf16": (16,),
    "f32": (11,),
    "f64": (12,),
    "f8": (19, 20, 23, 24, 25, 28, 29, 33, 35, 36),
}


@dataclass(frozen=True)
class Chip:
    """One kind of GPU."""

    name: str
    capability: tuple[int, int]
    cores: int
    """Streaming multiprocessors, of four tensor cores each."""
    clock_ghz: float
    tensor_clock_ghz: float
    scalar_units: int
    """Float32 units of a multiprocessor."""
    tensor_ops: dict[str, int]
    """Multiply-adds of a tensor core per clock, by dtype; float32 runs as TF32, XLA's default."""
    memory_bytes: int
    memory_bytes_per_s: float
    memory_clock_mhz: int
    cache_bytes: int
    shared_bytes: int
    """Shared memory of a multiprocessor; a block may have 1 KiB less."""
    links: int
    """NVLinks."""
    link_bytes_per_s: float
    """Bytes per second of an NVLink, in one direction."""
    network_bytes_per_s: float
    """Bytes per second of each GPU's network card, in one direction."""

    def flops_per_s(self, dtype: str) -> float:
        """Returns the peak FLOP/s of dense products in an HLO dtype; unknown ones count as f32."""
        ops = self.tensor_ops.get(dtype) or self.tensor_ops.get(dtype[:2]) or self.tensor_ops["f32"]
        return 2 * 4 * self.cores * self.tensor_clock_ghz * 1e9 * ops

    @property
    def description(self) -> str:
        """The chip as XLA's `GpuTargetConfigProto`, in text form."""
        major, minor = self.capability
        ecosystem = ""
        version = f"{major}.{minor}"
        if major >= 9:
            ecosystem = "feature_extension: ACCELERATED_FEATURES"
            version += "a"
        # PrimitiveType: (units, operations of each per clock)
        full = self.scalar_units
        half = self.scalar_units // 2
        vectors = {4: (half, 1), 8: (half, 1), 12: (half, 1)}
        vectors |= {10: (full, 2), 11: (full, 1), 16: (full, 2)}
        clock = self.clock_ghz
        scalars = " ".join(_rate(key, clock, *vectors[key]) for key in sorted(vectors))
        clock = self.tensor_clock_ghz
        rates = list[str]()
        for name, ops in self.tensor_ops.items():
            rates += [_rate(key, clock, 4, ops) for key in NUMBERS[name]]
        tensors = " ".join(rates)
        return f"""\
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_bytes} \
shared_memory_per_block_optin: {self.shared_bytes - 1024}
  threads_per_core_limit: 2048 core_count: {self.cores} fpus_per_core: {self.scalar_units}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {self.memory_bytes_per_s:.0f} l2_cache_size: {self.cache_bytes}
  clock_rate_ghz: {self.clock_ghz} device_memory_size: {self.memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} {ecosystem} }}
  scalar_unit_description {{ {scalars} }}
  matrix_unit_description {{ {tensors} }}
  device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability {version}"
  model_str: "sm_{version} with {self.memory_bytes}B RAM, {self.cores} cores, \
{self.clock_ghz * 1e6:.0f}KHz clock, {self.memory_clock_mhz * 1000}KHz mem clock, \
{self.cache_bytes}B L2$"
  device_address_bits: 64 pcie_bandwidth: 34359738368 ecc_enabled: true
  name: "{self.name}" driver_version: "13.0.0" runtime_version: "12.8.0" \
compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0" cub_version: "3.1.2"
  device_interconnect_info {{ active_links: {self.links} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{self.name}"
"""


def _rate(key: int, clock_ghz: float, units: int, ops: int) -> str:
    value = f"clock_rate_ghz: {clock_ghz} units_per_core: {units} ops_per_clock: {ops}"
    return f"rate_infos {{ key: {key} value {{ {value} }} }}"


H100 = Chip(
    name="NVIDIA H100 80GB HBM3",
    capability=(9, 0),
    cores=132,
    clock_ghz=1.98,
    tensor_clock_ghz=1.8295201,
    scalar_units=128,
    tensor_ops={"bytes": 1024, "f8": 1024, "f16": 512, "bf16": 512, "f32": 256, "f64": 32},
    memory_bytes=84942979072,
    memory_bytes_per_s=3.35232e12,
    memory_clock_mhz=2619,
    cache_bytes=50 * 2**20,
    shared_bytes=228 * 2**10,
    links=18,
    link_bytes_per_s=25e9,
    network_bytes_per_s=50e9,
)

CHIPS = {
    "a100": Chip(
        name="NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        cores=108,
        clock_ghz=1.41,
        tensor_clock_ghz=1.41,
        scalar_units=64,
        tensor_ops={"bytes": 512, "f16": 256, "bf16": 256, "f32": 128, "f64": 16},
        memory_bytes=84942979072,
        memory_bytes_per_s=2.039e12,
        memory_clock_mhz=1593,
        cache_bytes=40 * 2**20,
        shared_bytes=164 * 2**10,
        links=12,
        link_bytes_per_s=25e9,
        network_bytes_per_s=25e9,
    ),
    "h100": H100,
    "h200": replace(
        H100,
        name="NVIDIA H200 141GB HBM3e",
        memory_bytes=151397597184,
        memory_bytes_per_s=4.8e12,
        memory_clock_mhz=3750,
    ),
}
