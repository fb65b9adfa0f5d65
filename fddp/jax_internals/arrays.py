"""Arrays, as JAX has them on the devices of a process."""

from collections.abc import Sequence
from typing import Any

import jax


def parts_here(x: jax.Array) -> Sequence[Any]:
    """An array's parts on this process's devices. Relies on `_arrays`, of random keys on `_base_array`.

    The public `addressable_shards` makes a record of each part, which takes five times as long.
    """
    whole: Any = getattr(x, "_base_array", x)
    return whole._arrays


def given_away(x: jax.Array) -> bool:
    """Whether an array's memory, on any device, was used for something else.

    `is_deleted` asks the first part alone: what NumPy looks at stays when the parts on the other devices go.
    """
    return x.is_deleted() or any(part.is_deleted() for part in parts_here(x))
