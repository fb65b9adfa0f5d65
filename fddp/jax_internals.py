"""What fddp reads of JAX that no version of it promises: the one place to mend when a new JAX has changed inside.

Elsewhere a program is only inputs, constants, equations and outputs, as `jax.extend.core` names them, and an equation
its inputs, its outputs and a name. `tests/test_jax_internals.py` tries everything here on the JAX that is installed.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax._src import config, core, distributed, mesh

# As in jax.extend.core, whose package loads all of Pallas with it.
from jax._src.core import ClosedJaxpr as ClosedJaxpr
from jax._src.core import Jaxpr as Jaxpr
from jax._src.core import JaxprEqn as JaxprEqn
from jax._src.core import Literal as Literal
from jax._src.core import Var as Var
from jax._src.core import jaxpr_as_fun as jaxpr_as_fun
from jax._src.core import jaxprs_in_params
from jax.sharding import AbstractMesh, Mesh, NamedSharding

Item = TypeVar("Item")
Args = ParamSpec("Args")
Result = TypeVar("Result")

# Equations that call one program, by the name of their primitive: those that only wrap it,
WRAPPERS = {"jit", "pjit", "closed_call", "core_call"}
REMATERIALISED = {"remat2", "checkpoint"}
# and those whose derivative is not that of their contents: it may reach an input that the value does not come from.
OWN_DERIVATIVE = {"custom_jvp_call", "custom_vjp_call"}
CALLS = WRAPPERS | REMATERIALISED | OWN_DERIVATIVE

COLLECTIVES = {
    *("psum", "psum2", "psum_invariant", "pmax", "pmin", "ppermute", "pgather"),
    *("all_gather", "all_gather_invariant", "all_to_all", "reduce_scatter", "ragged_all_to_all"),
}

# Settings without a name of their own in `jax.config`: meshes, metadata, where to compute.
UNNAMED = tuple(
    setting
    for module in (config, mesh)
    for setting in vars(module).values()
    if isinstance(setting, config.config_ext.Config) and not isinstance(setting, config.State)
)
# It says which thread may start programs of several processes: to take it along would be to switch it off.
LEFT = {"jax_thread_guard"}

# XLA of JAX 0.11.1 writes all-reduces of a few MiB between GPUs of a host as kernels of its own, and computes nothing
# beside those of 16 bits, which hides no traffic. Earlier ones do not know the option that leaves them to NCCL.
OVERLAP_OPTIONS: dict[str, str] = (
    {"xla_gpu_experimental_use_collective_kernels": ""} if jax.__version_info__ >= (0, 11, 1) else {}
)


### Programs


def make_program(
    like: ClosedJaxpr,
    eqns: Sequence[JaxprEqn],
    inputs: Sequence[Var],
    outputs: Sequence[Any],
    consts: Mapping[Var, Any] | None = None,
) -> ClosedJaxpr:
    """Makes a program of equations. Relies on the constructors of programs and on `debug_info.with_unknown_names`.

    Args:
      like: the program they come from.
      eqns: the equations, in an order in which they can run.
      inputs: the variables that its arguments are.
      outputs: the variables and literals that it returns.
      consts: the other variables that no equation makes, and their values.

    Returns:
      The program.
    """
    consts = consts or {}
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    names = like.jaxpr.debug_info.with_unknown_names()
    jaxpr = Jaxpr(list(consts), list(inputs), list(outputs), list(eqns), effects, names)
    return ClosedJaxpr(jaxpr, list(consts.values()))


def new_variable(like: Var) -> Var:
    """A variable of its own for a value of the same form. Relies on the constructor of variables."""
    return Var(like.aval)


def over_axes(
    f: Callable[..., Any], *, in_specs: Any, out_specs: Any, axis_names: set[str], mesh: Mesh | None = None
) -> Any:
    """`jax.shard_map` without `check_vma`, for arrays without elements too.

    The compiler of JAX 0.11 crashes if such an array goes in beside others: inside it is made anew.
    """

    @wraps(f)
    def spread(*args: Any) -> Any:
        leaves, treedef = jax.tree.flatten(args)
        specs = jax.tree.leaves(jax.tree.broadcast(in_specs, args))
        full = [k for k, x in enumerate(leaves) if x.size]
        around = mesh or jax.sharding.get_abstract_mesh()
        sizes = AbstractMesh(around.axis_sizes, around.axis_names)

        @wraps(f)
        def inside(*given: Any) -> Any:
            local = dict(zip(full, given))
            for k in set(range(len(leaves))) - set(full):
                local[k] = jnp.zeros(NamedSharding(sizes, specs[k]).shard_shape(leaves[k].shape), leaves[k].dtype)
            return f(*treedef.unflatten(local[k] for k in range(len(leaves))))

        over = partial(jax.shard_map, mesh=mesh, out_specs=out_specs, axis_names=axis_names, check_vma=False)
        return over(inside, in_specs=tuple(specs[k] for k in full))(*(leaves[k] for k in full))

    return spread


### Equations


def acts(eqn: JaxprEqn) -> bool:
    """Whether an equation does something beside making values: a print, a message. Relies on `effects`."""
    return bool(eqn.effects)


def inner_programs(eqn: JaxprEqn) -> list[Jaxpr]:
    """All programs that are parts of an equation. Relies on `jaxprs_in_params`."""
    return list(jaxprs_in_params(eqn.params))


def callbacks(eqn: JaxprEqn) -> list[Any]:
    """The host's functions that an equation calls. Relies on the parameter `callback`."""
    return [eqn.params["callback"]] if "callback" in eqn.params else []


def called_program(eqn: JaxprEqn) -> ClosedJaxpr:
    """The program that one of `CALLS` calls. Relies on the parameters `jaxpr` and `call_jaxpr`, open or closed."""
    inner = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
    return inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())


def run_again(eqn: JaxprEqn, args: Sequence[Any]) -> Any:
    """An equation with other arguments, under its own rules. Relies on `bind` and `get_bind_params`."""
    return eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))


def rematerialised(f: Callable[..., Any], eqn: JaxprEqn) -> Callable[..., Any]:
    """A function as one of `REMATERIALISED` calls its own. Relies on the parameters `prevent_cse` and `policy`."""
    return jax.checkpoint(f, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])


def branches(eqn: JaxprEqn) -> tuple[ClosedJaxpr, ...]:
    """The programs of a `cond`, whose first input is the number of the one to run. Relies on `branches`."""
    return tuple(eqn.params["branches"])


def is_for_platforms(eqn: JaxprEqn) -> bool:
    """Whether a `cond` has branches for platforms, not for data. Relies on the parameter `branches_platforms`."""
    return eqn.params.get("branches_platforms") is not None


def scan_body(eqn: JaxprEqn) -> tuple[ClosedJaxpr, dict[str, Any]]:
    """The program of a round, and `length`, `reverse`, `unroll` as `jax.lax.scan` takes them. Relies on their names."""
    return eqn.params["jaxpr"], {name: eqn.params[name] for name in ("length", "reverse", "unroll")}


def while_programs(eqn: JaxprEqn) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """The test and the body of a `while`. Relies on the parameters `cond_jaxpr` and `body_jaxpr`."""
    return eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]


def loop_parts(eqn: JaxprEqn, items: Iterable[Item]) -> tuple[list[Item], list[Item], list[Item]]:
    """Parts what belongs to the inputs of a loop. Relies on the parameters that count them.

    Args:
      eqn: a `scan` or a `while`.
      items: one for each of its inputs.

    Returns:
      Those of a `scan`'s constants, carry and rows; of a `while`'s constants of the test, constants of the body and
      carry.
    """
    if "ft_in" in eqn.params:  # a scan's, since 0.11: a tree of constants, one of carry and one of rows
        first, second, _ = map(len, eqn.params["ft_in"].unpack())
    else:
        names = {"scan": ("num_consts", "num_carry"), "while": ("cond_nconsts", "body_nconsts")}
        first, second = (eqn.params[name] for name in names[eqn.primitive.name])
    items = list(items)
    return items[:first], items[first : first + second], items[first + second :]


### Configuration that holds in one thread


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


def transformed() -> bool:
    """Whether this is inside of a function that JAX traces: under jit, grad, vmap and their like."""
    return not core.trace_state_clean()


def _set(setting: Any, value: Any) -> Any:
    """A context in which a setting has a value in this thread."""
    # A named one may have more to do than to be set: the guards of transfers are kept elsewhere too.
    return setting(value) if isinstance(setting, config.State) else config.UserContext(setting, value)


### Processes


def coordination_client() -> Any:
    """This process's client of the service that `jax.distributed` started. Relies on `jax._src.distributed`."""
    return distributed.global_state.client


### Profiles


class Event(NamedTuple):
    """Something that the profiler saw."""

    name: str
    start_ns: float
    duration_ns: float
    stats: dict[str, Any]
    """What else is told of it."""


class Plane(NamedTuple):
    """Where events happened: the host, or an accelerator."""

    name: str
    events: tuple[Event, ...]


def read_profile(path: str | Path) -> tuple[Plane, ...]:
    """Reads the file that `jax.profiler.trace` has written. Relies on the attributes of planes, lines and events.

    jaxlib 0.11 makes the type of an event's stats when it first needs it, and leaves its module out. Of that Python
    3.12 warns, and where warnings are errors jaxlib ends the process: this one must be none.

    Args:
      path: the file, `*.xplane.pb`.

    Returns:
      Its planes.
    """

    def event(seen: Any) -> Event:
        return Event(seen.name, seen.start_ns, seen.duration_ns, dict(seen.stats))

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "builtin type .* has no __module__ attribute", DeprecationWarning)
        return tuple(
            Plane(plane.name, tuple(event(seen) for line in plane.lines for seen in line.events))
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes
        )
