"""Random configurations of states in shards, with more choices than others: all of it from one
seed.

They add to `drawn.py` sums over hosts first, losses with statistics of all rows, losses that
compute in 16 bits, and optimizers of parts of a tree.
"""

import random
from typing import Any

import numpy as np

from bench.drawn import (
    HOOKS,
    OPTIMIZERS,
    PARTS,
    Drawn,
    calls_of,
    form_of,
    leaves_of,
    options_of,
    order_of,
)

WAYS: tuple[dict[str, Any], ...] = (
    {"shard": "optimizer"},
    {"shard": "state"},
)
# They sum each element by itself, and remember nothing, so that plain JAX computes the result.
BY_ELEMENT = ("allreduce", "bf16", "fp16", "quantize without memory")
# Features excluded with statistics of all rows: the rows of a replica are no longer a
# slice of all.
OF_A_SLICE = {"model_state", "rng", "shared rng", "branch"}


def draw_shards(seed: int) -> Drawn:
    """Draws a configuration whose state lies in shards; the same for the same seed."""
    pick = random.Random(f"shards {seed}")
    chance = lambda p: pick.random() < p  # noqa: E731
    numbers = np.random.default_rng(seed)
    x64 = chance(0.6)
    replicas = pick.choice((2, 2, 3, 4, 4, 8))
    dtypes, params = leaves_of(pick, numbers, x64)
    order = order_of(pick, dtypes, 0.15)
    form = form_of(pick, order)
    rows = pick.choices(("rows", "stacked", "joined"), (6, 1, 3))[0]
    if rows == "rows" and chance(0.35):
        form = form - OF_A_SLICE | {"statistics"}
    hook = pick.choice(BY_ELEMENT if chance(0.9) else list(HOOKS)) if chance(0.35) else ""
    options = options_of(pick, replicas, bool(hook)) | pick.choice(WAYS)
    options.pop("virtual_replicas", None)
    if hook:
        options["hook"] = HOOKS[hook]()
    return Drawn(
        seed=seed,
        x64=x64,
        replicas=replicas,
        dtypes=dtypes,
        order=tuple(order),
        form=frozenset(form),
        rows=rows,
        optimizer=pick.choice([*OPTIMIZERS, *PARTS, *PARTS]),
        scale=chance(0.1),
        hook=hook,
        options=options,
        ignored=pick.choice(list(dtypes)) if chance(0.08) else "",
        local={},
        infinite=False,
        params=params,
        calls=tuple(
            calls_of(
                pick,
                numbers,
                x64,
                replicas,
                options.get("accumulation_steps", 1),
                rows,
                False,
                False,
            )
        ),
        hosts=pick.choice((2, replicas // 2)) if replicas in (4, 8) and chance(0.5) else 1,
        narrow=chance(0.15),
    )
