"""JAX's configuration of a thread."""

import math
import os
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import jax
from jax._src import config, core, mesh
from jax._src.interpreters import partial_eval

Args = ParamSpec("Args")
Result = TypeVar("Result")

# The settings of `jax.set_mesh`; JAX 0.12 has them in another module.
MESH = tuple(
    setting
    for module in (config, mesh)
    for name in ("abstract_mesh_context_manager", "device_context")
    if (setting := getattr(module, name, None))
)
# Transfers inside this context count as explicit, as by `jax.device_put`:
# `jax.transfer_guard("disallow")` permits them.
asked_for = config.explicit_device_put_scope


def without_jit() -> bool:
    """True inside `jax.disable_jit()`."""
    return config.disable_jit.value


def trace_settings() -> tuple[Any, ...]:
    """Returns the settings that a trace depends on, such as the precision of matrix products.

    Relies on `config.trace_context`, the key of JAX's caches of traces. Axes and meshes of programs
    around the trace do not count.
    """
    around = core.AxisEnv, mesh.AbstractMesh, type(None)
    return tuple(x for x in config.trace_context() if not isinstance(x, around))


def compilation_cache() -> str | None:
    """Returns the folder of JAX's compilation cache, or None if it is not used."""
    if not config.enable_compilation_cache.value:
        return None
    return config.compilation_cache_dir.value


def cache_small_programs() -> float:
    """Lowers the limit of JAX's compilation cache to 0.1 s unless the user set one; returns it.

    Programs of small models compile in less than JAX's limit of 1 s. Relies on `Config.values` and
    on JAX's name of the limit.
    """
    name = "jax_persistent_cache_min_compile_time_secs"
    if compilation_cache() and jax.config.values[name] == 1.0 and name.upper() not in os.environ:
        jax.config.update(name, 0.1)
    return jax.config.values[name]


def transformed() -> bool:
    """True inside a function that JAX traces, as under jit, grad or vmap."""
    return not core.trace_state_clean()


def staged_out(arguments: Any) -> bool:
    """True if JAX traces a call for a later program, as jit does, but not grad, vmap or shard_map.

    Relies on `jax._src.interpreters.partial_eval`.
    """
    tracers = [x for x in jax.tree.leaves(arguments) if isinstance(x, core.Tracer)]
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return not manual and all(isinstance(x, partial_eval.DynamicJaxprTracer) for x in tracers)


def context_mesh() -> jax.sharding.Mesh:
    """Returns the mesh of `jax.set_mesh`, or a mesh without axes. Relies on `jax._src.mesh`."""
    return mesh.get_concrete_mesh()


def without_context_mesh(f: Callable[Args, Result]) -> Callable[Args, Result]:
    """Makes a function that runs as if no mesh were set, since its programs name their meshes.

    JAX refuses arrays and a `jax.shard_map` of another mesh than that of `jax.set_mesh`. While JAX
    traces, the mesh stays: the function is then a part of the user's program. Relies on the
    settings of `jax.set_mesh`.
    """

    @wraps(f)
    def call(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        if transformed() or jax.sharding.get_abstract_mesh().empty:
            return f(*args, **kwargs)
        # Unset, as before any `set_mesh`: JAX would compile again for a mesh without axes.
        before = [setting.swap_local(config.config_ext.unset) for setting in MESH]
        try:
            return f(*args, **kwargs)
        finally:
            for setting, value in zip(MESH, before):
                setting.set_local(value)

    return call


# By default XLA merges all buckets into one all-reduce, scatter or gather: on CPU without a limit,
# on GPU up to 30 MiB. XLA:CPU drops barriers before it orders instructions; ranks with different
# programs would then call collectives in different orders, and offsets would be constants of their
# kernels. It compiles loops of less than 1 KiB as small calls, and aborts at a barrier inside of
# such a loop (`jax.checkpoint` in a scan).
CPU_OPTIONS = {
    "xla_disable_hlo_passes": "cpu-all-reduce-combiner,cse_barrier_expander,"
    "small-while-loop-hoisting"
}
# XLA of JAX 0.11.1 has its own kernels for all-reduces of a few MiB between GPUs of a host, and
# computes nothing during those of 16 bits: their traffic is not hidden. The option leaves them to
# NCCL; earlier versions do not know it.
OVERLAP_OPTIONS = dict[str, str]()
# With these options a loop awaits the messages of a round in the next round, and gathers the inputs
# of a round in the round before. JAX 0.11.1 renamed them.
PIPELINED = "xla_gpu_enable_pipelined_{}"
ON = "True"
if jax.__version_info__ >= (0, 11, 1):
    OVERLAP_OPTIONS["xla_gpu_experimental_use_collective_kernels"] = ""
    PIPELINED = "xla_gpu_pipeline_{}"
    ON = "COLLECTIVE_PIPELINING_MODE_ON"
PIPELINED_ROUNDS = dict.fromkeys(
    map(PIPELINED.format, ("all_reduce", "all_gather", "reduce_scatter")), ON
)
# On GPUs before Hopper XLA's scheduler overlaps nothing by default. By default ranks also share the
# timing of kernels when they compile. A rank that compiles alone (a shorter batch, another branch,
# a program that the others found in JAX's cache) would wait for them forever.
GPU_OPTIONS = {
    "xla_gpu_all_reduce_combine_threshold_bytes": "0",
    "xla_gpu_reduce_scatter_combine_threshold_bytes": "0",
    "xla_gpu_all_gather_combine_threshold_bytes": "0",
    "xla_gpu_enable_latency_hiding_scheduler": "True",
    "xla_gpu_shard_autotuning": "False",
    **PIPELINED_ROUNDS,
    **OVERLAP_OPTIONS,
}


def compile_to_read(lowered: Any) -> jax.stages.Compiled:
    """Compiles a program to read its text or memory, such as a program for absent GPUs.

    JAX would write a program for absent devices into its compilation cache, and warn at each later
    run that it cannot be loaded. Relies on the backend that a lowered program names.
    """
    if lowered._lowering.compile_args["backend"].runtime_type != "compile_only_runtime":
        return lowered.compile()
    with config.persistent_cache_min_compile_time_secs(math.inf):
        return lowered.compile()
