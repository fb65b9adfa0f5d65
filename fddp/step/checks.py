"""Checks the arguments of a call of a step, so that errors name them before JAX fails inside."""

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from fddp.buckets import is_shard
from fddp.comm import Group, described, forms_of, shortened, verify
from fddp.jax_internals import KINDS, find_collectives, parse, transformed
from fddp.jaxpr import differentiable
from fddp.losses import (
    Stacked,
    count_rows,
    is_rows,
    lists_of_numbers,
    not_numeric,
    unjoined,
    unlike,
)
from fddp.step.combinations import refuse
from fddp.step.replica import Replica
from fddp.step.schedules import report_compiling
from fddp.step.state import check_no_state
from fddp.wording import check_has

Function = TypeVar("Function", bound=Callable[..., Any])

# The name scope around each message of a step (`fddp.step.schedules.scope`).
MESSAGE_SCOPE = re.compile(r"(micro-batch\d+)?(bucket|gather|tail)\d*")


def refuse_transformations() -> None:
    """Raises TypeError inside `jax.jit`, `grad` or `vmap`."""
    if transformed():
        raise TypeError(
            "this call runs compiled programs of its own and cannot be called under jax.jit, grad "
            "or vmap; call it from Python, or use fddp.all_reduce inside your own jax.shard_map. A "
            "step(state, batch) can be."
        )


def refuse_nan_checks() -> None:
    """Raises ValueError if JAX runs a program with a NaN again, operation by operation."""
    if jax.debug_nans.value or jax.debug_infs.value:
        raise ValueError(
            "jax_debug_nans and jax_debug_infs run a program again on the rank that finds a NaN, "
            "and its messages would be sent twice: unset them, and give skip_nonfinite=True, which "
            "names the first gradient that is not finite. With the flags call jax.grad(loss_fn)."
        )


def check_step(call: str, step: object) -> None:
    """Raises TypeError unless `step` is a `TrainStep`, a class above some of the callers."""
    check_has("with_options", f"{call}: step", step, "a step, from fddp.train_step")


def check_arrays(params: PyTree) -> None:
    """Raises an error unless the parameters are a non-empty tree of arrays."""
    check_no_state("params", params)
    leaves = jax.tree.leaves(params)
    if not leaves:
        raise ValueError(f"params holds no arrays: got {params!r}.")
    for path, x in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_shard):
        name = f"params{jax.tree_util.keystr(path)}"
        if is_shard(x):
            raise TypeError(
                f"{name} is divided among the replicas, {x!r}: give step.init(fddp.whole(params))."
            )
        if isinstance(x, jax.Ref):
            raise TypeError(
                f"{name} is a Ref (jax.new_ref), and a step returns new parameters: give its "
                "value, ref[...]."
            )
        if not hasattr(x, "dtype") and not isinstance(x, int | float | complex):
            advice = ""
            if callable(x):
                advice = " Separate a module's arrays from the rest, as eqx.partition does."
            if callable(x) and not path:
                advice = " Give the arrays that it makes: step.init(jax.jit(make)())."
            raise TypeError(f"{name} must be an array, got {type(x).__name__} {x!r}.{advice}")
        if not_numeric(x):
            dtype = getattr(x, "dtype", None)
            raise TypeError(f"{name} must be an array of numbers that JAX takes, got {dtype}.")
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            raise TypeError(
                f"{name} is a random key, which nothing can train: give it as step.init(params, "
                "rng=key)."
            )


def check_trained(params: PyTree, chosen: Sequence[int]) -> None:
    """Raises ValueError if there are no trained leaves."""
    if not chosen:
        why = "no float arrays"
        if differentiable(jax.tree.leaves(params)):
            why = "float arrays, all of them ignored"
        raise ValueError(
            f"params holds {why}, so there is nothing to train: got "
            f"{'; '.join(described('', params))}."
        )


def check_params(replica: Replica, first: Any, params: PyTree) -> None:
    """Raises ValueError if the tree, or a trained leaf's shape or dtype, differs from `first`."""
    forms = forms_of(params)
    trained = [jax.tree.leaves(replica.trained(tree)) for tree in (forms, first)]
    if jax.tree.structure(forms) == jax.tree.structure(first) and trained[0] == trained[1]:
        return
    lines = [set(described("", tree)) for tree in (forms, first)]
    raise ValueError(
        "these parameters are not those of the model of this step: they have "
        f"{shortened(sorted(lines[0] - lines[1])) or 'nothing else'}, and lack "
        f"{shortened(sorted(lines[1] - lines[0])) or 'nothing'}. Create a separate step for each "
        "model, shape and dtype."
    )


def params_checked(replica: Replica, first: Any, call: Function) -> Function:
    """Makes a function check its parameters while it is traced, at no cost at run time."""

    def traced(argument: Any, *args: Any, **kwargs: Any) -> Any:
        check_params(replica, first, getattr(argument, "params", argument))
        return call(argument, *args, **kwargs)

    return cast(Function, traced)


def check_batch(replica: Replica, batch: PyTree) -> None:
    """Raises ValueError unless a batch can be divided among replicas and micro-batches."""
    rows = check_rows(batch, _divided(replica))
    if rows == 0:
        raise ValueError(
            "a batch has 0 rows, and every process needs rows in each step: use fddp.join on ranks "
            "whose rows have ended, or pad with rows that weigh 0 in fddp.Weighted(mean, weight)."
        )
    if rows % replica.micro_batches:
        raise ValueError(
            f"a batch of {rows} rows cannot be divided into {replica.micro_batches} equal parts: "
            f"this process has {_shares(replica)}."
        )
    replica.strategy.check_batch(replica, batch, rows // replica.micro_batches)


def check_rows(batch: PyTree, advice: str = "") -> int:
    """Counts the rows of a batch; raises ValueError, with `advice`, if its arrays differ."""
    inner = unjoined(batch)
    if isinstance(inner, Stacked):
        check_has("__len__", "fddp.Stacked: batches", inner.batches, "a sequence of batches")
        wrong = unlike(inner.batches) or f"it holds {len(inner.batches)}"
        raise ValueError(f"fddp.Stacked holds batches of equal forms, and {wrong}{advice}.")
    check_filled(inner)
    if not is_rows(inner):
        got = shortened(described("", inner), ", ")
        raise ValueError(f"the arrays of a batch must have equally many rows, got {got}{advice}.")
    return count_rows(inner)


def check_filled(batch: PyTree) -> None:
    """Raises an error for a batch without leaves, or with lists of numbers, text or objects."""
    if not jax.tree.leaves(batch):
        raise ValueError(
            f"the batch is empty: got {batch!r}; give this process's rows as a tree of arrays."
        )
    if paths := not_numeric(batch):
        raise TypeError(
            f"the batch holds leaves that are not numeric, {shortened(paths, ', ')}: give numbers, "
            "such as np.asarray(x, np.float32)."
        )
    if paths := lists_of_numbers(batch):
        raise ValueError(
            f"the batch holds Python lists of numbers, {shortened(paths, ', ')}: make arrays, with "
            "np.asarray."
        )


def _divided(replica: Replica) -> str:
    """Formats advice for a batch whose arrays have unequally many rows."""
    count = replica.micro_batches
    if count == 1:
        return (
            ", as the first batch had: give rows each time, or fddp.Stacked([batch]) from the "
            "first one on"
        )
    stacked = f"fddp.Stacked of {count} batches of one form, one for each"
    return f": this process has {_shares(replica)}; give rows, or {stacked}"


def _shares(replica: Replica) -> str:
    """Formats the number of replicas and micro-batches of this process."""
    kind = "replicas"
    if replica.strategy.replicas:
        kind = "virtual replicas"
    count = replica.replicas // replica.group.processes
    return f"{count} {kind} × {replica.options.accumulation_steps} micro-batches"


def check_no_sync(replica: Replica) -> None:
    """Raises ValueError if the step's options exclude `no_sync`."""
    refuse(replica.features | {"no_sync": "no_sync"})


# The messages of a lane in a compiled program.
STARTS = re.compile(r"fddp_start.*?(bytes = \d+.*?), lane")


def verify_collectives(group: Group, program: jax.stages.Lowered) -> None:
    """Raises ValueError, on every rank, if the compiled programs differ in their collectives.

    Ranks of one script may compile different programs: a branch in Python or a choice of XLA is
    enough. Mismatched collectives would add unrelated sums, or hang.
    """

    def describe() -> list[str]:
        with report_compiling(group, "the step"):
            text = program.compile().as_text() or ""
        # Without a collective of XLA there is nothing to parse.
        found = find_collectives(parse(text)) if any(f" {kind}" in text for kind in KINDS) else ()
        lines = [f"collective {k}: {x}{_message(x.op_name)}" for k, x in enumerate(found)]
        lines += STARTS.findall(text)
        return [f"collectives: {len(lines)}", *lines]

    verify(
        group,
        "compiled collectives (does the loss branch in Python, for example by rank?)",
        describe,
    )


def _message(op_name: str) -> str:
    """Formats the message that a collective carries, or "" for a collective of the loss."""
    for scope in op_name.split("/"):
        if MESSAGE_SCOPE.fullmatch(scope):
            return f" ({scope})"
    return ""
