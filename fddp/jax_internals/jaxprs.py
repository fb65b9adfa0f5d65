"""Programs and their equations: constructors, evaluation, and the parameters of equations."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar

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
from jax._src.effects import ordered_effects
from jax.sharding import Mesh

from fddp.jax_internals.arrays import part_shape, resharded

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr as ClosedJaxpr
else:
    # Relies on `Jaxpr`, which holds its constants since JAX 0.12: there it is the type of both.
    ClosedJaxpr = getattr(core, "ClosedJaxpr", Jaxpr)

Call = TypeVar("Call", bound=Callable[..., Any])

# Primitives that call a single program. First those that only wrap it,
WRAPPERS = {"jit", "pjit", "closed_call", "core_call", "eval_jaxpr"}
REMATERIALISED = {"remat2", "checkpoint"}
# and those with their own derivative, which may reach inputs that the value does not depend on.
OWN_DERIVATIVE = {"custom_jvp_call", "custom_vjp_call"}
CALLS = WRAPPERS | REMATERIALISED | OWN_DERIVATIVE


def make_program(
    like: ClosedJaxpr,
    eqns: Sequence[JaxprEqn],
    inputs: Sequence[Var],
    outputs: Sequence[Var | Literal],
    consts: Mapping[Var, Any] | None = None,
) -> ClosedJaxpr:
    """Makes a program of equations of the program `like`, in an order in which they can run.

    Relies on the constructors of programs and on `debug_info.with_unknown_names`.
    """
    consts = consts or {}
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    names = like.jaxpr.debug_info.with_unknown_names()
    jaxpr = Jaxpr(list(consts), list(inputs), list(outputs), list(eqns), effects, names)
    return ClosedJaxpr(jaxpr, list(consts.values()))


def new_variable(like: Var, aval: core.AbstractValue | None = None) -> Var:
    """Makes a variable of type `aval`, or of that of `like`. Relies on the constructor of `Var`."""
    return Var(aval or like.aval)


def named_like(f: Callable[..., Any]) -> Callable[[Call], Call]:
    """`functools.wraps`, but JAX does not look inside: it would print all arrays of a partial."""

    def name(call: Call) -> Call:
        del wraps(f)(call).__wrapped__
        return call

    return name


def over_axes(
    f: Callable[..., Any],
    *,
    in_specs: Any,
    out_specs: Any,
    axis_names: set[str],
    mesh: Mesh | None = None,
) -> Any:
    """`jax.shard_map` without `check_vma`, which also takes arrays without elements.

    The compiler of JAX 0.11 crashes on such an argument next to others, so it is recreated inside.
    """

    @named_like(f)
    def spread(*args: Any) -> Any:
        leaves, treedef = jax.tree.flatten(args)
        specs = jax.tree.leaves(jax.tree.broadcast(in_specs, args))
        nonempty = [k for k, x in enumerate(leaves) if x.size]
        used_mesh = mesh or jax.sharding.get_abstract_mesh()

        @named_like(f)
        def inside(*local_arrays: Any) -> Any:
            local = dict(zip(nonempty, local_arrays))
            for k in set(range(len(leaves))) - set(nonempty):
                local[k] = jnp.zeros(
                    part_shape(used_mesh, specs[k], leaves[k].shape), leaves[k].dtype
                )
            return f(*treedef.unflatten(local[k] for k in range(len(leaves))))

        shard_map = partial(
            jax.shard_map, mesh=mesh, out_specs=out_specs, axis_names=axis_names, check_vma=False
        )
        arrays = [resharded(leaves[k], specs[k], mesh) for k in nonempty]
        return shard_map(inside, in_specs=tuple(specs[k] for k in nonempty))(*arrays)

    return spread


### Equations


def acts(eqn: JaxprEqn) -> bool:
    """True if an equation has an effect, such as a print or a message."""
    return acts_alike(eqn, eqn)


def acts_alike(eqn: JaxprEqn, earlier: JaxprEqn) -> bool:
    """True if two equations have an effect in common, so that their order counts.

    Relies on `effects`, which also lists the axes that an equation reads.
    """
    common = set(eqn.effects) & set(earlier.effects)  # mpi4jax gives dicts
    return any(not isinstance(effect, core.NamedAxisEffect) for effect in common)


def ordered(closed: ClosedJaxpr) -> list[str]:
    """Names the effects that JAX runs in order. Relies on `ordered_effects`."""
    return [type(x).__name__ for x in closed.effects if ordered_effects.contains(x)]


def inner_programs(eqn: JaxprEqn) -> list[Jaxpr]:
    """Returns all programs inside an equation. Relies on `jaxprs_in_params`."""
    return list(jaxprs_in_params(eqn.params))


def called_program(eqn: JaxprEqn) -> ClosedJaxpr:
    """Returns the program that an equation of `CALLS` calls.

    Relies on the parameters `jaxpr` and `call_jaxpr`, open or closed.
    """
    inner: Any = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if isinstance(inner, ClosedJaxpr):
        return inner
    return ClosedJaxpr(inner, ())


def run_again(eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """Applies an equation to `args`, under its name and in its context (such as `compute_on`).

    A rule of a derivative gets JAX arrays, as in JAX, also for constants of the program. As JAX's
    own evaluation of programs, it does not look for NaNs. Relies on `bind`, `get_bind_params`,
    `multiple_results` and `ctx`.
    """
    if eqn.primitive.name in OWN_DERIVATIVE:
        args = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in args]
    with jax.debug_nans(False), named_as(eqn), eqn.ctx.manager:
        outputs = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
    return outputs if eqn.primitive.multiple_results else [outputs]


def scope_of(eqn: JaxprEqn) -> str:
    """Returns the path of named scopes around an equation. Relies on `source_info`."""
    return str(eqn.source_info.name_stack)


def named_as(eqn: JaxprEqn) -> AbstractContextManager[None]:
    """Makes a context that appends an equation's name to the current one and sets its source line.

    Relies on `source_info` and on `user_context`, as JAX's own evaluation of programs does.
    """
    name = source_info_util.current_name_stack() + eqn.source_info.name_stack
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=name)


def parameters(eqn: JaxprEqn) -> dict[str, Any]:
    """Returns the parameters of an equation of a primitive of fddp's own. Relies on `params`."""
    return eqn.params


def rematerialised(f: Callable[..., Any], eqn: JaxprEqn) -> Callable[..., Any]:
    """Wraps a function as an equation of `REMATERIALISED` wraps its program.

    Relies on the parameters `prevent_cse` and `policy`.
    """
    return jax.checkpoint(f, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])


def barrier_before(eqn: JaxprEqn) -> ClosedJaxpr:
    """Makes the program that passes its inputs on to an equation of `REMATERIALISED`.

    Its barrier keeps XLA from merging the recomputation with the first computation. Relies on the
    parameters `differentiated` and `prevent_cse`, and on the barrier in JAX's lowering of them.
    """

    def hand_on(*args: Any) -> Any:
        if eqn.params["differentiated"] and eqn.params["prevent_cse"]:
            return jax.lax.optimization_barrier(args)
        return args

    return jax.make_jaxpr(hand_on)(*called_program(eqn).in_avals)


def branches(eqn: JaxprEqn) -> tuple[ClosedJaxpr, ...]:
    """Returns the programs of a `cond`, whose first input is an index. Relies on `branches`."""
    return tuple(eqn.params["branches"])


def is_for_platforms(eqn: JaxprEqn) -> bool:
    """True if the branches of a `cond` are for platforms. Relies on `branches_platforms`."""
    return eqn.params.get("branches_platforms") is not None


def joined_dim(eqn: JaxprEqn) -> int:
    """The dim of a `concatenate` or `split`. Relies on the parameters `dimension` and `axis`."""
    return eqn.params["dimension" if eqn.primitive.name == "concatenate" else "axis"]


def pads_layers(eqn: JaxprEqn) -> bool:
    """True for a `pad` that leaves the first dim unchanged. Relies on `padding_config`."""
    return eqn.primitive.name == "pad" and tuple(eqn.params["padding_config"][0]) == (0, 0, 0)


def dims_of_reduction(eqn: JaxprEqn) -> tuple[int, ...]:
    """Returns the dims that a sum or a maximum reduces. Relies on the parameter `axes`."""
    return tuple(eqn.params["axes"])


def of_a_vector(eqn: JaxprEqn) -> JaxprEqn:
    """Returns the same reduction for a vector. Relies on the parameter `axes`."""
    return eqn.replace(params={**eqn.params, "axes": (0,)})


def contracted_dims(eqn: JaxprEqn) -> tuple[int, ...]:
    """Returns the contracted dims of a product's first factor. Relies on `dimension_numbers`."""
    (first, _), _ = eqn.params["dimension_numbers"]
    return tuple(first)


def scattered_rows(eqn: JaxprEqn) -> int:
    """Returns how many rows of its operand a scatter can write at most; all if it indexes none.

    Relies on the parameter `dimension_numbers` of `scatter`, and on indices along all dims but the
    last.
    """
    operand_dims, index_dims = (list(getattr(var.aval, "shape", ())) for var in eqn.invars[:2])
    dims = eqn.params["dimension_numbers"]
    if 0 in dims.scatter_dims_to_operand_dims and 0 in dims.inserted_window_dims:
        return math.prod(index_dims[:-1])
    return operand_dims[0]


def permutes(eqn: JaxprEqn) -> bool:
    """True for a reshape that reorders the elements. Relies on the parameter `dimensions`."""
    return eqn.primitive.name == "reshape" and eqn.params["dimensions"] is not None
