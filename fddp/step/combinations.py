"""Table of the incompatible pairs of features, with a reason and an alternative for each.

All other pairs work. `docs/combinations.md` shows the same table.
"""

from collections.abc import Mapping
from typing import NamedTuple

AXES = "a replica of several devices"
LOCAL = "fddp.local_steps"
MULTI_STEPS = "optax.MultiSteps"
SCALE_INSIDE = "optax.MultiSteps(fddp.dynamic_scale)"
MEMORY = "a hook with a memory"
COLLECTIVES = "collectives in the loss"
WHOLE_LEAVES = "a hook that needs whole leaves"


class Pair(NamedTuple):
    """Two incompatible features."""

    one: str
    other: str
    why: str
    instead: str


PAIRS = (
    # shard
    Pair(
        "shard",
        WHOLE_LEAVES,
        "each replica sums its shards of the leaves",
        "use a hook that sums each element separately, hooks.bf16() or hooks.fp16()",
    ),
    Pair(
        "shard",
        AXES,
        "the devices of a replica hold parts of its leaves already",
        "leave shard out, or lay the whole state out with `jax.jit` and `NamedSharding`",
    ),
    # local steps
    *(
        Pair(LOCAL, feature, why, instead)
        for feature, why, instead in (
            (
                "shard",
                "each replica trains separately, with a whole state",
                "leave one of them out",
            ),
            (AXES, "it needs replicas of one device each", "leave one of them out"),
            (
                "schedule='eager'",
                "the outer optimizer needs the sums of all replicas",
                "leave schedule out",
            ),
            (
                MEMORY,
                "gradients and changes of parameters would share one memory",
                "use a hook without a memory, such as hooks.bf16()",
            ),
            (
                COLLECTIVES,
                "replicas would wait for each other in every step",
                "compute on the rows of one replica",
            ),
            (
                "no_sync",
                "a step between two synchronizations sends nothing already",
                "give accumulation_steps, or all rows at once",
            ),
            (
                "fddp.join",
                "a rank without data has nothing to train on",
                "give each rank equally many batches",
            ),
        )
    ),
    # virtual replicas
    *(
        Pair(
            "virtual_replicas",
            f"schedule={name!r}",
            "its programs run one by one, the same on any number of replicas, and its messages "
            "leave behind the last of them",
            "leave schedule out",
        )
        for name in ("overlap", "after", "eager")
    ),
    *(
        Pair(
            "virtual_replicas",
            feature,
            "it adds unchanged buckets, in a fixed order",
            "leave one of them out",
        )
        for feature in ("hook", "shard")
    ),
    Pair(
        "virtual_replicas",
        "broadcast_buffers=False",
        "each replica would retain its buffers, and virtual replicas move between replicas",
        "give broadcast_buffers=True or 'mean'",
    ),
    Pair(
        "virtual_replicas",
        AXES,
        "virtual replicas replace replicas of one device each",
        "leave virtual_replicas out",
    ),
    Pair(
        "virtual_replicas",
        LOCAL,
        "virtual replicas replace synchronous replicas",
        "leave one of them out",
    ),
    Pair(
        "virtual_replicas",
        COLLECTIVES,
        "their order of additions depends on the number of replicas, and so would the bits",
        "leave virtual_replicas out; each slice of the rows has a separate rng=",
    ),
    Pair(
        "virtual_replicas",
        "no_sync",
        "sums stay pending on their replica, and virtual replicas move between replicas",
        "give the step all rows at once, with more virtual_replicas or with accumulation_steps",
    ),
    Pair(
        "virtual_replicas",
        "fddp.join",
        "it needs the same number of batches on each rank",
        "let fddp.samples distribute the rows",
    ),
    # schedules and hooks
    Pair(
        WHOLE_LEAVES,
        AXES,
        "each device sends the parts of leaves that it holds",
        "use a hook that sums each element separately, hooks.bf16() or hooks.fp16()",
    ),
    # optax.MultiSteps
    Pair(
        MULTI_STEPS,
        "find_unused_parameters",
        "a parameter that its last batch does not use would lose the gradients of earlier batches",
        "give accumulation_steps, or call no_sync: they count the uses of all batches",
    ),
    Pair(
        SCALE_INSIDE,
        "skip_nonfinite",
        "the scale is checked only after all batches, and a skipped step has none of them",
        "give fddp.dynamic_scale(optax.MultiSteps(…))",
    ),
    # value_and_grad
    Pair(
        "fddp.value_and_grad",
        "donate",
        "it has no state to overwrite",
        "leave donate out",
    ),
    Pair(
        "fddp.value_and_grad",
        "check_replicas_every",
        "it has no state to compare",
        "use fddp.train_step",
    ),
    Pair(
        "fddp.value_and_grad",
        "shard",
        "it has no optimizer whose state could be shared",
        "use fddp.train_step",
    ),
    Pair(
        "fddp.value_and_grad",
        "skip_nonfinite",
        "it has no step to skip, and its gradients are equal on all ranks",
        "use optax.apply_if_finite, which skips non-finite updates",
    ),
    Pair(
        "fddp.value_and_grad",
        MEMORY,
        "the hook has a memory from step to step, and it has no state for this memory",
        "use fddp.train_step",
    ),
)


def refuse(features: Mapping[str, str]) -> None:
    """Raises ValueError if two features of a step are incompatible.

    >>> refuse({"hook": "hook=bf16", "shard": "shard='state'"})
    """
    for pair in PAIRS:
        if pair.one in features and pair.other in features:
            raise ValueError(
                f"{features[pair.one]} does not work with {features[pair.other]}: {pair.why}. "
                f"{pair.instead[0].upper()}{pair.instead[1:]}."
            )


def as_markdown() -> str:
    """Formats the pairs as a Markdown table."""
    rows = [
        f"| {_code(pair.one)} | {_code(pair.other)} | {pair.why} | {pair.instead} |"
        for pair in PAIRS
    ]
    return "\n".join(
        ["| this | does not work with | reason | alternative |", "|---|---|---|---|", *rows]
    )


def _code(feature: str) -> str:
    if " " in feature:
        return feature
    return f"`{feature}`"
