"""Replicas start equal: compared in form before anything depends on it, then filled with rank 0's values.

Source: `_verify_param_shape_across_processes` and `_sync_module_states` in PyTorch's `distributed.py`; unlike there
names, dtypes and options are compared too, and every rank raises the same error.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from fddp.compiled.flights import find_flights
from fddp.compiled.hlo import parse
from fddp.group import Group
from fddp.jaxpr import merge, split
from fddp.member import EVERYWHERE
from fddp.shards import from_first_replica

ERRORS: dict[str, type[Exception]] = {error.__name__: error for error in (ValueError, TypeError)}


def verify(group: Group, what: str, describe: Callable[[], Iterable[str]]) -> None:
    """Compares a description on all ranks, and fails on all of them where it differs or cannot be given.

    Only messages of fixed size are sent before the descriptions are known to have one length.

    Args:
      group: who compares.
      what: what is described, for the message: "parameters", say.
      describe: this rank's description, line by line; may raise what is wrong with this rank's input.

    Raises:
      ValueError: the descriptions differ; the message says where, by rank.
      Exception: what `describe` raised, on every rank: its own error where all agree, else its message by rank.
      RuntimeError: an earlier error has left the ranks at different places.
    """
    group.member.recovery.resume()
    try:
        lines, failure = list(describe()), None
    except Exception as error:  # whatever it is, the other ranks must hear of it
        lines, failure = [f"{type(error).__name__}: {error}"], error
    text = json.dumps({"failed": failure is not None, "lines": lines}).encode()
    heads = group.all_gather(np.frombuffer(sha256(text).digest() + len(text).to_bytes(8, "big"), np.uint8))
    if np.all(heads == heads[0]):
        if failure is not None:
            raise failure
        return
    lengths = [int.from_bytes(head[-8:].tobytes(), "big") for head in heads]
    rows = group.all_gather(np.frombuffer(text.ljust(max(lengths)), np.uint8))
    reports = [json.loads(row.tobytes()[:length]) for row, length in zip(rows, lengths)]
    raise _disagreement(what, reports) from failure


def verify_collectives(group: Group, program: jax.stages.Lowered) -> None:
    """Compares what the compiled programs of all ranks send: kinds, arrays, and who takes part, in order.

    Programs of one script may differ: by a branch in Python, say, or by what XLA makes of it. A rank whose collectives
    differ would add the others' sums to its own, or wait for ever.

    Args:
      group: who compares.
      program: what this rank is about to run.

    Raises:
      ValueError: the collectives differ; the message says where, by rank.
    """

    def describe() -> list[str]:
        flights = find_flights(parse(program.compile().as_text() or ""))
        return [f"collectives: {len(flights)}", *(f"collective {k}: {flight}" for k, flight in enumerate(flights))]

    verify(group, "compiled collectives (does the loss branch in Python, by rank say?)", describe)


def equal_start(group: Group, tree: Any) -> Any:
    """Gives every replica rank 0's values, in arrays of their own.

    Args:
      group: the replicas.
      tree: arrays; of the same form on every rank.

    Returns:
      The tree, on the group's devices; later donation leaves the caller's arrays alone. What the caller has placed in
      parts along other axes of the mesh stays so.
    """
    leaves, treedef = jax.tree.flatten(tree)
    apart = [i for i, x in enumerate(leaves) if group.member.spec(x) != EVERYWHERE]
    parted, whole = split(apart, leaves)
    whole = group.member.place(group.broadcast(whole), EVERYWHERE)
    return treedef.unflatten(merge(apart, from_first_replica(group.member, parted) if parted else [], whole))


def described(title: str, tree: Any) -> list[str]:
    """One line for each leaf of a tree: path, dtype and shape."""
    named = jax.tree_util.tree_leaves_with_path(tree)
    words = [(title, jax.tree_util.keystr(path, simple=True, separator="/"), _form(x)) for path, x in named]
    return [" ".join(filter(None, line)) for line in words]


def shortened(lines: Sequence[str], between: str = "; ", most: int = 6) -> str:
    """The first of many lines in one."""
    more = f", and {len(lines) - most} more" if len(lines) > most else ""
    return between.join(lines[:most]) + more


def check_arrays(params: Any) -> None:
    """Refuses parameters that hold no arrays, or something else."""
    leaves = jax.tree.leaves(params)
    if not leaves:
        raise ValueError(f"params holds no arrays: got {params!r}.")
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        name = f"params{jax.tree_util.keystr(path)}"
        if not hasattr(x, "dtype") and not isinstance(x, int | float | complex):
            raise TypeError(f"{name} must be an array, got {type(x).__name__} {x!r}.")
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            raise TypeError(f"{name} is a random key, which nothing can train: give it as step.init(params, rng=key).")


def _form(x: Any) -> str:
    if isinstance(x, PartitionSpec):
        return str(x)
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else type(x).__name__


def _disagreement(what: str, reports: list[dict[str, Any]], most: int = 6) -> Exception:
    failed = [rank for rank, report in enumerate(reports) if report["failed"]]
    if failed:
        texts = [f"rank {rank}: {reports[rank]['lines'][0]}" for rank in failed]
        kind = ERRORS.get(reports[failed[0]]["lines"][0].split(":")[0], RuntimeError)
        return kind(f"{what}: {len(failed)} of {len(reports)} ranks failed.\n" + "\n".join(texts[:most]))
    everywhere = set.intersection(*(set(report["lines"]) for report in reports))
    texts = []
    for rank, report in enumerate(reports):
        own = [line for line in report["lines"] if line not in everywhere]
        texts.append(f"rank {rank}: {shortened(own) or 'nothing more'}")
    return ValueError(f"ranks differ in their {what}.\n" + "\n".join(texts))
