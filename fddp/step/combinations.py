"""Table of the incompatible pairs of features, with a reason and an alternative for each.

All other pairs work. `docs/combinations.md` shows the same table.
"""

from collections.abc import Mapping

AXES = "a replica of several devices"
LOCAL = "fddp.local_steps"
MULTI_STEPS = "optax.MultiSteps"
SCALE_INSIDE = "optax.MultiSteps(fddp.dynamic_scale)"
MEMORY = "a hook with a memory"
COLLECTIVES = "collectives in the loss"
WHOLE_LEAVES = "a hook that needs whole leaves"

ONE_OF_THEM = "leave one of them out"
ELEMENTWISE = "use a hook that sums each element separately, hooks.bf16() or hooks.fp16()"

# Feature → incompatible feature → (reason, alternative).
PAIRS: dict[str, dict[str, tuple[str, str]]] = {
    "shard": {
        WHOLE_LEAVES: ("each replica sums its shards of the leaves", ELEMENTWISE),
        AXES: (
            "the devices of a replica hold parts of its leaves already",
            "leave shard out, or lay the whole state out with `jax.jit` and `NamedSharding`",
        ),
    },
    LOCAL: {
        "shard": ("each replica trains separately, with a whole state", ONE_OF_THEM),
        AXES: ("it needs replicas of one device each", ONE_OF_THEM),
        "schedule='eager'": (
            "the outer optimizer needs the sums of all replicas",
            "leave schedule out",
        ),
        MEMORY: (
            "gradients and changes of parameters would share one memory",
            "use a hook without a memory, such as hooks.bf16()",
        ),
        COLLECTIVES: (
            "replicas would wait for each other in every step",
            "compute on the rows of one replica",
        ),
        "no_sync": (
            "a step between two synchronizations sends nothing already",
            "give accumulation_steps, or all rows at once",
        ),
        "fddp.join": (
            "a rank without data has nothing to train on",
            "give each rank equally many batches",
        ),
    },
    "virtual_replicas": {
        **dict.fromkeys(
            ("schedule='overlap'", "schedule='after'", "schedule='eager'"),
            (
                "its programs run one by one, the same on any number of replicas, and its messages "
                "leave behind the last of them",
                "leave schedule out",
            ),
        ),
        **dict.fromkeys(
            ("hook", "shard"), ("it adds unchanged buckets, in a fixed order", ONE_OF_THEM)
        ),
        "broadcast_buffers=False": (
            "each replica would retain its buffers, and virtual replicas move between replicas",
            "give broadcast_buffers=True or 'mean'",
        ),
        AXES: (
            "virtual replicas replace replicas of one device each",
            "leave virtual_replicas out",
        ),
        LOCAL: ("virtual replicas replace synchronous replicas", ONE_OF_THEM),
        COLLECTIVES: (
            "their order of additions depends on the number of replicas, and so would the bits",
            "leave virtual_replicas out; each slice of the rows has a separate rng=",
        ),
        "no_sync": (
            "sums stay pending on their replica, and virtual replicas move between replicas",
            "give the step all rows at once, with more virtual_replicas or with accumulation_steps",
        ),
        "fddp.join": (
            "it needs the same number of batches on each rank",
            "let fddp.samples distribute the rows",
        ),
    },
    WHOLE_LEAVES: {
        AXES: ("each device sends the parts of leaves that it holds", ELEMENTWISE),
    },
    MULTI_STEPS: {
        "find_unused_parameters": (
            "a parameter that its last batch does not use would lose the gradients of earlier "
            "batches",
            "give accumulation_steps, or call no_sync: they count the uses of all batches",
        ),
    },
    SCALE_INSIDE: {
        "skip_nonfinite": (
            "the scale is checked only after all batches, and a skipped step has none of them",
            "give fddp.dynamic_scale(optax.MultiSteps(…))",
        ),
    },
    "fddp.value_and_grad": {
        "donate": ("it has no state to overwrite", "leave donate out"),
        "check_replicas_every": ("it has no state to compare", "use fddp.train_step"),
        "shard": ("it has no optimizer whose state could be shared", "use fddp.train_step"),
        "skip_nonfinite": (
            "it has no step to skip, and its gradients are equal on all ranks",
            "use optax.apply_if_finite, which skips non-finite updates",
        ),
        MEMORY: (
            "the hook has a memory from step to step, and it has no state for this memory",
            "use fddp.train_step",
        ),
    },
}


def refuse(features: Mapping[str, str]) -> None:
    """Raises ValueError if two features of a step are incompatible."""
    for one, others in PAIRS.items():
        for other, (why, instead) in others.items():
            if one in features and other in features:
                raise ValueError(
                    f"{features[one]} does not work with {features[other]}: {why}. "
                    f"{instead[0].upper()}{instead[1:]}."
                )


def as_markdown() -> str:
    """Formats the pairs as a Markdown table."""
    rows = [
        f"| {_code(one)} | {_code(other)} | {why} | {instead} |"
        for one, others in PAIRS.items()
        for other, (why, instead) in others.items()
    ]
    return "\n".join(
        ["| this | does not work with | reason | alternative |", "|---|---|---|---|", *rows]
    )


def _code(feature: str) -> str:
    if " " in feature:
        return feature
    return f"`{feature}`"
