"""Checks of the arguments of later calls, against the first batch that settled a step."""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from fddp.buckets import split_shards, whole_forms
from fddp.comm import forms_of
from fddp.step.checks import check_batch, check_params
from fddp.step.first_batch import paths
from fddp.step.replica import Replica
from fddp.step.state import TrainState
from fddp.step.state_layout import check_layout, local_form
from fddp.step.strategy import Agreed

if TYPE_CHECKING:  # a settled step holds what was checked_forms
    from fddp.step.settle import Settled


class CheckedForms(NamedTuple):
    """The forms of arguments that were checked."""

    fits: tuple[Any, ...]
    """The last four checked forms of (state, batch): steps and `no_sync` may alternate."""
    batches: frozenset[Any]
    """Forms of batches: none reaches a leaf outside the plan."""
    share: TrainState
    """Shapes and dtypes of one replica's share of the state, with pending sums from the first
    `no_sync` on."""


def admit(settled: "Settled", tree: PyTree, state: TrainState, batch: PyTree) -> "Settled":
    """Checks the arguments of a call, on this rank only, and records their form as checked."""
    replica = settled.replica
    checked_forms = settled.checked_forms
    fit = fit_of(replica, tree, state, batch)
    if fit in checked_forms.fits:
        return settled
    check_params(replica, forms_of(settled.agreed.common.state.params), whole_forms(state.params))
    gradient_state = check_layout(replica, state)
    check_batch(replica, batch)
    share = checked_forms.share
    if share.accumulated is None and state.accumulated is not None:
        share = local_form(replica.group.placement, state)
    form = form_of_batch(batch)
    if form not in checked_forms.batches:
        _check_program(replica, settled.agreed, gradient_state, batch)
    fits = (fit, *checked_forms.fits)[:4]
    return settled._replace(checked_forms=CheckedForms(fits, checked_forms.batches | {form}, share))


def _check_program(replica: Replica, agreed: Agreed, state: TrainState, batch: PyTree) -> None:
    """Raises ValueError if a batch reaches leaves outside the plan, unlike the first batch."""
    leaves, chosen = agreed.plan.leaves, agreed.common.chosen
    planned = {i for bucket in agreed.plan.buckets for i in bucket.leaves}
    left_out = {i for i in chosen if leaves[i].nbytes and i not in planned}
    if left_out:
        has_path = zip(chosen, paths(replica, state, batch))
        names = [leaves[i].name for i, path in has_path if path and i in left_out]
        if names:
            raise ValueError(
                "this batch has other arrays than the first batch, and with them the loss uses "
                f"{', '.join(names)}, to which it had no path before, so that no bucket contains "
                "them: make one step for each kind of batch."
            )


def fit_of(replica: Replica, tree: PyTree, state: TrainState, batch: PyTree) -> Any:
    """Returns a key of (state, batch): calls with equal keys need only one check."""
    local = jax.tree.leaves(state.accumulated)[:1]
    if replica.strategy.in_shards:
        local += split_shards(state)[1]
    shardings = [getattr(x, "sharding", None) for x in local[-1:]]  # ranks are in the tree
    return tree, [(x.shape, x.dtype) for x in local], shardings, form_of_batch(batch)


def form_of_batch(batch: PyTree) -> Any:
    """Returns the structure of a batch, and types, shapes and dtypes of its leaves."""
    leaves, tree = jax.tree.flatten(batch)
    return tree, tuple((type(x), np.shape(x), getattr(x, "dtype", None)) for x in leaves)
