"""JAX's configuration, as it holds in one thread; and XLA's."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import jax
from jax._src import config, core, mesh
from jax._src.interpreters import partial_eval

Args = ParamSpec("Args")
Result = TypeVar("Result")

# Settings without a name of their own in `jax.config`: meshes, metadata, where to compute.
UNNAMED = tuple(
    setting
    for module in (config, mesh)
    for setting in vars(module).values()
    if isinstance(setting, config.config_ext.Config) and not isinstance(setting, config.State)
)
# Those of `jax.set_mesh`, which JAX 0.12 has in another module.
MESH = tuple(
    setting
    for module in (config, mesh)
    for name in ("abstract_mesh_context_manager", "device_context")
    if (setting := getattr(module, name, None))
)
# It says which thread may start programs of several processes: to take it along would be to switch it off.
LEFT = {"jax_thread_guard"}

# XLA of JAX 0.11.1 writes all-reduces of a few MiB between GPUs of a host as kernels of its own, and computes nothing
# beside those of 16 bits, which hides no traffic. Earlier ones do not know the option that leaves them to NCCL.
OVERLAP_OPTIONS: dict[str, str] = (
    {"xla_gpu_experimental_use_collective_kernels": ""} if jax.__version_info__ >= (0, 11, 1) else {}
)


# What a round of a loop sends starts in that round and is awaited in the next one, and what it needs is gathered in the
# round before, only if XLA is told to. JAX 0.11.1 came with other names for it.
PIPELINED_ROUNDS: dict[str, str] = (
    {
        f"xla_gpu_pipeline_{kind}": "COLLECTIVE_PIPELINING_MODE_ON"
        for kind in ("all_reduce", "all_gather", "reduce_scatter")
    }
    if jax.__version_info__ >= (0, 11, 1)
    else {f"xla_gpu_enable_pipelined_{kind}": "True" for kind in ("all_reduce", "all_gather", "reduce_scatter")}
)


def with_configuration(f: Callable[Args, Result]) -> Callable[Args, Result]:
    """Makes a function that works in every thread under JAX's configuration as it is here and now.

    `with jax.enable_x64(True)` and all contexts of its kind hold only in the thread that enters them. Contexts of
    `jax.make_user_context` are not taken along: JAX keeps no list of them.

    Args:
      f: a function.

    Returns:
      The function, to be called in any thread.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from concurrent.futures import ThreadPoolExecutor
      >>> ask = lambda: jnp.zeros(()).dtype.name
      >>> with ThreadPoolExecutor(1) as thread, jax.enable_x64(True):
      ...     [thread.submit(f).result() for f in (ask, with_configuration(ask))]
      ['float32', 'float64']
    """
    named = [state for name, state in config.config_states.items() if name not in LEFT]
    values = [(setting, setting.get_local()) for setting in (*named, *UNNAMED)]
    here = [(setting, value) for setting, value in values if value is not config.config_ext.unset]

    @wraps(f)
    def call(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        with ExitStack() as stack:
            for setting, value in here:
                stack.enter_context(_set(setting, value))
            return f(*args, **kwargs)

    return call


# What is transferred inside counts as asked for, as by `jax.device_put`: `jax.transfer_guard("disallow")` lets it pass.
asked_for = config.explicit_device_put_scope


def without_jit() -> bool:
    """Whether this is inside of `jax.disable_jit()`."""
    return config.disable_jit.value


def compilation_cache() -> str | None:
    """The folder of JAX's compilation cache; None: it is not used."""
    return config.compilation_cache_dir.value if config.enable_compilation_cache.value else None


def cache_small_programs() -> float:
    """Lets JAX's compilation cache take programs of 0.1 s, unless the user has set a limit; gives the limit in seconds.

    Stages of a step compile in less than JAX's limit of 1 s. Relies on `Config.values` and on JAX's name of the limit.
    """
    name = "jax_persistent_cache_min_compile_time_secs"
    if compilation_cache() and jax.config.values[name] == 1.0 and name.upper() not in os.environ:
        jax.config.update(name, 0.1)
    return jax.config.values[name]


def transformed() -> bool:
    """Whether this is inside of a function that JAX traces: under jit, grad, vmap and their like."""
    return not core.trace_state_clean()


def staged_out(arguments: Any) -> bool:
    """Whether JAX traces this call for a program that runs later, as under jit, but not for grad, vmap or shard_map.

    Relies on `jax._src.interpreters.partial_eval`.
    """
    tracers = [x for x in jax.tree.leaves(arguments) if isinstance(x, core.Tracer)]
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return not manual and all(isinstance(x, partial_eval.DynamicJaxprTracer) for x in tracers)


def context_mesh() -> jax.sharding.Mesh:
    """The mesh that `jax.set_mesh` has set, or one without axes. Relies on `jax._src.mesh`."""
    return mesh.get_concrete_mesh()


def without_context_mesh(f: Callable[Args, Result]) -> Callable[Args, Result]:
    """Makes a function that runs as if no mesh was set: its programs name their own.

    JAX refuses an array or a `jax.shard_map` of another mesh than that of `jax.set_mesh`. While JAX
    traces, the mesh stays: the function is then a part of the user's program. Relies on the settings
    that `jax.set_mesh` has.
    """

    @wraps(f)
    def call(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        if transformed() or jax.sharding.get_abstract_mesh().empty:
            return f(*args, **kwargs)
        # Left unset, as before any mesh was set: JAX would compile anew for a mesh without axes.
        before = [setting.swap_local(config.config_ext.unset) for setting in MESH]
        try:
            return f(*args, **kwargs)
        finally:
            for setting, value in zip(MESH, before):
                setting.set_local(value)

    return call


def _set(setting: Any, value: Any) -> Any:
    """A context in which a setting has a value in this thread."""
    # A named one may have more to do than to be set: the guards of transfers are kept elsewhere too.
    return setting(value) if isinstance(setting, config.State) else config.UserContext(setting, value)
