"""Table of the incompatible pairs of features, with a reason and an alternative for each.

All other pairs work. `docs/combinations.md` shows the same table.
"""

from collections.abc import Mapping
from typing import NamedTuple

from fddp.schedules import SCHEDULES

AXES = "a replica of several devices"
FUNCTION = "a function in place of parameters"
LOCAL = "fddp.local_steps"
QUORUM = "local_steps(quorum=)"
ALONE = "fddp.local_steps without island"
ISLANDS = "fddp.local_steps with island"
LOOKAHEAD = "optax.lookahead"
MULTI_STEPS = "optax.MultiSteps"
SCALE_INSIDE = "optax.MultiSteps(fddp.dynamic_scale)"
MEMORY = "a hook with a memory"
COLLECTIVES = "collectives in the loss"
WHOLE_LEAVES = "a hook that needs whole leaves"
OWN_SCHEDULE = "a schedule of your own"


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
        "skip_all_reduce_unused_params",
        "all that is trained is gathered, whether it was used or not",
        "leave one of them out",
    ),
    Pair("shard", LOOKAHEAD, "it has two sets of parameters", "leave one of them out"),
    # a function that makes the parameters
    Pair(
        FUNCTION,
        AXES,
        "it does not say where the parts of each array are to lie",
        "give arrays that are made there, `jax.jit(make, out_shardings=...)()`",
    ),
    # local steps
    Pair(
        ALONE,
        "shard",
        "each replica trains alone with a whole state of its own",
        "give local_steps islands of several replicas",
    ),
    Pair(
        ISLANDS,
        "schedule='eager'",
        "an island's update is followed by sums between islands",
        "give schedule='staged' or 'fused'",
    ),
    Pair(
        LOCAL,
        "skip_all_reduce_unused_params",
        "replicas that train alone agree on nothing before they send",
        "leave skip_all_reduce_unused_params out",
    ),
    Pair(LOCAL, AXES, "it needs replicas of one device each", "leave one of them out"),
    Pair(LOCAL, LOOKAHEAD, "fddp.local_steps of one replica is Lookahead", "give plain parameters"),
    # asynchronous islands
    *(
        Pair(QUORUM, feature, why, instead)
        for feature, why, instead in (
            (
                "skip_all_reduce_unused_params",
                "islands agree on nothing before they send",
                "leave skip_all_reduce_unused_params out",
            ),
            (AXES, "an island's replicas are of one device each", "leave one of them out"),
            (
                MEMORY,
                "islands make unequally many sums for it to remember",
                "take a hook without a memory",
            ),
            (LOOKAHEAD, "it has two sets of parameters", "give plain parameters"),
            (
                "schedule='eager'",
                "an island waits for its parameters to send them",
                "give schedule='fused' or 'staged'",
            ),
            (
                "check_replicas_every",
                "islands are never equal, and to compare them they would have to wait for each "
                "other",
                "leave check_replicas_every out",
            ),
            (
                COLLECTIVES,
                "islands would wait for each other in every step",
                "compute on an island's own rows",
            ),
            (
                "fddp.join",
                "it lets ranks wait for each other before every step",
                "let each island end with its own rows, and call fddp.meet",
            ),
            (
                "fddp.measure",
                "islands would merge what its steps have learned",
                "measure the step of the inner optimizer",
            ),
            (
                "virtual_replicas",
                "virtual replicas stand in for replicas that train together",
                "leave one of them out",
            ),
        )
    ),
    # virtual replicas
    *(
        Pair(
            "virtual_replicas",
            schedule,
            "its programs are the same on any number of replicas, and one program for all of a "
            "step is none",
            "give schedule='staged' or 'after'",
        )
        for schedule in (
            *(f"schedule={name!r}" for name, x in SCHEDULES.items() if x.launch is None),
            OWN_SCHEDULE,
        )
    ),
    *(
        Pair(
            "virtual_replicas",
            feature,
            "it adds every bucket as it is, in an order of its own",
            "leave one of them out",
        )
        for feature in ("hook", "shard", "skip_all_reduce_unused_params")
    ),
    Pair(
        "virtual_replicas",
        "broadcast_buffers=False",
        "the buffers of each replica would be kept, and virtual replicas come and go",
        "give broadcast_buffers=True or 'mean'",
    ),
    Pair(
        "virtual_replicas",
        AXES,
        "virtual replicas stand in for replicas of one device each",
        "leave virtual_replicas out",
    ),
    Pair(
        "virtual_replicas",
        LOCAL,
        "virtual replicas stand in for replicas that train together",
        "leave one of them out",
    ),
    Pair(
        "virtual_replicas",
        COLLECTIVES,
        "they add in an order of theirs, so that its bits cannot be the same on any number of "
        "replicas",
        "leave virtual_replicas out; each slice of the rows has an rng= of its own",
    ),
    Pair(
        "virtual_replicas",
        "no_sync",
        "sums stay pending on the replica that made them, and virtual replicas come and go",
        "give the step all rows at once, with more virtual_replicas or with accumulation_steps",
    ),
    Pair(
        "virtual_replicas",
        "fddp.join",
        "it needs equally many batches on each rank",
        "let fddp.samples deal the rows out",
    ),
    Pair(
        "virtual_replicas",
        "fddp.tune",
        "tune regroups the stages of an ordinary step, and virtual replicas have stages of their "
        "own",
        "leave virtual_replicas out, and give the step the cap that was found",
    ),
    # schedules and hooks
    *(
        Pair(schedule, AXES, "the program of one device is cut", "use schedule='fused'")
        for schedule in (f"schedule={name!r}" for name, x in SCHEDULES.items() if x.cuts)
    ),
    Pair(
        WHOLE_LEAVES,
        AXES,
        "each device sends the parts of leaves that it holds",
        "take one that sums each element by itself, hooks.bf16() or hooks.fp16()",
    ),
    # optax.MultiSteps
    Pair(
        MULTI_STEPS,
        "find_unused_parameters",
        "a parameter that its last batch does not use would lose the gradients of those before",
        "give accumulation_steps, or call no_sync: they count the uses of all",
    ),
    Pair(
        SCALE_INSIDE,
        "skip_nonfinite",
        "the scale is asked only when all batches are there, and a step that is skipped has none "
        "of them",
        "give fddp.dynamic_scale(optax.MultiSteps(…))",
    ),
    # value_and_grad
    Pair(
        "fddp.value_and_grad",
        "donate",
        "it is given no state that it could write over",
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
        "use optax.apply_if_finite, which passes over what is not finite",
    ),
    Pair(
        "fddp.value_and_grad",
        MEMORY,
        "the hook remembers things from step to step, and it has no state to keep them in",
        "use fddp.train_step",
    ),
)


def refuse(features: Mapping[str, str]) -> None:
    """Raises ValueError if two features of a step are incompatible.

    `features` maps each feature of the table to its name in the error message.

    >>> refuse({"hook": "hook=bf16", "shard": "shard='state'"})
    """
    for pair in PAIRS:
        if pair.one in features and pair.other in features:
            raise ValueError(
                f"{features[pair.one]} cannot go with {features[pair.other]}: {pair.why}. "
                f"{pair.instead[0].upper()}{pair.instead[1:]}."
            )


def as_markdown() -> str:
    """Formats the pairs as a Markdown table."""
    rows = [
        f"| {_code(pair.one)} | {_code(pair.other)} | {pair.why} | {pair.instead} |"
        for pair in PAIRS
    ]
    return "\n".join(["| this | does not go with | why | instead |", "|---|---|---|---|", *rows])


def _code(feature: str) -> str:
    if " " in feature:
        return feature
    return f"`{feature}`"
