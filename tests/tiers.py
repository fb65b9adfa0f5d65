"""The cases of a test that run in the default tier; all others are in the tier `slow`."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import pytest


def crossed(**values: Sequence[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrizes a test by all combinations of its arguments' values; in a mapping, by their
    names.

    In the default tier are a few combinations, in which each value occurs.
    """
    named = [
        list(x.items()) if isinstance(x, Mapping) else [(str(value), value) for value in x]
        for x in values.values()
    ]
    diagonal = {tuple(x[k % len(x)][0] for x in named) for k in range(max(len(x) for x in named))}
    cases = []
    for combination in product(*named):
        names = tuple(name for name, _ in combination)
        marks = [] if names in diagonal else [pytest.mark.slow]
        cases.append(pytest.param(*(x for _, x in combination), id="-".join(names), marks=marks))
    return pytest.mark.parametrize(tuple(values), cases)


def leave_to_slow(items: Sequence[pytest.Item]) -> None:
    """Marks as `slow` the cases of a test that its mark `quick` does not name."""
    named = set[tuple[str, str]]()
    present = set[tuple[str, str]]()
    for item in items:
        quick = item.get_closest_marker("quick")
        if quick and isinstance(item, pytest.Function):
            test = item.nodeid.split("[")[0]
            case = item.callspec.id
            named |= {(test, name) for name in quick.args}
            present.add((test, case))
            if case not in quick.args:
                item.add_marker(pytest.mark.slow)
    tests = [test for test, _ in present]
    missing = sorted((test, name) for test, name in named - present if tests.count(test) > 1)
    if missing:
        raise pytest.UsageError(f"pytest.mark.quick names cases that do not exist: {missing}")
