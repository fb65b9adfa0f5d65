"""Removes the meshes of a loss from the programs of a replica of a single device."""

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

from fddp.jax_internals.jaxprs import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    inner_programs,
    new_variable,
)

# Equations that return their input in another layout.
CONSTRAINTS = {"sharding_constraint", "reshard"}
NO_MESH = AbstractMesh((), ())
# JAX's errors about meshes: a spec without a mesh, a wrong type of axis, an ambiguous sharding.
MESH_ERRORS = (core.ShardingTypeError, ValueError, RuntimeError)


def without_meshes(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Removes all shardings from a program of a single device.

    Constants on a mesh are replaced by this process's first copies; a constant in parts is a
    ValueError. Relies on `sharding` of types, on the parameters of equations that hold shardings,
    and on `replace`.
    """
    return _closed(closed, {})


def inner_map(closed: ClosedJaxpr | Jaxpr) -> str:
    """Returns the source line of the first `jax.shard_map`, or "". Relies on `summarize`."""
    for eqn in closed.eqns:
        if eqn.primitive.name == "shard_map":
            return source_info_util.summarize(eqn.source_info)
        for place in filter(None, map(inner_map, inner_programs(eqn))):
            return place
    return ""


def line_of_mesh(error: BaseException) -> str:
    """Returns the user's line of an error about a mesh or a sharding; "" for other errors.

    Relies on `is_user_filename`, and on the words of JAX's errors.
    """
    lines = traceback.extract_tb(error.__traceback__)
    line = [line for line in lines if source_info_util.is_user_filename(line.filename)][-1]
    # A line of fddp is that of a derivative, or of fddp's own error.
    in_fddp = Path(__file__).parents[1] in Path(line.filename).parents
    if in_fddp and isinstance(error, core.ShardingTypeError):
        return "a loss or an optimizer"
    if not in_fddp and re.search("mesh|[Ss]hard|PartitionSpec", str(error)):
        return f"{line.filename}:{line.lineno}"
    return ""


def _rewritten(jaxpr: Jaxpr, cache: dict[Jaxpr, Jaxpr]) -> Jaxpr:
    """Returns a program without meshes; itself if it names none.

    The cache keeps an inner program a single object, so that it is compiled only once.
    """
    if jaxpr in cache:
        return cache[jaxpr]
    renamed = dict[Var, Any]()

    def atom(old: Any) -> Any:
        aval = _type(old.aval)
        if isinstance(old, Literal):
            value = _one_copy(old.val)
            if value is old.val:
                return old
            return Literal(value, aval)
        if old not in renamed and aval is not old.aval:
            renamed[old] = new_variable(old, aval)
        return renamed.setdefault(old, old)

    def parameter(old: Any, eqn: JaxprEqn) -> Any:
        if isinstance(old, ClosedJaxpr):
            return _closed(old, cache)
        if isinstance(old, Jaxpr):
            return _rewritten(old, cache)
        if type(old) in (tuple, list):
            new = [parameter(x, eqn) for x in old]
            if not _same(new, old):
                return type(old)(new)
        if isinstance(old, NamedSharding):
            if "in_shardings" in eqn.params:
                return UNSPECIFIED
            return None
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
        if not _same(new, (*eqn.invars, *eqn.outvars, *eqn.params.values())):
            eqn = eqn.replace(invars=inputs, outvars=outputs, params=params)
        eqns.append(eqn)
    ends["outvars"] = list(map(atom, jaxpr.outvars))
    new = jaxpr
    before = {name: getattr(jaxpr, name) for name in ends}
    if not _same(eqns, jaxpr.eqns) or not all(map(_same, ends.values(), before.values())):
        new = jaxpr.replace(**ends, eqns=eqns)
    return cache.setdefault(jaxpr, new)


def _closed(closed: ClosedJaxpr, cache: dict[Jaxpr, Jaxpr]) -> ClosedJaxpr:
    jaxpr = _rewritten(closed.jaxpr, cache)
    consts = list(map(_one_copy, closed.consts))
    if jaxpr is closed.jaxpr and _same(consts, closed.consts):
        return closed
    return ClosedJaxpr(jaxpr, consts)


def _same(new: Sequence[object], old: Sequence[object]) -> bool:
    return len(new) == len(old) and all(map(operator.is_, new, old))


def _type(aval: Any) -> Any:
    """Returns a type without its mesh."""
    if not isinstance(aval, core.ShapedArray) or aval.sharding.mesh.empty:
        return aval
    return aval.update(sharding=NamedSharding(NO_MESH, PartitionSpec(*[None] * aval.ndim)))


def _one_copy(x: Any) -> Any:
    """Returns this process's first copy of an array on a mesh, and other values unchanged."""
    if not isinstance(x, jax.Array) or isinstance(x, core.Tracer):
        return x
    if not isinstance(x.sharding, NamedSharding) and len(x.sharding.device_set) == 1:
        return x
    if x.is_fully_replicated:
        return x.addressable_data(0)
    raise ValueError(
        f"a loss or an optimizer closes over {x.dtype}{list(x.shape)}, which lies in parts "
        f"({x.sharding}), and each replica needs the whole array: close over "
        "jax.device_put(array, NamedSharding(mesh, PartitionSpec()))."
    )
