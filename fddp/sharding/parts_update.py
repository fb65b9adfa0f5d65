"""The update of whole arrays, run on parts: what an optimizer does is not told anew for shards.

The very function that updates whole arrays is traced. Where its program goes element by element it is run on parts;
what it sums over elements is summed over replicas; and what it needs whole goes home for that.

Source: ZeRO (Rajbhandari et al., SC 2020), whose optimizers are on the user's honour.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fddp.buckets import DeviceCut, Shard, as_rows, cut_as_leaf, is_shard, of_rows, there, whole_forms
from fddp.comm import Communicator, laid_out
from fddp.jaxpr import Follows, Kind, Ranks, Same, Stay, on_parts, spread, stays
from fddp.optim import kinds_of_state
from fddp.sharding.homes import at_home, dealt, everywhere
from fddp.step.replica import Replica
from fddp.step.state import Mean, StepInfo, TrainState

# (state, mean) -> (next state, what the step tells), of whole arrays
Update = Callable[[TrainState, Mean], tuple[TrainState, StepInfo]]


def run_on_parts(
    replica: Replica,
    update: Update,
    cuts: Sequence[DeviceCut],
    state: TrainState,
    mine: TrainState,
    mean: Mean,
    comm: Communicator,
) -> tuple[TrainState, StepInfo]:
    """Runs an update on what one replica has.

    Args:
      replica: what one replica does.
      update: of whole arrays.
      cuts: the parts of each leaf that the devices of a replica hold.
      state: in shards, which say what the whole arrays are.
      mine: the same, with this replica's parts of the parameters in place of shards and of whole leaves.
      mean: what the replicas have in common; of gradients this replica's parts.
      comm: to the others.

    Returns:
      The next state, in shards where this one is; and what the step tells.
    """
    run = partial(_run_on_whole_leaves, replica) if comm.size == 1 else partial(_run_on_parts, replica, comm)
    new, info = run(update, cuts, state, mine, mean)

    def shard(old: Any, new: Any) -> Any:
        if not is_shard(old):
            return new
        # What an optimizer has set anew is a number of any size.
        parts = spread(new, old.parts.shape)
        return replace(old, parts=laid_out(replica.group.placement, parts, old.cut.rows))

    held = jax.tree.map(shard, (state.params, state.opt_state), (new.params, new.opt_state), is_leaf=is_shard)
    return new._replace(params=held[0], opt_state=held[1]), info


def _run_on_parts(
    replica: Replica,
    comm: Communicator,
    update: Update,
    cuts: Sequence[DeviceCut],
    state: TrainState,
    mine: TrainState,
    mean: Mean,
) -> tuple[TrainState, StepInfo]:
    """Runs the update's program where it goes element by element on parts, and else with the other replicas."""
    forms = jax.tree.map(_form, whole_forms(state))
    params, treedef = jax.tree.flatten(forms.params)
    chosen = set(replica.chosen(forms.params))
    of_params = treedef.unflatten([Follows(i) if i in chosen else _same(x) for i, x in enumerate(params)])
    of_grads = treedef.unflatten([Follows(i) if i in chosen else None for i in range(len(params))])
    of_state = kinds_of_state(forms.opt_state, replica.trained(forms.params), of_grads)
    of_mean = jax.tree.map(_same, mean._replace(grads=None))._replace(grads=of_grads)
    others = jax.tree.map(_same, forms._replace(params=None, opt_state=None))
    inputs = others._replace(params=of_params, opt_state=of_state), of_mean
    form_of_mean = jax.tree.map(_form, mean._replace(grads=None))._replace(grads=replica.trained(forms.params))
    with jax.sharding.use_abstract_mesh(replica.group.placement.view):
        program, out = jax.make_jaxpr(update, return_shape=True)(forms, form_of_mean)
    given = jax.tree.leaves(inputs, is_leaf=_is_kind)
    run = on_parts(program, given, _ranks(replica, comm, [x.shape for x in params], cuts, stays(program, given)))
    return jax.tree.unflatten(jax.tree.structure(out), run(*jax.tree.leaves((mine, mean))))


def _run_on_whole_leaves(
    replica: Replica, update: Update, cuts: Sequence[DeviceCut], state: TrainState, mine: TrainState, mean: Mean
) -> tuple[TrainState, StepInfo]:
    """Runs the update of one replica alone, whose parts are whole leaves in other dims: any optimizer's goes."""
    forms = whole_forms(state.params)
    leaves, treedef = jax.tree.flatten(forms)
    chosen = set(replica.chosen(forms))
    each = enumerate(zip(leaves, cuts))
    like = treedef.unflatten([_alone(x.shape, cut) if i in chosen else None for i, (x, cut) in each])
    opt_state = jax.tree.map(lambda x: _whole(x.parts, x) if is_shard(x) else x, state.opt_state, is_leaf=is_shard)
    grads = _map(_whole, mean.grads, like)
    params = _map(_whole, mine.params, like)
    new, info = update(mine._replace(params=params, opt_state=opt_state), mean._replace(grads=grads))
    opt_state = _map(_flat, new.opt_state, state.opt_state)
    return new._replace(params=_map(_flat, new.params, like), opt_state=opt_state), info


def _alone(shape: tuple[int, ...], cut: DeviceCut) -> Shard:
    """The form of a leaf that one replica holds alone."""
    depth, cut = cut_as_leaf(prod(shape), shape, 1, cut)
    return Shard(None, shape, depth=depth, cut=cut)


def _whole(x: Array, form: Shard) -> Array:
    return of_rows(x.reshape(form.depth, -1), form.shape, form.depth, form.cut)


def _flat(x: Array, form: Shard) -> Array:
    return as_rows(x, 1, form.depth, form.cut)[0]


def _map(f: Callable[[Any, Any], Any], tree: Any, forms: Any) -> Any:
    """Maps a function over arrays and shards that tell how they lie; what has no shard stays."""
    return jax.tree.map(lambda x, form: f(x, form) if is_shard(form) else x, tree, forms, is_leaf=lambda x: x is None)


def _ranks(
    replica: Replica,
    comm: Communicator,
    shapes: Sequence[tuple[int, ...]],
    cuts: Sequence[DeviceCut],
    stays: Mapping[int, Stay],
) -> Ranks:
    """A replica's knowledge of its parts, and its way to talk to the others."""

    def lies(leaf: int, size: int) -> tuple[int, DeviceCut]:
        return cut_as_leaf(size, shapes[leaf], comm.size, cuts[leaf])

    def depth(leaf: int, size: int) -> int:
        return lies(leaf, size)[0]

    def exists(leaf: int, size: int) -> Array:
        return there(size, comm.size, comm.replica_index(), depth(leaf, size))

    homes = dealt({leaf: stay.operations for leaf, stay in stays.items()}, comm.size)
    several = replica.group.placement.other_axes
    work = partial(everywhere, comm, lies) if several else partial(at_home, comm, homes, depth)
    return Ranks(exists, partial(_put_together, comm), work)


def _put_together(comm: Communicator, op: str, numbers: Sequence[Array]) -> list[Array]:
    """Numbers of all replicas, put together in their order: the same bits on all."""
    reduce = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min}[op]
    found = list[Array](numbers)
    for dtype in dict.fromkeys(x.dtype for x in numbers):
        places = [k for k, x in enumerate(numbers) if x.dtype == dtype]
        mine = jnp.stack([numbers[k].reshape(()) for k in places])
        sent = mine.astype(jnp.uint8) if jnp.issubdtype(dtype, jnp.bool_) else mine
        made = reduce(comm.all_gather(sent), axis=0).astype(dtype)
        for k, x in zip(places, made):
            found[k] = x.reshape(numbers[k].shape)
    return found


def _form(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))


def _same(x: Any) -> Same:
    return Same(x.size == 1)


def _is_kind(x: Any) -> bool:
    return isinstance(x, Kind)
