"""Programs of one device, without the meshes that a loss names: a replica of one device has none of them."""

import operator
import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax._src import core, source_info_util
from jax._src.named_sharding import UNSPECIFIED
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from fddp.jax_internals.jaxprs import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, inner_programs, new_variable

# Equations that return their input, laid along a mesh.
CONSTRAINTS = {"sharding_constraint", "reshard"}
NO_MESH = AbstractMesh((), ())
# What JAX raises of meshes: a spec without a mesh, axes of another type, an ambiguous cut of arrays in parts.
MESH_ERRORS = (core.ShardingTypeError, ValueError, RuntimeError)


def without_meshes(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Leaves out where the constants and values of a program lie.

    Relies on `sharding` of types, on the parameters of equations that hold shardings, and on `replace`.

    Args:
      closed: a program of one device.

    Returns:
      The program. Its constants that lay on a mesh are this process's first copies.

    Raises:
      ValueError: a constant lies in parts.
    """
    return _closed(closed, {})


def inner_map(closed: ClosedJaxpr | Jaxpr) -> str:
    """The place in the source of the first `jax.shard_map` of a program, or "". Relies on `summarize`."""
    for eqn in closed.eqns:
        if eqn.primitive.name == "shard_map":
            return source_info_util.summarize(eqn.source_info)
        for place in filter(None, map(inner_map, inner_programs(eqn))):
            return place
    return ""


def line_of_mesh(error: BaseException) -> str:
    """The user's line on whose mesh or sharding JAX raised an error; "" for other errors.

    Relies on `is_user_filename`, and on the words of JAX's errors.
    """
    lines = traceback.extract_tb(error.__traceback__)
    line = [line for line in lines if source_info_util.is_user_filename(line.filename)][-1]
    if Path(__file__).parents[1] in Path(line.filename).parents:  # a derivative, or an error of fddp
        return "a loss or an optimizer" if isinstance(error, core.ShardingTypeError) else ""
    return f"{line.filename}:{line.lineno}" if re.search("mesh|[Ss]hard|PartitionSpec", str(error)) else ""


def _rewritten(jaxpr: Jaxpr, known: dict[Jaxpr, Jaxpr]) -> Jaxpr:
    """The program without meshes: itself, if it names none. An inner program is rewritten once, and compiled once."""
    if jaxpr in known:
        return known[jaxpr]
    renamed = dict[Var, Any]()

    def atom(old: Any) -> Any:
        aval = _type(old.aval)
        if isinstance(old, Literal):
            value = _one_copy(old.val)
            return old if value is old.val else Literal(value, aval)
        return renamed.setdefault(old, old if aval is old.aval else new_variable(old, aval))

    def parameter(old: Any, eqn: JaxprEqn) -> Any:
        if isinstance(old, ClosedJaxpr):
            return _closed(old, known)
        if isinstance(old, Jaxpr):
            return _rewritten(old, known)
        if type(old) in (tuple, list):
            new = [parameter(x, eqn) for x in old]
            return old if _same(new, old) else type(old)(new)
        if isinstance(old, NamedSharding):
            return UNSPECIFIED if "in_shardings" in eqn.params else None
        return old

    ends = {name: [atom(var) for var in getattr(jaxpr, name)] for name in ("constvars", "invars")}
    eqns = list[JaxprEqn]()
    for eqn in jaxpr.eqns:
        inputs = list(map(atom, eqn.invars))
        if eqn.primitive.name in CONSTRAINTS:
            renamed[eqn.outvars[0]] = inputs[0]
            continue
        params = eqn.params
        if eqn.primitive.name != "shard_map":
            params = {name: parameter(value, eqn) for name, value in params.items()}
        outputs = list(map(atom, eqn.outvars))
        new = (*inputs, *outputs, *params.values())
        same = _same(new, (*eqn.invars, *eqn.outvars, *eqn.params.values()))
        eqns.append(eqn if same else eqn.replace(invars=inputs, outvars=outputs, params=params))
    ends["outvars"] = list(map(atom, jaxpr.outvars))
    same = _same(eqns, jaxpr.eqns) and all(_same(new, getattr(jaxpr, name)) for name, new in ends.items())
    return known.setdefault(jaxpr, jaxpr if same else jaxpr.replace(**ends, eqns=eqns))


def _closed(closed: ClosedJaxpr, known: dict[Jaxpr, Jaxpr]) -> ClosedJaxpr:
    jaxpr = _rewritten(closed.jaxpr, known)
    consts = list(map(_one_copy, closed.consts))
    same = jaxpr is closed.jaxpr and _same(consts, closed.consts)
    return closed if same else ClosedJaxpr(jaxpr, consts)


def _same(new: Sequence[Any], old: Sequence[Any]) -> bool:
    return len(new) == len(old) and all(map(operator.is_, new, old))


def _type(aval: Any) -> Any:
    """The type of a value that lies on no mesh."""
    if not isinstance(aval, core.ShapedArray) or aval.sharding.mesh.empty:
        return aval
    return aval.update(sharding=NamedSharding(NO_MESH, PartitionSpec(*[None] * aval.ndim)))


def _one_copy(x: Any) -> Any:
    """An array that lies on a mesh, as one device of this process has it; anything else is returned unchanged."""
    if not isinstance(x, jax.Array) or isinstance(x, core.Tracer):
        return x
    if not isinstance(x.sharding, NamedSharding) and len(x.sharding.device_set) == 1:
        return x
    if x.is_fully_replicated:
        return x.addressable_data(0)
    raise ValueError(
        f"a loss or an optimizer closes over {x.dtype}{list(x.shape)}, which lies in parts ({x.sharding}), and each "
        "replica needs the whole array: close over jax.device_put(array, NamedSharding(mesh, PartitionSpec()))."
    )
