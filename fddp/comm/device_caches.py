"""Caches of values on devices, which become invalid when the processes of a job change."""

from collections.abc import Callable
from functools import cache
from typing import Any, ParamSpec, TypeVar

Args = ParamSpec("Args")
Result = TypeVar("Result")
_caches = list[Any]()


def device_cache(f: Callable[Args, Result]) -> Callable[Args, Result]:
    """Decorates a function like `functools.cache`, until `forget_device_caches`."""
    cached: Any = cache(f)
    _caches.append(cached)
    return cached


def forget_device_caches() -> None:
    """Drops all values: they hold devices, and so XLA's client with its threads."""
    for cached in _caches:
        cached.cache_clear()
