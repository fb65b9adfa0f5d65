"""The forms in which the gradients of a step may travel."""

from typing import NamedTuple

from fddp.comm import Group
from fddp.step.options import Options


class Travels(NamedTuple):
    """The forms in which the gradients of a step may travel."""

    exact: bool
    """A received message is the plain sum of the replicas' messages, so it may carry scalars."""
    table_rows: bool
    """A few rows of a gradient may be sent in place of all."""
    rounds: bool
    """A gradient may be summed in the rounds of the loop that makes it."""


def travels(options: Options, group: Group) -> Travels:
    """Decides the forms of whole gradients. Other ways of a step allow fewer forms.

    |            | requires |
    |---|---|
    | exact      | plain sums: no hook |
    | table_rows | exact; one device holds each gradient |
    | rounds     | as `table_rows` |
    """
    hook = options.hook
    exact = hook is None
    on_one_device = not group.placement.other_axes
    return Travels(
        exact=exact,
        table_rows=exact and on_one_device,
        rounds=exact and on_one_device,
    )
