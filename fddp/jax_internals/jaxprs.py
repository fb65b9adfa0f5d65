"""Programs and their equations: how they are made, and what lies in an equation's parameters."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax._src import core, source_info_util

# As in jax.extend.core, whose package loads all of Pallas with it.
from jax._src.core import Jaxpr as Jaxpr
from jax._src.core import JaxprEqn as JaxprEqn
from jax._src.core import Literal as Literal
from jax._src.core import Var as Var
from jax._src.core import jaxpr_as_fun as jaxpr_as_fun
from jax._src.core import jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr_consts
from jax.sharding import Mesh

from fddp.jax_internals.arrays import part_shape, resharded

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr as ClosedJaxpr
else:
    # Relies on `Jaxpr`, which holds its constants since JAX 0.12: there it is the type of both.
    ClosedJaxpr = getattr(core, "ClosedJaxpr", Jaxpr)

# Equations that call one program, by the name of their primitive: those that only wrap it,
WRAPPERS = {"jit", "pjit", "closed_call", "core_call"}
REMATERIALISED = {"remat2", "checkpoint"}
# and those whose derivative is not that of their contents: it may reach an input that the value does not come from.
OWN_DERIVATIVE = {"custom_jvp_call", "custom_vjp_call"}
CALLS = WRAPPERS | REMATERIALISED | OWN_DERIVATIVE


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


def without_dead_code(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, tuple[int, ...]]:
    """Leaves out of a program, and of the loops in it, what no output needs. Relies on `dce_jaxpr_consts`.

    Args:
      closed: the program.

    Returns:
      The program, without the inputs that it does not need; and the numbers of those that it does.
    """
    jaxpr, consts, inputs = dce_jaxpr_consts(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    left = [x for x, used in zip(closed.consts, consts) if used]
    return ClosedJaxpr(jaxpr, left), tuple(number for number, used in enumerate(inputs) if used)


def new_variable(like: Var, aval: Any = None) -> Var:
    """A variable for a value of the same form, or of the form `aval`. Relies on the constructor of variables."""
    return Var(aval or like.aval)


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

        @wraps(f)
        def inside(*given: Any) -> Any:
            local = dict(zip(full, given))
            for k in set(range(len(leaves))) - set(full):
                local[k] = jnp.zeros(part_shape(around, specs[k], leaves[k].shape), leaves[k].dtype)
            return f(*treedef.unflatten(local[k] for k in range(len(leaves))))

        over = partial(jax.shard_map, mesh=mesh, out_specs=out_specs, axis_names=axis_names, check_vma=False)
        arrays = [resharded(leaves[k], specs[k], mesh) for k in full]
        return over(inside, in_specs=tuple(specs[k] for k in full))(*arrays)

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


def run_as_it_is(program: ClosedJaxpr, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """Runs an equation of a program under its own name and place in the source; `args` are its inputs in order."""
    inputs: dict[Var, Any] = {v: x for v, x in zip(eqn.invars, args) if not isinstance(v, Literal)}
    return jaxpr_as_fun(make_program(program, [eqn], list(inputs), eqn.outvars))(*inputs.values())


def run_again(eqn: JaxprEqn, args: Sequence[Any]) -> Any:
    """An equation with other arguments, under its own rules. Relies on `bind` and `get_bind_params`."""
    return eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))


def named_as(eqn: JaxprEqn) -> AbstractContextManager[None]:
    """A context in which equations have the name, and the place in the source, of another one behind the name here.

    Relies on `source_info` and on `user_context`, as JAX's own evaluation of programs does.
    """
    name = source_info_util.current_name_stack() + eqn.source_info.name_stack
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=name)


def rematerialised(f: Callable[..., Any], eqn: JaxprEqn) -> Callable[..., Any]:
    """A function as one of `REMATERIALISED` calls its own. Relies on the parameters `prevent_cse` and `policy`."""
    return jax.checkpoint(f, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])


def barrier_before(eqn: JaxprEqn) -> ClosedJaxpr:
    """The program that hands one of `REMATERIALISED` its inputs, so that XLA does compute it twice.

    Relies on the parameters `differentiated` and `prevent_cse`, and on the barrier with which JAX lowers them.
    """
    twice = eqn.params["differentiated"] and eqn.params["prevent_cse"]
    hand_on = jax.lax.optimization_barrier if twice else tuple
    return jax.make_jaxpr(lambda *args: hand_on(args))(*called_program(eqn).in_avals)


def branches(eqn: JaxprEqn) -> tuple[ClosedJaxpr, ...]:
    """The programs of a `cond`, whose first input is the number of the one to run. Relies on `branches`."""
    return tuple(eqn.params["branches"])


def is_for_platforms(eqn: JaxprEqn) -> bool:
    """Whether a `cond` has branches for platforms, not for data. Relies on the parameter `branches_platforms`."""
    return eqn.params.get("branches_platforms") is not None


def along_first_dim(eqn: JaxprEqn) -> tuple[int, int] | None:
    """Begin and end, if it takes a slice along the first dim alone. Relies on the parameters of `slice`."""
    if eqn.primitive.name != "slice" or set(eqn.params["strides"] or [1]) != {1}:
        return None
    starts = eqn.params["start_indices"]
    limits = eqn.params["limit_indices"]
    operand: Any = eqn.invars[0].aval
    whole = not any(starts[1:]) and tuple(limits[1:]) == tuple(operand.shape[1:])
    return (starts[0], limits[0]) if starts and whole else None


def joins_first_dim(eqn: JaxprEqn) -> bool:
    """Whether it is a `concatenate` along the first dim. Relies on the parameter `dimension`."""
    return eqn.primitive.name == "concatenate" and eqn.params["dimension"] == 0


def pads_rows(eqn: JaxprEqn) -> bool:
    """Whether it is a `pad` of each row by itself. Relies on the parameter `padding_config`."""
    return eqn.primitive.name == "pad" and tuple(eqn.params["padding_config"][0]) == (0, 0, 0)


def dims_of_reduction(eqn: JaxprEqn) -> tuple[int, ...]:
    """Over which dims an equation sums, or takes the largest. Relies on the parameter `axes`."""
    return tuple(eqn.params["axes"])


def of_a_vector(eqn: JaxprEqn) -> JaxprEqn:
    """The same reduction, of a vector. Relies on the parameter `axes`."""
    return eqn.replace(params={**eqn.params, "axes": (0,)})


def contracted_dims(eqn: JaxprEqn) -> tuple[int, ...]:
    """Over which dims of its first factor a product sums. Relies on the parameter `dimension_numbers`."""
    (first, _), _ = eqn.params["dimension_numbers"]
    return tuple(first)


def scattered_rows(eqn: JaxprEqn) -> int:
    """The number of rows that a scatter can write to, along the first dim of its operand; all, if it chooses none.

    Relies on the parameter `dimension_numbers` of `scatter`, and that places lie along all dims but the last.
    """
    into, places = (list(getattr(var.aval, "shape", ())) for var in eqn.invars[:2])
    dims = eqn.params["dimension_numbers"]
    chosen = 0 in dims.scatter_dims_to_operand_dims and 0 in dims.inserted_window_dims
    return math.prod(places[:-1]) if chosen else into[0]


def permutes(eqn: JaxprEqn) -> bool:
    """Whether a reshape takes the elements in another order. Relies on the parameter `dimensions` of `reshape`."""
    return eqn.primitive.name == "reshape" and eqn.params["dimensions"] is not None
