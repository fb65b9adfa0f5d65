"""The lists of tasks that a step can be: whole, or cut where messages leave and where their sums come back.

Making one is a function of forms: nothing is compiled, sent or run.

Source: `DDPOptimizer` in TorchDynamo, which cuts a compiled graph at bucket boundaries; `_apply_optimizer_in_backward`
in PyTorch, which updates a bucket while later ones travel.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from fddp.comm import Placement, trace
from fddp.jax_internals import ClosedJaxpr, make_program
from fddp.jaxpr import Stage, arrivals, cut
from fddp.schedules.pieces import Pieces
from fddp.schedules.tasks import BYTES, Compute, TaskList, communications


def in_one_piece(placement: Placement, pieces: Pieces, state: Any, pending: Any, rows: Any) -> TaskList:
    """The baseline: the backward pass, all messages, the update.

    Args:
      placement: where the replicas' programs run.
      pieces: the step.
      state: arguments of one replica, or their forms.
      pending: likewise.
      rows: likewise.

    Returns:
      The list; its values are trees.
    """
    del placement, state, pending, rows  # one list fits all forms
    sends = communications(pieces.reductions)
    sums = [f"sum {k}" for k in range(len(sends))]

    def backward(state: Any, pending: Any, rows: Any) -> Sequence[Any]:
        messages, kept = pieces.local(state, pending, rows)
        return *messages.arrays, (replace(messages, arrays=()), kept)

    def update(state: Any, kept: Any, nbytes: Any, *sums: Any) -> Sequence[Any]:
        messages, kept = kept
        return (pieces.finish(state, replace(messages, arrays=sums), kept, nbytes),)

    first = Compute("backward", ("state", "pending", "rows"), (*(task.reads[0] for task in sends), "kept"), backward)
    last = Compute("update", ("state", "kept", BYTES, *sums), ("result",), update, "update")
    return TaskList(
        (first, *sends, last),
        lambda state, pending, rows: {"state": state, "pending": pending, "rows": rows},
        lambda values: values["result"],
    )


def in_stages(placement: Placement, pieces: Pieces, state: Any, pending: Any, rows: Any) -> TaskList:
    """The backward pass cut where messages are made, the update where sums come back.

    Args:
      placement: where the replicas' programs run.
      pieces: the step.
      state: arguments of one replica, or their forms.
      pending: likewise.
      rows: likewise.

    Returns:
      The list; its values are arrays, named by their paths in (state, pending, rows) and in the result.
    """
    forms = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, pending, rows))
    sends, count = communications(pieces.reductions), len(pieces.reductions)
    states = _names("state", forms[0])
    entering = [*states, *_names("pending", forms[1]), *_names("rows", forms[2])]

    closed, (messages, kept) = trace(placement, pieces.local, *forms)
    all_kept = _names("kept", kept)
    groups = [[k] for k in range(count)]
    groups[-1] += range(count, len(closed.out_avals))
    backward = _stages("stage", "compute", closed, entering, [*(task.reads[0] for task in sends), *all_kept], groups)

    nbytes = jax.ShapeDtypeStruct((count,), np.uint32)
    closed, result = trace(placement, pieces.finish, forms[0], messages, kept, nbytes)
    given, results = [*states, *(task.writes[0] for task in sends), *all_kept, BYTES], _names("result", result)
    # What a sum is for is done when it is back; how much was sent is known when all of them are.
    back = arrivals(closed, {len(states) + k: k for k in range(count)} | {len(given) - 1: count - 1})
    when = [_used(k, count) for k in back]
    groups = [[number for number, k in enumerate(when) if k == of] for of in range(count)]
    update = _stages("update", "update", closed, given, results, groups)

    treedef = jax.tree.structure(result)
    return TaskList(
        (*(task for pair in zip(backward, sends) for task in pair), *update),
        lambda *arguments: dict(zip(entering, jax.tree.leaves(arguments))),
        lambda values: treedef.unflatten([values[name] for name in results]),
    )


def _stages(
    title: str,
    kind: str,
    closed: ClosedJaxpr,
    given: Sequence[str],
    made: Sequence[str],
    groups: Sequence[Sequence[int]],
) -> list[Compute]:
    """The stages of a program as tasks, one for each group of its outputs."""
    jaxpr = closed.jaxpr
    outputs = [jaxpr.outvars[number] for group in groups for number in group]
    consts = dict(zip(jaxpr.constvars, closed.consts))
    stages = cut(make_program(closed, jaxpr.eqns, jaxpr.invars, outputs, consts), [len(group) for group in groups])

    handed = ((k, number) for k, stage in enumerate(stages) for number in stage.writes)
    names = [*given, *(f"{title} {k}/{number - len(given)}" for k, number in handed)]

    def task(k: int, stage: Stage, group: Sequence[int]) -> Compute:
        reads = tuple(names[number] for number in stage.reads)
        writes = (*(names[number] for number in stage.writes), *(made[number] for number in group))
        run = _handing(stage, len(given)) if writes else lambda *values: ()
        return Compute(f"{title} {k}", reads, writes, run, kind)

    return [task(k, stage, group) for k, (stage, group) in enumerate(zip(stages, groups))]


def _handing(stage: Stage, inputs: int) -> Callable[..., Sequence[Any]]:
    """A stage; what it hands on to later ones is each replica's own, and crosses with a first dim."""

    def run(*values: jax.Array) -> Sequence[Any]:
        read = [value if number < inputs else value[0] for number, value in zip(stage.reads, values)]
        made = stage.run(*read)
        handed = len(stage.writes)
        return *(value[None] for value in made[:handed]), *made[handed:]

    return run


def _used(k: int, count: int) -> int:
    """With which of `count` sums what needs sum k is used: of those that are left half go together.

    Little is to be done when the last one is back, and there are log₂ of `count` programs to compile.
    """
    return count - (1 << (count - k).bit_length() - 1)


def _names(title: str, tree: Any) -> list[str]:
    """A name for each leaf of a tree, by its path."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    names = ["/".join(filter(None, (title, jax.tree_util.keystr(path, simple=True, separator="/")))) for path in paths]
    # Two paths may read alike: {"a/b": …} and {"a": {"b": …}}.
    return [name if names.count(name) == 1 else f"{name} {at}" for at, name in enumerate(names)]
