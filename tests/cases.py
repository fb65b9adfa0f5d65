"""One table of trainings in which each pair of values of two features occurs, for `bench/plain.py`,
which trains them in plain JAX in float64."""

import random
from dataclasses import replace
from itertools import combinations, product
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from bench.drawn import HOOKS, Drawn, calls_of

# Feature → value
Case: TypeAlias = dict[str, Any]

FEATURES: dict[str, tuple[Any, ...]] = {
    "loss": ("plain", "weighted", "keys", "branch", "statistics"),
    # float64, but for what these say
    "numbers": ("float64", "complex", "16 bits", "sent in 16 bits", "computed in 16 bits"),
    "leaves": ("used", "one unused", "unused ones found"),
    "calls": ("whole", "micro-batches", "no_sync"),
    "buffers": ("none", True, False, "mean"),
    "hook": ("", "topk(1.0)"),
    "shard": (None, "optimizer", "state"),
    "schedule": ("overlap", "after"),
    "rows": ("rows", "stacked", "joined"),
    "optimizer": ("momentum", "clip, adamw", "multi_transform"),
    "overflow": ("never", "skip", "scale"),
    "replicas": (2, 3, 4),  # four are two hosts of two
}
LOSSES = {"plain": frozenset[str](), "keys": frozenset({"rng", "shared rng"})}
EXACT = ("float64", "complex")
# What fddp refuses, and what `bench/plain.py` cannot train.
APART: tuple[Case, ...] = (
    {"shard": ("optimizer", "state"), "hook": ("topk(1.0)",)},
    {"numbers": ("sent in 16 bits",), "hook": ("topk(1.0)",)},
    {"loss": ("statistics",), "rows": ("stacked", "joined")},
    {"loss": ("statistics",), "buffers": (True, False, "mean")},
    {"overflow": ("skip", "scale"), "rows": ("joined",)},
)


def goes(case: Case) -> bool:
    """True if the values of a case, or of a part of one, go together."""
    clashes = [all(case.get(name) in apart[name] for name in apart) for apart in APART]
    return not any(clashes)


def met(case: Case) -> set[Any]:
    """The pairs of values that a case claims: one that rounds to 16 bits says little of others."""
    pairs = combinations(case.items(), 2)
    exact = case["numbers"] in EXACT
    return {pair for pair in pairs if exact or "numbers" in (pair[0][0], pair[1][0])}


def wanted() -> list[Any]:
    """The pairs of values that go together."""
    named = [[(name, x) for x in values] for name, values in FEATURES.items()]
    pairs = [pair for one, other in combinations(named, 2) for pair in product(one, other)]
    return [pair for pair in pairs if goes(dict(pair))]


def table() -> list[Case]:
    """Draws cases, the same in each run, until each pair of values has occurred."""
    draw = random.Random(7)
    missing = dict.fromkeys(wanted())
    cases = list[Case]()
    while missing:
        first = dict(next(iter(missing)))
        tries = list[Case]()
        while len(tries) < 20:
            drawn = {name: draw.choice(values) for name, values in FEATURES.items()} | first
            exact = drawn["numbers"] in EXACT or "numbers" in first
            tries += [drawn] * (goes(drawn) and exact)
        best = max(tries, key=lambda case: len(missing.keys() & met(case)))
        cases.append(best)
        for pair in met(best):
            missing.pop(pair, None)
    return cases


def drawn_of(number: int, replicas: int = 0) -> Drawn:
    """The training of a case of the table, on its own number of replicas or another one."""
    case = TABLE[number]
    hosts = 2 if case["replicas"] == 4 and not replicas else 1
    replicas = replicas or case["replicas"]
    half = "bfloat16" if case["numbers"] == "16 bits" else "float64"
    dtypes = dict.fromkeys(("a", "b", "c", "table_d"), "float64") | {
        "b": "complex128" if case["numbers"] == "complex" else half,
        "c": half,
    }
    make = np.random.default_rng(number)
    shapes = {"a": (3, 4), "b": (5,), "c": (), "table_d": (12, 2)}
    params = {
        name: np.asarray(make.normal(size=shapes[name])).astype(jnp.dtype(dtype))
        for name, dtype in dtypes.items()
    }
    hook = "bf16" if case["numbers"] == "sent in 16 bits" else case["hook"]
    has_buffers = case["buffers"] != "none"
    options: dict[str, Any] = {
        "schedule": case["schedule"],
        "bucket_cap_mb": 0,
        "shard": case["shard"],
        "accumulation_steps": 2 if case["calls"] == "micro-batches" else 1,
        "find_unused_parameters": case["leaves"] == "unused ones found",
        "skip_nonfinite": case["overflow"] == "skip",
        "hook": HOOKS[hook]() if hook else None,
    } | ({"broadcast_buffers": case["buffers"]} if has_buffers else {})
    micro_batches = options["accumulation_steps"]
    calls = calls_of(
        random.Random(number), make, True, replicas, micro_batches, case["rows"], False, False
    )[:3]
    kinds = ("step", "no_sync" if case["calls"] == "no_sync" else "step", "step")
    calls = [replace(call, kind=kind) for call, kind in zip(calls, kinds)]
    for batch in [batch for call in calls for batch in call.batches]:
        batch |= {name: np.float64(x) for name, x in batch.items() if x.dtype.kind == "f"}
    if infinite := case["overflow"] != "never":
        calls[1].batches[0]["x"][0] = np.inf
    return Drawn(
        seed=number,
        x64=True,
        replicas=replicas,
        dtypes=dtypes,
        order=("a", "table_d", "c", "b")[: 4 if case["leaves"] == "used" else 3],
        form=LOSSES.get(case["loss"], frozenset({case["loss"]}))
        | ({"aux", "model_state"} if has_buffers else {"aux"}),
        rows=case["rows"],
        optimizer=case["optimizer"],
        scale=case["overflow"] == "scale",
        hook=hook,
        options=options,
        ignored="",
        local={},
        infinite=infinite,
        params=params,
        calls=tuple(calls),
        hosts=hosts,
        narrow=case["numbers"] == "computed in 16 bits",
    )


TABLE = table()
