"""Lets stacked layers cross the border between two steps slice by slice.

A loop over layers reads the first layers first. Where the next step begins before the last sums are back, a stack is
no array: its slices are values of their own, each there as soon as its update is done. Whoever looks at the state gets
them put together.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from threading import Lock
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from fddp.buckets import Slice
from fddp.comm import REPLICATED, Placement, trace
from fddp.jaxpr import in_slices, slices_made
from fddp.schedules.border import Border, Program, arriving, in_parts
from fddp.schedules.message_order import come_late
from fddp.schedules.queues import Promise, awaited
from fddp.schedules.tasks import RESULT, Value

# name of an array of the state → its slices
Cuts: TypeAlias = Mapping[Value, Sequence[Slice]]
# (arrays) → arrays
Run: TypeAlias = Callable[..., Sequence[Any]]


def slice_by_slice(placement: Placement, first: Program, last: Program) -> Border:
    """Makes slices of the arrays of the state that an update can make slice by slice.

    Args:
      placement: where the replicas' programs run.
      first: the forward and backward pass.
      last: the updates.

    Returns:
      The same programs, which are given slices, and make slices, of such arrays; and when each of these comes.
    """
    cuts = dict[Value, tuple[Slice, ...]]()
    for number, bounds in slices_made(last.closed, arriving(last, {})).items():
        name = last.made[number].replaces
        if name and name in last.read and name not in first.made and _alike(last, last.read.index(name), number):
            cuts[name] = tuple(Slice(*each) for each in bounds)
    slices = {_named(name, one): 1 for name, some in cuts.items() for one in some}
    first = in_parts(placement, _in_slices(placement, first, cuts), slices)
    last = in_parts(placement, _in_slices(placement, last, cuts), slices)
    return Border(
        first,
        last,
        comes=slices | come_late(first, last),
        enter=partial(_apart, cuts, {name: _splitting(placement, some) for name, some in cuts.items()}),
        leave=partial(_together, cuts, {name: _joining(placement, len(some)) for name, some in cuts.items()}),
    )


class Sliced(Promise):
    """An array of the state whose slices are values of their own; it is put together when somebody looks."""

    def __init__(self, form: jax.ShapeDtypeStruct, slices: Sequence[Any], join: Run) -> None:
        super().__init__(form)
        self.slices = tuple(slices)
        """The slices, in order; futures of those that are still being made."""
        self._join = join
        self._lock = Lock()

    def result(self, timeout: float | None = None) -> Any:
        """Waits for all slices, and puts them together once."""
        del timeout
        with self._lock:
            if not self.done():
                (whole,) = self._join(*map(awaited, self.slices))
                self.set_result(whole)
        return super().result()

    def there(self) -> list[Any]:
        """The slices that are there."""
        return [awaited(x) for x in self.slices if not isinstance(x, Promise) or x.done()]


def _named(name: Value, slice: Slice) -> Value:
    """The name of a slice, in the state and among the results."""
    return Value(name.kind, path=f"{name.path}{slice}")


def _alike(program: Program, read: int, made: int) -> bool:
    before = program.closed.in_avals[read]
    after = program.closed.out_avals[made]
    return (before.shape, before.dtype) == (after.shape, after.dtype)


def _in_slices(placement: Placement, program: Program, cuts: Cuts) -> Program:
    """The same program, which reads and makes slices in place of arrays."""
    read = [cuts.get(name, ()) for name in program.read]
    made = [cuts.get(name.replaces, ()) if name.replaces else () for name in program.made]
    numbered = ({number: tuple(some) for number, some in enumerate(all) if some} for all in (read, made))
    run, forms = in_slices(program.closed, *numbered)
    closed, _ = trace(placement, run, *forms)
    before = [*accumulate((len(some) or 1 for some in read), initial=0)]
    return program._replace(
        closed=closed,
        read=_names(program.read, read),
        made=_names(program.made, made),
        back={before[at]: k for at, k in program.back.items()},
    )


def _names(names: Sequence[Value], slices: Sequence[Sequence[Slice]]) -> list[Value]:
    each = ([_named(name, one) for one in some] or [name] for name, some in zip(names, slices))
    return [name for some in each for name in some]


def _splitting(placement: Placement, slices: Sequence[Slice]) -> Run:
    """Makes a program that cuts an array into slices."""
    specs = (REPLICATED,) * len(slices)
    return placement.program(lambda x: tuple(jax.lax.slice_in_dim(x, *one) for one in slices), (REPLICATED,), specs)


def _joining(placement: Placement, count: int) -> Run:
    """Makes a program that puts so many slices together."""
    return placement.program(lambda *each: (jnp.concatenate(each),), (REPLICATED,) * count, (REPLICATED,))


def _apart(cuts: Cuts, split: Mapping[Value, Run], values: Mapping[Value, Any]) -> dict[Value, Any]:
    """Puts slices in the places of arrays."""
    apart = dict(values)
    for name, slices in cuts.items():
        x = apart.pop(name)
        if isinstance(x, Sliced) and len(x.slices) == len(slices):
            parts = x.slices
        elif isinstance(x, jax.ShapeDtypeStruct):
            parts = [jax.ShapeDtypeStruct(one.dims(x.shape), x.dtype) for one in slices]
        else:
            parts = split[name](awaited(x))
        apart.update(zip((_named(name, one) for one in slices), parts))
    return apart


def _together(cuts: Cuts, join: Mapping[Value, Run], values: Mapping[Value, Any]) -> dict[Value, Any]:
    """Puts arrays in the places of slices: they are put together when somebody looks."""
    together = dict(values)
    for name, slices in cuts.items():
        result = Value(RESULT, path=f"0/{name.path}")
        parts = [together.pop(_named(result, one)) for one in slices]
        form = jax.ShapeDtypeStruct((slices[-1].end, *parts[0].shape[1:]), parts[0].dtype)
        together[result] = Sliced(form, parts, join[name])
    return together
