"""Checkpoints of fddp 0.2, which Orbax wrote for rank 0 alone, are read like all others."""

import json
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from trees import bits

import fddp

pytestmark = pytest.mark.steps

ROWS = np.sin(np.arange(24, dtype=np.float32)).reshape(8, 3)


def make(
    group: fddp.Group, shard: Any = None, **options: Any
) -> tuple[fddp.TrainStep, fddp.TrainState]:
    def loss(p: Any, x: Any, *, rng: Any) -> jax.Array:
        h, _ = jax.lax.scan(
            lambda h, w: (jnp.tanh(h @ w), None), x @ p["w"].astype(x.dtype), p["stack"]
        )
        return jnp.mean((h + jax.random.normal(rng)) ** 2) + p["one"] ** 2

    step = fddp.train_step(loss, optax.adam(0.1), group=group, shard=shard, **options)
    params = {
        "w": jnp.ones((3, 20), jnp.bfloat16),
        "stack": np.sin(np.arange(3 * 20 * 20, dtype=np.float32)).reshape(3, 20, 20),
        "one": np.float32(1),
        "empty": np.zeros((0, 2), np.float32),
    }
    return step, step.init(params, rng=jax.random.key(1))


def write_with_orbax(folder: Path, state: fddp.TrainState, replicas: int, place: Any) -> None:
    """Writes a checkpoint as fddp 0.2 did: Orbax's own files, and a list of them."""
    gathered = fddp.whole(state)
    gathered = gathered._replace(rng=jax.random.key_data(gathered.rng))
    named = jax.tree_util.tree_leaves_with_path(gathered)
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.array(x) for path, x in named
    }
    with ocp.CheckpointManager(folder) as manager:
        manager.save(
            1, args=ocp.args.StandardSave({name: x for name, x in leaves.items() if x.size})
        )
    saved = folder / "1"
    digest = lambda data: blake2b(data, digest_size=16).hexdigest()  # noqa: E731
    files = {
        str(path.relative_to(saved)): digest(path.read_bytes())
        for path in saved.rglob("*")
        if path.is_file()
    }
    forms = {name: (str(x.dtype), x.shape) for name, x in leaves.items()}
    text = json.dumps(
        {"told": {"place": place, "replicas": replicas}, "forms": forms, "files": files}
    )
    (saved / "fddp.json").write_text(json.dumps([digest(text.encode()), text]))


@pytest.mark.quick("3-state", "2-None")
@pytest.mark.parametrize("shard", [None, "optimizer", "state"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_a_checkpoint_that_orbax_wrote_is_restored_whole_and_in_shards(
    group: Callable[[int], fddp.Group], tmp_path: Path, shard: Any, replicas: int
):
    step, state = make(group(2))
    state, _ = step(state, ROWS)
    write_with_orbax(tmp_path, state, 2, {"row": 8})
    step, like = make(group(replicas), shard)
    with fddp.Checkpoints(tmp_path, step) as checkpoints:
        restored_state, place = checkpoints.restore(like)
        assert place == {"row": 8}
        assert bits(fddp.whole(restored_state)) == bits(fddp.whole(state))
        restored_state, _ = step(restored_state, np.concatenate([ROWS] * 3))
        assert checkpoints.save(restored_state, now=True)
    with fddp.Checkpoints(tmp_path, step) as checkpoints:  # the new one stands beside the old one
        newer, _ = checkpoints.restore(make(group(replicas), shard)[1])
    assert bits(newer) == bits(restored_state)


def test_what_hooks_remembered_in_a_checkpoint_that_orbax_wrote_comes_back(
    group: Callable[[int], fddp.Group], tmp_path: Path
):
    step, like = make(group(2), hook=fddp.hooks.topk(0.4))
    state, _ = step(like, ROWS)
    write_with_orbax(tmp_path, state, 2, None)
    step, like = make(group(2), hook=fddp.hooks.topk(0.4))
    with fddp.Checkpoints(tmp_path, step) as checkpoints:
        restored_state, _ = checkpoints.restore(like)
    assert bits(restored_state) == bits(state) != bits(like)


def test_a_changed_byte_in_what_orbax_wrote_is_found(
    group: Callable[[int], fddp.Group], tmp_path: Path
):
    step, state = make(group(2))
    write_with_orbax(tmp_path, state, 2, None)
    file = max(tmp_path.rglob("ocdbt.process_0/d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with (
        fddp.Checkpoints(tmp_path, step) as checkpoints,
        pytest.raises(RuntimeError, match=r"step 1 \(default/.*damaged"),
    ):
        checkpoints.restore(state)
