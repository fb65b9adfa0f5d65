"""In which forms the gradients of a step may travel."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from fddp.comm import Group
from fddp.step.options import Options

if TYPE_CHECKING:  # `Way` has functions of a `Replica`, which has a field of type `Travels`
    from fddp.step.way import Way


class Travels(NamedTuple):
    """In which forms the gradients of a step may travel."""

    exact: bool
    """A received message is the plain sum of the replicas' messages, so it may carry scalars."""
    table_rows: bool
    """A few rows of a gradient may be sent in place of all."""
    slices: bool
    """Some layers of a stack may be a message of their own."""
    rounds: bool
    """A gradient may be summed in the rounds of the loop that makes it."""
    scatter: Callable[..., Any] | None
    """The hook's `scatter`, if it may be used."""


def travels(options: Options, group: Group, way: "Way") -> Travels:
    """Decides the forms from the options, the group and the way in which replicas hold a state.

    |            | requires |
    |---|---|
    | exact      | plain sums: no hook, and every bucket is sent |
    | table_rows | exact; one device holds each gradient; whole gradients are summed |
    | slices     | every bucket is sent; one device holds each gradient; a hook acts by element |
    | rounds     | as `table_rows`, or shards without a hook and without levels of nodes |
    | scatter    | no levels: a group of nodes would have to sum its parts further |
    """
    hook = options.hook
    sends_all = not options.skip_all_reduce_unused_params
    summed = sends_all and not group.placement.other_axes
    has_levels = group.communicator.levels is not None
    scatter = hook.scatter if hook and not has_levels else None
    exact = hook is None and way.sums and sends_all
    table_rows = exact and summed and way.table_rows
    # A hook without `scatter` needs whole leaves if buckets are scattered.
    whole_leaves = way.scattered and scatter is None
    by_element = hook is None or (hook.by_element and not whole_leaves)
    plain = summed and hook is None and not has_levels
    return Travels(
        exact=exact,
        table_rows=table_rows,
        slices=by_element and summed and way.slices,
        rounds=plain if way.scattered else table_rows,
        scatter=scatter,
    )
