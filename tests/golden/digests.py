"""Digests of the programs of a step; renaming or regrouping code changes none of them.

    python tests/golden/digests.py

writes those of the installed JAX to `jax-VERSION.json`, next to this file.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import fddp

FOLDER = Path(__file__).parent
REPLICAS = 4
LAYERS = 3
WIDTH = 16
hooks = fddp.hooks


def weights() -> dict[str, Any]:
    draw = np.random.default_rng(0)
    layers = {"bias": np.zeros((LAYERS, WIDTH)), "kernel": draw.normal(size=(LAYERS, WIDTH, WIDTH))}
    params = {"in": draw.normal(size=(5, WIDTH)), "layers": layers, "out": draw.normal(size=WIDTH)}
    return jax.tree.map(lambda x: x.astype(np.float32), params)


def scanned(params: Any, rows: Any) -> jax.Array:
    """Layers in a loop."""
    x, _ = jax.lax.scan(layer, rows @ params["in"], params["layers"])
    return jnp.mean((x @ params["out"]) ** 2)


def unrolled(params: Any, rows: Any) -> jax.Array:
    """The same layers, one after the other."""
    x = rows @ params["in"]
    for k in range(LAYERS):
        x, _ = layer(x, jax.tree.map(lambda stack, k=k: stack[k], params["layers"]))
    return jnp.mean((x @ params["out"]) ** 2)


def layer(x: Any, w: Any) -> tuple[Any, None]:
    return x + jnp.tanh(x @ w["kernel"] + w["bias"]), None


def with_buffers(params: Any, rows: Any, *, model_state: Any, rng: Any) -> Any:
    """Dropout, a running mean and a metric."""
    dropped_out = rows * jax.random.bernoulli(rng, 0.9, rows.shape)
    return unrolled(params, dropped_out), (
        {"mean": 0.9 * model_state["mean"] + 0.1 * jnp.mean(rows, 0)},
        jnp.max(rows),
    )


def summed(params: Any, rows: Any) -> jax.Array:
    """A collective in the loss."""
    center = jax.lax.pmean(jnp.mean(rows, 0), "replica")
    return unrolled(params, rows - center)


LOSSES: dict[str, Callable[..., Any]] = {"unrolled": unrolled, "scanned": scanned}
OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "optimizer": {"shard": "optimizer"},
    "state": {"shard": "state"},
}
CASES: dict[str, tuple[Callable[..., Any], Any, dict[str, Any]]] = {
    f"{loss} {way} {schedule}": (
        LOSSES[loss],
        optax.adamw(0.1),
        {**OPTIONS[way], "schedule": schedule},
    )
    for loss, way, schedule in product(LOSSES, OPTIONS, ("overlap", "after"))
} | {
    name: (loss, optimizer, options)
    for name, loss, optimizer, options in (
        (
            "a norm",
            unrolled,
            optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
            {"shard": "state"},
        ),
        (
            "a matrix at its owner",
            unrolled,
            optax.contrib.muon(0.1),
            {"shard": "optimizer"},
        ),
        ("accumulated", unrolled, optax.sgd(0.1, momentum=0.9), {"accumulation_steps": 2}),
        (
            "accumulated shards",
            unrolled,
            optax.adamw(0.1),
            {"accumulation_steps": 2, "shard": "state"},
        ),
        ("unused", unrolled, optax.sgd(0.1), {"find_unused_parameters": True}),
        ("finite", unrolled, fddp.dynamic_scale(optax.sgd(0.1)), {"skip_nonfinite": True}),
        ("buffers", with_buffers, optax.sgd(0.1), {}),
        (
            "mean buffers",
            with_buffers,
            optax.sgd(0.1),
            {"broadcast_buffers": "mean"},
        ),
        ("a collective", summed, optax.sgd(0.1), {}),
        ("bf16", unrolled, optax.sgd(0.1), {"hook": hooks.bf16()}),
        ("topk", unrolled, optax.sgd(0.1), {"hook": hooks.topk(0.25)}),
        ("quantize", unrolled, optax.sgd(0.1), {"hook": hooks.quantize()}),
        ("virtual replicas", unrolled, optax.sgd(0.1), {"virtual_replicas": 8}),
        ("local steps", unrolled, fddp.local_steps(optax.adam(0.1), every=2), {}),
        ("caps", unrolled, optax.sgd(0.1), {"bucket_cap_mb": [0.0001, 0.001], "order": "reverse"}),
        (
            "ignored",
            unrolled,
            optax.sgd(0.1),
            {"ignore": lambda path: path.startswith("layers/bias")},
        ),
    )
}


def digest(case: str) -> str:
    """The digest of a configuration's plan and program."""
    loss, optimizer, options = CASES[case]
    group = fddp.mesh_group(Mesh(np.array(jax.devices()[:REPLICAS]), "replica"))
    # As on GPUs, where the sums of stacked layers are in their loop.
    group = replace(group, placement=group.placement._replace(overlaps=True))
    small: dict[str, Any] = {
        "bucket_cap_mb": 0.0003,
        "first_bucket_mb": 0.0001,
        "last_bucket_mb": 0.0001,
    }
    step = fddp.train_step(loss, optimizer, group=group, **(small | options))
    buffered = {"model_state": {"mean": np.zeros(5, np.float32)}, "rng": jax.random.key(0)}
    state = step.init(weights(), **(buffered if loss is with_buffers else {}))
    rows = np.ones((16, 5), np.float32)
    step.settle(state, rows)
    program = step.lower(state, rows).as_text() if step.settled.is_one_program else ""
    return hashlib.sha256("\n\n".join((str(step.plan), program)).encode()).hexdigest()[:16]


def recorded_digests() -> dict[str, str]:
    """The digests of the installed JAX; none, if it has no file here."""
    file = FOLDER / f"jax-{jax.__version__}.json"
    return json.loads(file.read_text()) if file.exists() else {}


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", REPLICAS)
    digests = {case: digest(case) for case in CASES}
    (FOLDER / f"jax-{jax.__version__}.json").write_text(json.dumps(digests, indent=1) + "\n")
    print(f"{len(digests)} digests for JAX {jax.__version__}")
