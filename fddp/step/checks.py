"""Refusals of a step in each call, in the user's words, before JAX says it in its own."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from fddp.buckets import BucketPlan, is_shard
from fddp.comm import Group, described, shortened, verify
from fddp.hlo import find_collectives, parse
from fddp.jax_internals import transformed
from fddp.jaxpr import differentiable
from fddp.losses import Stacked, count_rows, is_rows, lists_of_numbers, not_numeric, unjoined, unlike
from fddp.schedules import compiling, forms_of
from fddp.step.combinations import refuse
from fddp.step.replica import Replica
from fddp.step.state import TrainState, check_no_state
from fddp.wording import check_has

Function = TypeVar("Function", bound=Callable[..., Any])

# The scope in which a fused step sends a message (`fddp.schedules.scope`).
MESSAGE_SCOPE = re.compile(r"(bucket|rows|gather|tail)\d*")


def refuse_transformations() -> None:
    """Refuses a call that cannot be part of another program."""
    if transformed():
        raise TypeError(
            "this call runs compiled programs of its own and cannot be called under jax.jit, grad or vmap; call it "
            "from Python, or use fddp.all_reduce inside your own jax.shard_map. A fused step(state, batch) can be."
        )


def check_step(call: str, step: Any) -> None:
    """Refuses a value that is not a `TrainStep`, a class in a room above some of the callers."""
    check_has("with_options", f"{call}: step", step, "a step, from fddp.train_step")


def check_arrays(params: Any) -> None:
    """Refuses parameters that hold no arrays, or something else."""
    check_no_state("params", params)
    leaves = jax.tree.leaves(params)
    if not leaves:
        raise ValueError(f"params holds no arrays: got {params!r}.")
    for path, x in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_shard):
        name = f"params{jax.tree_util.keystr(path)}"
        if is_shard(x):
            raise TypeError(f"{name} is held apart by the replicas, {x!r}: give step.init(fddp.whole(params)).")
        if not hasattr(x, "dtype") and not isinstance(x, int | float | complex):
            raise TypeError(f"{name} must be an array, got {type(x).__name__} {x!r}.")
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            raise TypeError(f"{name} is a random key, which nothing can train: give it as step.init(params, rng=key).")


def check_trained(params: Any, chosen: Sequence[int]) -> None:
    """Says that there is nothing to train.

    Args:
      params: what `step.init` was given.
      chosen: numbers of the leaves that are trained.

    Raises:
      ValueError: there are none.
    """
    if not chosen:
        floats = differentiable(jax.tree.leaves(params))
        why = "float arrays, all of them ignored" if floats else "no float arrays"
        raise ValueError(f"params holds {why}, so there is nothing to train: got {'; '.join(described('', params))}.")


def check_params(replica: Replica, first: Any, params: Any) -> None:
    """Refuses parameters of another tree, and trained leaves of another shape or dtype."""
    forms = forms_of(params)
    trained = [jax.tree.leaves(replica.trained(tree)) for tree in (forms, first)]
    if jax.tree.structure(forms) == jax.tree.structure(first) and trained[0] == trained[1]:
        return
    lines = [set(described("", tree)) for tree in (forms, first)]
    raise ValueError(
        "these parameters are not those of the model that this step was made for: they have "
        f"{shortened(sorted(lines[0] - lines[1])) or 'nothing else'}, and lack "
        f"{shortened(sorted(lines[1] - lines[0])) or 'nothing'}. Make a step of its own for each "
        "model, shape and dtype."
    )


def params_checked(replica: Replica, first: Any, call: Function) -> Function:
    """Wraps a function so that its parameters are checked while it is traced, at no cost at run time."""

    def traced(argument: Any, *rest: Any, **more: Any) -> Any:
        params = argument.params if isinstance(argument, TrainState) else argument
        check_params(replica, first, params)
        return call(argument, *rest, **more)

    return cast(Function, traced)


def check_batch(replica: Replica, batch: Any) -> None:
    """Says that a batch cannot be divided among replicas and micro-batches.

    Args:
      replica: what one replica does.
      batch: what a call was given, as programs take it, or as it was given where they cannot.

    Raises:
      ValueError: the message names the leaves, and says what to give.
    """
    rows = check_rows(batch, _divided(replica))
    if rows == 0:
        raise ValueError(
            "a batch has 0 rows, and every process needs rows in each step: use fddp.join on ranks whose rows have "
            "ended, or pad with rows that weigh 0 in fddp.Weighted(mean, weight)."
        )
    if rows % replica.micro_batches:
        raise ValueError(
            f"a batch of {rows} rows cannot be divided into {replica.micro_batches} equal parts: this process has "
            f"{_shares(replica)}."
        )
    replica.way.check_batch(replica, batch, rows // replica.micro_batches)


def check_rows(batch: Any, otherwise: str = "") -> int:
    """Counts the rows of a batch.

    Args:
      batch: what a user gave, or a step takes.
      otherwise: what to give in place of a batch that is no rows.

    Returns:
      The first dim of its arrays.

    Raises:
      ValueError: there are no arrays, or they have unequally many rows.
    """
    inner = unjoined(batch)
    if isinstance(inner, Stacked):
        wrong = unlike(inner.batches) or f"it holds {len(inner.batches)}"
        raise ValueError(f"fddp.Stacked holds batches of equal forms, and {wrong}{otherwise}.")
    check_filled(inner)
    if not is_rows(inner):
        got = shortened(described("", inner), ", ")
        raise ValueError(f"the arrays of a batch must have equally many rows, got {got}{otherwise}.")
    return count_rows(inner)


def check_filled(batch: Any) -> None:
    """Refuses a batch that is empty or holds lists of numbers, text or objects.

    Args:
      batch: what a user gave.

    Raises:
      ValueError: it is empty, or holds lists of numbers.
      TypeError: it holds text or objects.
    """
    if not jax.tree.leaves(batch):
        raise ValueError(f"the batch is empty: got {batch!r}; give this process's rows as a tree of arrays.")
    if found := not_numeric(batch):
        raise TypeError(f"the batch holds leaves that are not numeric, {shortened(found, ', ')}: give numbers.")
    if found := lists_of_numbers(batch):
        raise ValueError(
            f"the batch holds Python lists of numbers, {shortened(found, ', ')}: make arrays, with np.asarray."
        )


def _divided(replica: Replica) -> str:
    """Advice for a batch that is no rows and is to be divided."""
    count = replica.micro_batches
    if count == 1:
        return ", as the first batch had: give rows each time, or fddp.Stacked([batch]) from the first one on"
    stacked = f"fddp.Stacked of {count} batches of one form, one for each"
    return f": this process has {_shares(replica)}; give rows, or {stacked}"


def _shares(replica: Replica) -> str:
    """The replicas and micro-batches that share a batch."""
    virtual = "virtual " if replica.way.replicas else ""
    count = replica.replicas // replica.group.processes
    return f"{count} {virtual}replicas × {replica.options.accumulation_steps} micro-batches"


def check_no_sync(replica: Replica) -> None:
    """Says that nothing may be left pending, where sums are not a replica's own."""
    refuse(replica.asked | {"no_sync": "no_sync"})


def check_paths(plan: BucketPlan, new: Sequence[int]) -> None:
    """Says that a batch uses parameters that no bucket has a place for: the first one had no path to them."""
    if new:
        names = ", ".join(plan.leaves[i].name for i in new)
        raise ValueError(
            f"this batch has other arrays than the first one, and with them the loss uses {names}, which it then had "
            "no path to, so that no bucket has a place for them; with skip_all_reduce_unused_params=True every step "
            "decides anew what is sent."
        )


def check_casts(plan: BucketPlan, first: Mapping[int, np.dtype], now: Mapping[int, np.dtype]) -> None:
    """Says that a batch's loss reads parameters in more bits than they are gathered in, those of the first one's."""
    for i, dtype in first.items():
        if now.get(i) != dtype:
            leaf = plan.leaves[i]
            raise ValueError(
                f"this batch has other arrays than the first one, and with them {leaf.name} is read as "
                f"{now.get(i, leaf.dtype)}, and the first batch's loss read it as {dtype}, in which it is gathered: "
                "cast alike for all batches."
            )


def verify_collectives(group: Group, program: jax.stages.Lowered) -> None:
    """Compares what the compiled programs of all ranks send: kinds, arrays, messages, and who takes part, in order.

    Programs of one script may differ: by a branch in Python, say, or by what XLA makes of it. A rank whose collectives
    differ would add the others' sums to its own, or wait for ever.

    Args:
      group: who compares.
      program: what this rank is about to run.

    Raises:
      ValueError: the collectives differ; the message says where, by rank.
    """

    def describe() -> list[str]:
        with compiling(group, "the step"):
            text = program.compile().as_text()
        found = find_collectives(parse(text or ""))
        lines = [f"collective {k}: {one}{_message(one.op_name)}" for k, one in enumerate(found)]
        return [f"collectives: {len(found)}", *lines]

    verify(group, "compiled collectives (does the loss branch in Python, by rank say?)", describe)


def _message(op_name: str) -> str:
    """The message that a collective carries, by the scope in which it was made; "" for one of the loss's own."""
    scopes = [scope for scope in op_name.split("/") if MESSAGE_SCOPE.fullmatch(scope)]
    return f" ({scopes[0]})" if scopes else ""
