"""The placement of replicas: the devices of their programs and arrays.

All rooms above this one are written for one replica. `program` compiles a function of one replica
for all replicas, and `place` moves a process's arrays to the devices of programs. Replicas lie
along one axis of a mesh; the user places arrays along its other axes like any JAX array.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import PyTree

from fddp.comm.donation import Donation
from fddp.jax_internals import (
    MESH_ERRORS,
    ClosedJaxpr,
    asked_for,
    inner_map,
    jaxpr_as_fun,
    line_of_mesh,
    named_like,
    part_shape,
    resharded,
    without_jit,
    without_meshes,
    without_refs,
)

# The spec of an array with equal values on all replicas.
REPLICATED = PartitionSpec()
# The mesh in the view of a replica of one device: no axes.
NO_AXES = AbstractMesh((), ())
# The default name of the replicas' axis; a user's mesh may have another.
AXIS = "replica"

Args = ParamSpec("Args")
Result = TypeVar("Result")
# Caches of values on devices, which become invalid when the processes of a job change.
_caches = list[Any]()


def device_cache(f: Callable[Args, Result]) -> Callable[Args, Result]:
    """Decorates a function like `functools.cache`, until `forget_device_caches`."""
    cached: Any = cache(f)
    _caches.append(cached)
    return cached


def forget_device_caches() -> None:
    """Drops all values: they hold devices, and so XLA's client with its threads."""
    for cached in _caches:
        cached.cache_clear()


class Placement(NamedTuple):
    """Devices of a group's replicas, and the functions that place programs and arrays on them."""

    axis_name: str | None
    """Name of the replicas' axis, for collectives inside a loss; None: no collectives."""
    axis_size: int
    """Number of replicas along the axis."""
    on_mesh: bool
    """True if the replicas are devices of one mesh, with arrays over all; else each has its own
    arrays."""
    per_replica: PartitionSpec
    """Spec of an array with unequal rows on replicas: concatenated over replicas along dim 0."""
    shares_cores: bool
    """True if several devices of this process share its cores: a step must end before the next
    begins."""
    overlaps: bool
    """True if XLA overlaps computation and communication inside one program, as on GPUs."""
    view: AbstractMesh
    """The mesh in the view of a replica of several devices: XLA partitions along the other axes."""
    spec: Callable[[Any], PartitionSpec]
    """Reads the spec of an array along the other axes, as placed by the user."""
    program: Callable[..., jax.stages.Wrapped]
    """`program(f, in_specs, out_specs, donate=())`: compiles `f`, a function of one replica, for
    all replicas."""
    place: Callable[[Any, PartitionSpec], Any]
    """`place(tree, spec)`: moves this process's arrays (for `per_replica` its rows) to a program's
    devices."""
    donation: Donation
    """The check of arrays that already are where `place(arrays, REPLICATED)` moves them."""
    per_device: Callable[[Any], tuple[Any, ...]]
    """Splits an array into one per replica of this process, on its device, for programs of one
    replica."""
    join_devices: Callable[[Sequence[Any], PartitionSpec], Any]
    """Joins the arrays of this process's replicas into one array: the inverse of `per_device`."""
    as_program_rows: Callable[[Any], Any]
    """Makes this process's rows arguments of one program; `place` is slower, and serves several
    programs."""

    def retained(self, tree: PyTree) -> Any:
        """Copies NumPy arrays, which JAX may read after a program's call has returned."""
        if self.shares_cores:  # callers wait for the program
            return tree
        return jax.tree.map(lambda x: np.array(x) if isinstance(x, np.ndarray) else x, tree)

    def __repr__(self) -> str:
        return f"Placement(axis_name={self.axis_name!r})"

    @property
    def replicas_in_array(self) -> int:
        """Number of replicas with rows in an array of unequal rows."""
        return self.axis_size if self.on_mesh else 1

    @property
    def other_axes(self) -> tuple[str, ...]:
        """Axes of the devices of one replica."""
        return self.view.auto_axes

    @property
    def devices_of_replica(self) -> int:
        """Number of devices of one replica."""
        return math.prod(self.view.shape[axis] for axis in self.other_axes)


def trace(placement: Placement, f: Callable[..., Any], *args: Any) -> tuple[ClosedJaxpr, Any]:
    """Traces a function of one replica to its program and the shapes of its results."""
    axes = [(placement.axis_name, placement.axis_size)] if placement.axis_name else []
    try:
        with jax.sharding.use_abstract_mesh(placement.view):
            closed, shapes = jax.make_jaxpr(f, axis_env=axes, return_shape=True)(
                *jax.tree.map(_form, args)
            )
    except MESH_ERRORS as error:
        if placement.other_axes or not (line := line_of_mesh(error)):
            raise
        report = f" JAX reports: {error}"
    else:
        if placement.other_axes:
            return closed, shapes
        line, report = inner_map(closed) if placement.on_mesh else "", ""
        if not line:
            return without_meshes(without_refs(closed, axes)), shapes
    # Outside of the except block: inside, Python would print JAX's error above this one.
    raise ValueError(
        f"{line}: a replica is one device without a mesh. Leave out the line, or close over whole "
        f"arrays; fddp.mesh_group gives a replica several devices.{report}"
    )


def as_program(placement: Placement, f: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function run its traced program, which has no shardings."""

    @named_like(f)
    def run(*args: Any) -> Any:
        if without_jit() or placement.other_axes:
            return f(*args)
        closed, shapes = trace(placement, f, *args)
        return jax.tree.unflatten(
            jax.tree.structure(shapes), jaxpr_as_fun(closed)(*jax.tree.leaves(args))
        )

    return run


def _form(x: Any) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of an array without its sharding, whose mesh is not the view."""
    kind = jax.typeof(x)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type)


def add_replica_dim(tree: PyTree) -> Any:
    """Adds a first dim for replicas to one replica's arrays, as outputs of its program."""
    return jax.tree.map(lambda x: x[None], tree)


def drop_replica_dim(tree: PyTree) -> Any:
    """Drops the first dim of replicas: the inverse of `add_replica_dim`."""
    return jax.tree.map(lambda x: x[0], tree)


def of_one_replica(tree: PyTree, replicas: int) -> Any:
    """Returns one replica's shapes and JAX dtypes of arrays with all replicas' rows along dim 0."""

    def form(x: Any) -> jax.ShapeDtypeStruct:
        shape = x.shape
        if shape:
            shape = (shape[0] // replicas, *shape[1:])
        return jax.ShapeDtypeStruct(shape, jax.typeof(x).dtype)

    return jax.tree.map(form, tree)


def specs(placement: Placement, tree: PyTree) -> Any:
    """Returns the spec of each leaf along the other axes."""
    return jax.tree.map(placement.spec, tree)


def device_parts(placement: Placement, tree: PyTree) -> Any:
    """Returns shape and dtype of one device's part of each array."""

    def part(x: Any) -> jax.ShapeDtypeStruct:
        shape = part_shape(placement.view, placement.spec(x), jnp.shape(x))
        return jax.ShapeDtypeStruct(shape, jnp.result_type(x))

    return jax.tree.map(part, tree)


def laid_out(placement: Placement, tree: PyTree, where: Any) -> Any:
    """Constrains arrays inside a program to the specs `where` along the other axes; see `specs`."""
    if not placement.other_axes:
        return tree
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, where)


def placed_alike(tree: PyTree, sharding: Sharding) -> Any:
    return jax.tree.map(lambda x: placed(x, sharding), tree)


def placed(x: Any, sharding: Sharding) -> Any:
    if (isinstance(x, jax.Array) and x.sharding == sharding) or isinstance(x, jax.ShapeDtypeStruct):
        return x
    if not hasattr(x, "dtype"):  # a Python number
        x = np.asarray(x, jnp.result_type(x))
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        words = from_process(sharding, jax.random.key_data(x))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    return from_process(sharding, x)


def from_process(sharding: Sharding, x: Any) -> jax.Array:
    """Makes an array over several processes from this process's part."""
    with asked_for():
        if sharding.is_fully_replicated:
            x = whole_here(x)
        return jax.make_array_from_process_local_data(sharding, np.asarray(jax.device_get(x)))


def whole_here(x: Any) -> Any:
    """Replicates an array with parts on several processes, all of which call it."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return x
    sharding: Any = x.sharding
    return _replicating(sharding.mesh)(x)


@device_cache
def _replicating(mesh: Mesh) -> Any:
    """Makes a program per mesh, not per array."""
    replicated = NamedSharding(mesh, REPLICATED)
    return jax.jit(lambda x: resharded(x, REPLICATED), out_shardings=replicated)
