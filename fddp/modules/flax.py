"""Flax modules as pure losses, for both of Flax's APIs.

The user writes a function `loss(model, batch)`. It becomes a pure loss of parameters, buffers and
random keys, as `train_step` needs it. `module(state)` converts a state back to a module, in memory
that no later step reuses. A module has whole parameters: if the state is in shards, every rank
calls `module`, and gets a whole module.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen
import jax
import jax.numpy as jnp
from flax import nnx
from flax.errors import TraceContextError

from fddp.buckets import is_shard
from fddp.jax_internals import context_mesh, replicated_over
from fddp.jaxpr import refuse_deleted
from fddp.losses import Weighted, check_callable
from fddp.sharding import whole
from fddp.step import TrainState, check_state, finished
from fddp.wording import check_has, leaf_name

BUFFERS = "the module has buffers: give step.init(net.params, model_state=net.model_state)."
OVERWRITTEN = "_overwrite_with_gradient"
LossOf = Callable[[Any, Any], Any]
Names = Sequence[str]


class Linen(NamedTuple):
    """The loss and the initializer of a linen module."""

    loss_fn: Callable[..., Any]
    """The loss for `train_step`; takes `model_state=` if there are buffers, and `rng=` if the
    module draws numbers."""
    init: Callable[[Any, Any], tuple[Any, Any]]
    """`init(rng, batch) -> (params, model_state)`; model_state is None for modules without
    buffers."""
    module: Callable[[Any], flax.linen.Module]
    """`module(state)`: the module, bound to a copy of the state's parameters and buffers; call it,
    or read its `.variables`. If the state is in shards, every rank calls it."""


class Nnx(NamedTuple):
    """The loss, the parameters and the buffers of an nnx module."""

    loss_fn: Callable[..., Any]
    """The loss for `train_step`; takes `model_state=` if there are buffers, and `rng=` if the
    module draws numbers."""
    params: Any
    """A plain tree of the module's `nnx.Param`s, for `step.init`."""
    model_state: Any
    """A plain tree of the buffers; None for modules without buffers."""
    module: Callable[[Any], nnx.Module]
    """`module(state)`: a new module with a copy of the state's parameters and buffers, and the
    original random streams; to evaluate, or to save. If the state is in shards, every rank calls
    it."""


def from_linen(
    module: flax.linen.Module,
    loss: LossOf,
    *,
    rngs: Names = ("dropout",),
    sown: Names = ("intermediates",),
) -> Linen:
    """Converts a linen module and its loss to a pure loss.

    Args:
      module: the module.
      loss: `loss(model, batch)` → loss or (loss, aux); `model` is the bound module.
      rngs: names of the random streams that are seeded from the step's key.
      sown: collections into which modules sow, such as "losses". The loss reads the values of the
        current pass from `model.variables`; they are not buffers.

    Returns:
      `Linen(loss_fn, init, module)`.

    Raises:
      TypeError: `module` is not a linen module, `loss` is not a function, or `rngs` or `sown` is a
        single string.

    Example:
      >>> import fddp, flax.linen as nn, jax, jax.numpy as jnp, optax
      >>> linen = fddp.from_linen(nn.Dense(1), lambda model, batch: jnp.mean(model(batch) ** 2))
      >>> batch = jnp.ones((8, 3))
      >>> params, model_state = linen.init(jax.random.key(0), batch)
      >>> step = fddp.train_step(linen.loss_fn, optax.sgd(0.1))
      >>> state, info = step(step.init(params, model_state=model_state), batch)
      >>> linen.module(state)(batch).shape
      (8, 1)
    """
    check_has("bind", "from_linen: module", module, "a flax.linen.Module")
    check_callable("from_linen", "loss", loss)
    for name, names in (("rngs", rngs), ("sown", sown)):
        if isinstance(names, str) or not (
            isinstance(names, Sequence) and all(isinstance(x, str) for x in names)
        ):
            raise TypeError(
                f"{name} must be a sequence of names, got {names!r:.60}: give ({names!r:.60},)."
            )

    def init(rng: jax.Array, batch: Any) -> tuple[Any, Any]:
        streams = dict(zip(("params", *rngs), jax.random.split(rng, 1 + len(rngs))))
        variables = dict(flax.linen.init(loss, module)(streams, batch))
        _refuse_overwritten(variables)
        variables = {name: values for name, values in variables.items() if name not in sown}
        return variables.pop("params", {}), variables or None

    def loss_fn(params: Any, batch: Any, *, model_state: Any = None, rng: Any = None) -> Any:
        streams = None
        if rng is not None:
            streams = {name: jax.random.fold_in(rng, k) for k, name in enumerate(rngs)}
        state = {name: values for name, values in (model_state or {}).items() if name not in sown}
        _refuse_overwritten(state)
        run = flax.linen.apply(loss, module, mutable=[*state, *sown])
        value, new = run({"params": params, **state}, batch, rngs=streams)
        new = {name: values for name, values in new.items() if name not in sown}
        structure = jax.tree.structure
        changed = [name for name in state if structure(state[name]) != structure(new.get(name))]
        if changed:
            raise ValueError(
                f"the collections {changed} have other values after a pass: "
                "modules that sow into them add values. "
                f"Name them, from_linen(..., sown={(*sown, *changed)!r}), and call init again."
            )
        if not model_state:
            return value
        return _with_state(value, {**model_state, **new})

    def bound_module(state: TrainState) -> flax.linen.Module:
        check_state(state)
        state = finished(state)
        params, buffers = copied((state.params, state.model_state))
        return module.bind({"params": params, **(buffers or {})})

    return Linen(loss_fn, init, bound_module)


def from_nnx(module: nnx.Module, loss: LossOf) -> Nnx:
    """Converts an nnx module and its loss to a pure loss.

    Args:
      module: the module, with its values.
      loss: `loss(model, batch)` → loss or (loss, aux), as for `nnx.value_and_grad`.

    Returns:
      `Nnx(loss_fn, params, model_state, module)`. `params` is a plain tree of the `nnx.Param`s,
      `model_state` of all other variables except random streams: a step seeds them from its key.

    Example:
      >>> import fddp, jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> loss = lambda model, batch: jnp.mean(model(batch) ** 2)
      >>> net = fddp.from_nnx(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), loss)
      >>> step = fddp.train_step(net.loss_fn, optax.sgd(0.1))
      >>> state, info = step(step.init(net.params, model_state=net.model_state), jnp.ones((8, 3)))
      >>> net.module(state)(jnp.ones((8, 3))).shape
      (8, 1)
    """
    check_callable("from_nnx", "loss", loss)
    if not isinstance(module, nnx.Module):
        raise TypeError(f"from_nnx: module must be a flax.nnx.Module, got {module!r:.60}.")
    kinds = nnx.Param, nnx.RngState, ...
    graphdef, params, streams, buffers = nnx.split(module, *kinds)

    def loss_fn(new_params: Any, batch: Any, *, model_state: Any = None, rng: Any = None) -> Any:
        if rng is None and jax.tree.leaves(streams):
            raise ValueError(
                "the module draws random numbers, as dropout does: give step.init(params, rng=key)."
            )
        model = nnx.merge(
            graphdef,
            _filled(params, new_params),
            _reseeded(streams, rng),
            _filled(buffers, model_state),
        )
        for path, variable in nnx.iter_graph(model):
            if isinstance(variable, nnx.Param):
                variable.set_metadata("on_set_value", partial(_refuse_write, leaf_name(path)))
        try:
            value = loss(model, batch)
        except TraceContextError as error:
            if model_state is not None or not buffers:
                raise
            raise ValueError(BUFFERS) from error
        if model_state is None:
            return value
        *_, state = nnx.split(model, *kinds)
        new_buffers = nnx.to_pure_dict(state)
        if jax.tree.structure(new_buffers) != jax.tree.structure(model_state):
            raise ValueError(
                "the loss changes the set of variables of the module: remove sown values in the "
                "loss, with nnx.pop(model, nnx.Intermediate) or nnx.capture."
            )
        return _with_state(value, new_buffers)

    def merged_module(state: TrainState) -> nnx.Module:
        check_state(state)
        state = finished(state)
        new_params, new_buffers = copied((state.params, state.model_state))
        initial = copied(buffers) if new_buffers is None else buffers
        return nnx.merge(
            graphdef, _filled(params, new_params), copied(streams), _filled(initial, new_buffers)
        )

    model_state = nnx.to_pure_dict(buffers) if buffers else None
    return Nnx(loss_fn, nnx.to_pure_dict(params), model_state, merged_module)


def _refuse_overwritten(collections: Any) -> None:
    if OVERWRITTEN in collections:
        raise ValueError(
            f"the module has a collection {OVERWRITTEN!r}, as Flax's layers in FP8 have it: its "
            "gradients are its next values, and a step would average them over the replicas. Train "
            "such a module with a loss of your own: the collection among the parameters, "
            "optax.partition with a transformation that replaces them, and jax.lax.pmax over "
            "group.axis_name in the backward rule of the maxima."
        )


def _refuse_write(name: str, variable: nnx.Variable, value: Any) -> Any:
    """Refuses a write by a module, but not by Flax's transformations, which do not come here."""
    raise ValueError(
        f"the loss writes into the nnx.Param {name}, as nnx.SpectralNorm and nnx.WeightNorm do: a "
        "step changes parameters by the optimizer alone, and the write would be lost. Compute with "
        "the new value without storing it, or store it in another nnx.Variable; or change "
        "state.params between steps."
    )


def _with_state(value: Any, model_state: Any) -> Any:
    """Returns (loss, (model_state, aux)) for a result of the user's loss, with or without aux."""
    if isinstance(value, tuple) and not isinstance(value, Weighted):
        loss, aux = value
        return loss, (model_state, aux)
    return value, (model_state, None)


def _filled(state: Any, values: Any) -> Any:
    """Returns a copy of an nnx state with new values; the state itself if they are None."""
    if values is None:
        return state
    copy = jax.tree.map(lambda x: x, state)
    nnx.replace_by_pure_dict(copy, values)
    return copy


def _reseeded(streams: Any, rng: Any) -> Any:
    """Seeds random streams from a step's key: each key folds in its index, counts start at zero."""
    leaves, treedef = jax.tree.flatten(streams)

    def fresh(k: int, x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jnp.zeros_like(x)
        key = jax.random.fold_in(rng, k)
        if not x.shape:
            return key
        # It was split, for example for the layers under `nnx.scan`.
        return jax.random.split(key, x.shape)

    return treedef.unflatten([fresh(k, x) for k, x in enumerate(leaves)])


def copied(tree: Any) -> Any:
    """Copies arrays to one device, or to the current mesh, if all are replicated; else in place."""
    refuse_deleted(tree)
    # `whole` joins shards, and averages copies that differ: its results are new arrays.
    is_new = [is_shard(x) for x in jax.tree.leaves(tree, is_leaf=is_shard)]
    leaves, treedef = jax.tree.flatten(jax.tree.map(jnp.asarray, whole(tree)))
    if all(x.is_fully_replicated for x in leaves):
        mesh = context_mesh()
        leaves = [x.addressable_data(0) for x in leaves]
        if not mesh.empty:
            leaves = [replicated_over(mesh, x) for x in leaves]
    places = [k for k, new in enumerate(is_new) if not new]
    copies = jax.jit(partial(jax.tree.map, jnp.copy))([leaves[k] for k in places])
    for k, copy in zip(places, copies):
        leaves[k] = copy
    return treedef.unflatten(leaves)
