"""The placement of replicas: the devices on which their programs run, and their arrays lie.

All rooms above this one are written for one replica. `program` turns a function of one replica into a program that runs
on all of them, and `place` puts a process's own arrays where programs take them. Replicas lie along one axis of a mesh;
along its other axes the user places arrays as any JAX array is placed.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding

from fddp.jax_internals import (
    MESH_ERRORS,
    ClosedJaxpr,
    asked_for,
    inner_map,
    jaxpr_as_fun,
    line_of_mesh,
    part_shape,
    parts_here,
    resharded,
    without_jit,
    without_meshes,
    without_refs,
)

# The spec of an array that is equal on all replicas.
REPLICATED = PartitionSpec()
# The view of a replica of one device: a mesh without axes.
WHOLE = AbstractMesh((), ())
# The name of the replicas' axis, where the user has no mesh with another one.
AXIS = "replica"


class Placement(NamedTuple):
    """The devices of a group's replicas, as programs and arrays see them."""

    axis_name: str | None
    """Name of the replicas' axis, for collectives inside a loss; None where they have nobody to speak to."""
    axis_size: int
    """Number of replicas along it."""
    on_mesh: bool
    """Whether they are devices of one mesh, over which an array may lie; else each has arrays of its own."""
    per_replica: PartitionSpec
    """Spec of an array whose rows differ between replicas: concatenated over replicas along dim 0."""
    replicas_in_array: int
    """The number of replicas whose rows such an array holds."""
    shares_cores: bool
    """Whether several devices of this process share its cores: one step must then end before the next begins."""
    overlaps: bool
    """Whether XLA computes while it communicates, inside of one program: on GPUs it does."""
    view: AbstractMesh
    """The mesh as the function of a replica of several devices sees it: XLA partitions along the other axes."""
    spec: Callable[[Any], PartitionSpec]
    """Reads how the user placed an array along those axes: gives its `PartitionSpec`."""
    program: Callable[..., jax.stages.Wrapped]
    """`program(f, in_specs, out_specs, donate=())`: compiles `f`, a function of one replica, for all of them."""
    place: Callable[[Any, PartitionSpec], Any]
    """`place(tree, spec)`: puts this process's arrays (for `per_replica` its own rows) where a program takes them."""
    holds: Callable[[Sequence[Any]], bool]
    """Whether arrays lie where `place(arrays, REPLICATED)` would bring them, and have not been given away."""
    each: Callable[[Any], tuple[Any, ...]]
    """Splits an array into one for each of this process's replicas, on its own device, for programs of it alone."""
    together: Callable[[Sequence[Any], PartitionSpec], Any]
    """Joins the arrays of this process's replicas into one: the inverse of `each`."""
    feed: Callable[[Any], Any]
    """Makes this process's rows the arguments of one program; `place`, which is slower, serves several programs."""

    def __repr__(self) -> str:
        return f"Placement(axis_name={self.axis_name!r})"

    @property
    def other_axes(self) -> tuple[str, ...]:
        """The axes along which the devices of one replica lie."""
        return self.view.auto_axes

    @property
    def devices_of_replica(self) -> int:
        """The number of devices of one replica."""
        return math.prod(self.view.shape[axis] for axis in self.other_axes)


def trace(placement: Placement, f: Callable[..., Any], *args: Any) -> tuple[ClosedJaxpr, Any]:
    """Traces a function of one replica: gives its program, and the shapes of its results; nothing runs.

    Raises:
      ValueError: the function needs devices that a replica of one device has not.
    """
    axes = [(placement.axis_name, placement.axis_size)] if placement.axis_name else []
    try:
        with jax.sharding.use_abstract_mesh(placement.view):
            closed, made = jax.make_jaxpr(f, axis_env=axes, return_shape=True)(*jax.tree.map(_form, args))
    except MESH_ERRORS as error:
        if placement.other_axes or not (line := line_of_mesh(error)):
            raise
        words = f" JAX reports: {error}"
    else:
        if placement.other_axes:
            return closed, made
        line, words = inner_map(closed) if placement.on_mesh else "", ""
        if not line:
            return without_meshes(without_refs(closed, axes)), made
    # Not in there: JAX's own words would be shown above these.
    raise ValueError(
        f"{line}: a replica is one device without a mesh. Leave out the line, or close over whole arrays; "
        f"fddp.mesh_group gives a replica several devices.{words}"
    )


def as_program(placement: Placement, f: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function that runs its traced program: where its values lie is left out."""

    @wraps(f)
    def run(*args: Any) -> Any:
        if without_jit() or placement.other_axes:
            return f(*args)
        closed, made = trace(placement, f, *args)
        return jax.tree.unflatten(jax.tree.structure(made), jaxpr_as_fun(closed)(*jax.tree.leaves(args)))

    return run


def trace_again(placement: Placement, closed: ClosedJaxpr, f: Callable[..., Any], *args: Any) -> ClosedJaxpr:
    """Traces a function that is given the inputs of a program, and other arguments behind them."""
    forms = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in closed.in_avals]
    return trace(placement, f, *forms, *args)[0]


def _form(x: Any) -> jax.ShapeDtypeStruct:
    """Gives shape and dtype of an array as a replica sees it: without its sharding, whose mesh is not the view."""
    kind = jax.typeof(x)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type)


def add_replica_dim(tree: Any) -> Any:
    """Adds a first dim, along which replicas lie, to a replica's own arrays as they leave its program."""
    return jax.tree.map(lambda x: x[None], tree)


def drop_replica_dim(tree: Any) -> Any:
    """Drops the first dim, along which replicas lie: the inverse of `add_replica_dim`."""
    return jax.tree.map(lambda x: x[0], tree)


def of_one_replica(tree: Any, replicas: int) -> Any:
    """Shapes and dtypes that one replica sees of arrays that hold all replicas' rows along dim 0; dtypes are JAX's."""

    def form(x: Any) -> jax.ShapeDtypeStruct:
        shape = (x.shape[0] // replicas, *x.shape[1:]) if x.shape else ()
        return jax.ShapeDtypeStruct(shape, jax.typeof(x).dtype)

    return jax.tree.map(form, tree)


def specs(placement: Placement, tree: Any) -> Any:
    """Makes a tree that has for each leaf the `PartitionSpec` over the other axes, along which its parts lie."""
    return jax.tree.map(placement.spec, tree)


def device_parts(placement: Placement, tree: Any) -> Any:
    """Shapes and dtypes of the parts that one device holds of each array."""

    def part(x: Any) -> jax.ShapeDtypeStruct:
        kept = part_shape(placement.view, placement.spec(x), jnp.shape(x))
        return jax.ShapeDtypeStruct(kept, jnp.result_type(x))

    return jax.tree.map(part, tree)


def laid_out(placement: Placement, tree: Any, where: Any) -> Any:
    """Tells XLA, inside a program, where the parts of each array are to lie.

    Args:
      placement: the devices of the replicas.
      tree: arrays.
      where: a tree of the same structure, from `specs`.

    Returns:
      The arrays.
    """
    if not placement.other_axes:
        return tree
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, where)


def held_alike(sharding: Sharding, arrays: Sequence[Any]) -> bool:
    """Whether all of these are JAX arrays with this sharding that have not been donated."""
    # Each step asks this of each leaf of its state, so it must be fast: a list's `count` looks for the same object
    # before it compares.
    held = (
        all(issubclass(kind, jax.Array) for kind in set(map(type, arrays)))
        and [x.sharding for x in arrays].count(sharding) == len(arrays)
        and True not in [x.is_deleted() for x in arrays]
    )
    if not held or len(sharding.addressable_devices) == 1:
        return held
    return True not in [part.is_deleted() for x in arrays for part in parts_here(x)]


def placed_alike(tree: Any, sharding: Sharding) -> Any:
    """Puts all of this process's arrays where a sharding says."""
    return jax.tree.map(lambda x: placed(x, sharding), tree)


def placed(x: Any, sharding: Sharding) -> Any:
    if (isinstance(x, jax.Array) and x.sharding == sharding) or isinstance(x, jax.ShapeDtypeStruct):
        return x
    if not hasattr(x, "dtype"):  # a number of Python's
        x = np.asarray(x, jnp.result_type(x))
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        words = from_process(sharding, jax.random.key_data(x))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    return from_process(sharding, x)


def from_process(sharding: Sharding, x: Any) -> jax.Array:
    """Makes an array over several processes from this one's part; an explicit transfer, to JAX's transfer guard."""
    with asked_for():
        x = whole_here(x) if sharding.is_fully_replicated else x
        return jax.make_array_from_process_local_data(sharding, np.asarray(jax.device_get(x)))


def whole_here(x: Any) -> Any:
    """Replicates an array that lies in parts on several processes; all of them call it.

    Anything else is returned unchanged.
    """
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return x
    sharding: Any = x.sharding
    return _replicating(sharding.mesh)(x)


@cache
def _replicating(mesh: Any) -> Any:
    """Makes a program for each mesh, not for each array."""
    everywhere = NamedSharding(mesh, REPLICATED)
    return jax.jit(lambda x: resharded(x, REPLICATED), out_shardings=everywhere)
