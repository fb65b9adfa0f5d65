"""Which cases of a test run in the default tier; all others are in the tier `slow`."""

from collections.abc import Collection, Mapping, Sequence
from itertools import product
from typing import Any

import pytest


def crossed(**values: Sequence[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrizes a test by all combinations of its arguments' values; in a mapping, by their names.

    In the default tier are a few combinations, in which each value occurs.
    """
    named = [
        list(x.items()) if isinstance(x, Mapping) else [(str(value), value) for value in x] for x in values.values()
    ]
    diagonal = {tuple(x[k % len(x)][0] for x in named) for k in range(max(len(x) for x in named))}
    cases = []
    for combination in product(*named):
        names = tuple(name for name, _ in combination)
        marks = [] if names in diagonal else [pytest.mark.slow]
        cases.append(pytest.param(*(x for _, x in combination), id="-".join(names), marks=marks))
    return pytest.mark.parametrize(tuple(values), cases)


def few(argument: str, values: Mapping[str, Any], quick: Collection[str]) -> pytest.MarkDecorator:
    """Parametrizes a test by values, of which those that are named run in the default tier."""
    cases = [
        pytest.param(value, id=name, marks=[] if name in quick else [pytest.mark.slow])
        for name, value in values.items()
    ]
    return pytest.mark.parametrize(argument, cases)
