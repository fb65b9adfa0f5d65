"""Arrays that are still being computed."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
from jax._src import core, dtypes
from jax._src.interpreters import pxla


class Promise(Future[Any], jax.Array):
    """An array of a state that an eager step has returned before it was computed.

    Its shape, dtype, `ndim` and `size` are known at once, and so is `done()`. Whatever needs its
    numbers waits for them, as every other attribute does: operators and indices, `np.asarray`, the
    functions and programs of JAX, `jax.block_until_ready`, `jax.device_get` and pickle. So does
    `result()`, which returns the array that JAX has computed. If the step's sum has failed, all of
    them raise its error. A promise cannot be hashed, as JAX's arrays cannot.
    """

    __array_priority__ = 100  # as JAX's arrays have it: NumPy leaves operators to them

    def __init__(self, form: jax.ShapeDtypeStruct) -> None:
        Future.__init__(self)
        self.form = form

    def __jax_array__(self) -> jax.Array:
        return self.result()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.result(), name)


def awaited(x: Any) -> Any:
    """Waits for a future; returns any other value unchanged."""
    return x.result() if isinstance(x, Future) else x


def has_promises(leaves: Sequence[Any]) -> bool:
    """True if a leaf is a promise."""
    # Six times as fast as `isinstance`, which asks a metaclass for each leaf in every step.
    return Promise in set(map(type, leaves))


def available(leaves: Sequence[Any]) -> list[Any]:
    """Lists the arrays that are available without waiting."""
    if not has_promises(leaves):
        return list(leaves)
    return [awaited(x) for x in leaves if not isinstance(x, Promise) or x.done()]


def _known(name: str) -> property:
    return property(lambda self: getattr(self.form, name))


def _attribute(name: str) -> property:
    return property(lambda self: getattr(self.result(), name))


def _method(name: str) -> Callable[..., Any]:
    def call(self: Promise, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.result(), name)(*args, **kwargs)

    return call


for _name in ("shape", "dtype", "ndim", "size"):
    setattr(Promise, _name, _known(_name))

# Python finds these in the class, and calls no `__getattr__`. `jax.Array` has the operators, and
# abstract methods for the public names.
SPECIAL = (
    "__array__ __bool__ __complex__ __dlpack__ __dlpack_device__ __float__ __format__ __index__ "
    "__int__ __iter__ __len__ __reduce__ __repr__ __str__"
)
UNCHANGED = {*vars(Promise), "__hash__", "__numpy_dtype__", "__slots__", "__weakref__"}

for _name in {*vars(jax.Array), *SPECIAL.split()} - UNCHANGED:
    # Python ignores errors of properties with special names.
    setattr(Promise, _name, (_method if _name.startswith("__") else _attribute)(_name))


def _sharded(
    promises: Sequence[Promise], shardings: Any, layouts: Any, copy_semantics: Any
) -> Sequence[Any]:
    arrays = [promise.result() for promise in promises]
    return pxla.shard_args(shardings, layouts, copy_semantics, arrays)


# Relies on the three tables of types that JAX's programs take as arguments.
core.pytype_aval_mappings[Promise] = lambda promise: jax.typeof(promise.result())
dtypes.register_canonicalize_value_handler(Promise, None)
pxla.shard_arg_handlers[Promise] = _sharded
