"""Replicas of a node share a state, and nodes sum the parts of its gradients: training is that of
plain JAX."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiers import crossed
from trees import close
from truth import by_plain_jax
from workers.crosswise import does

import fddp
from fddp.buckets import is_shard

pytestmark = pytest.mark.steps

Groups = Callable[[int], fddp.Group]
DRAW = np.random.default_rng(11)
# No size is divided by 2 or 4; a stack of layers is cut layer by layer; muon needs matrices whole.
PARAMS = {
    "w": DRAW.normal(size=(3, 7)),
    "b": DRAW.normal(size=7),
    "stack": DRAW.normal(size=(3, 7, 37)),
    "s": np.float64(0.5),
    "empty": np.zeros(0),
}
ROWS = DRAW.normal(size=(48, 3))
WAYS: dict[str, dict[str, Any]] = {
    "optimizer": {"shard": "optimizer"},
    "state": {"shard": "state"},
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
clipped = optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(0.05))


def loss_fn(p: Any, x: Any) -> Any:
    x = jnp.tanh(x @ p["w"] + p["b"])
    for k in range(3):
        x = jnp.tanh(x @ p["stack"][k]) @ p["stack"][k].T / 7
    return jnp.mean((x - p["s"]) ** 2) + jnp.sum(p["empty"])


def plain(optimizer: Any, steps: int) -> Any:
    """Parameters and optimizer's state of plain JAX on the joined batch."""
    return by_plain_jax(loss_fn, optimizer, PARAMS, [ROWS * (k + 1) for k in range(steps)])[:2]


def trained(group: fddp.Group, optimizer: Any, steps: int, **options: Any) -> tuple[Any, Any, Any]:
    options = {"bucket_cap_mb": 0, **options}
    step = fddp.train_step(loss_fn, optimizer, group=group, **options)
    state = step.init(PARAMS)
    info = None
    for k in range(steps):
        state, info = step(state, ROWS * (k + 1))
    return step, state, info


@pytest.mark.quick(
    "(4, 2, {'schedule': 'staged'})-state",
    "(8, 4, {'accumulation_steps': 2})-state",
    "(4, 2, {})-optimizer",
    "(4, 4, {})-state",
)
@crossed(
    case=[
        (4, 2, {}),
        (4, 2, {"schedule": "staged"}),
        (4, 2, {"schedule": "after", "accumulation_steps": 3}),
        (4, 1, {}),
        (4, 4, {}),
        (8, 4, {"accumulation_steps": 2}),
        (8, 2, {"schedule": "staged"}),
    ],
    way=WAYS,
)
def test_training_in_nodes_is_training(group: Groups, x64: None, case: Any, way: Any):
    n, local, options = case
    _, state, _ = trained(group(n).hierarchical(local), clipped, 3, **way, **options)
    gathered = fddp.whole(state)
    close((gathered.params, gathered.opt_state), plain(clipped, 3), rtol=0, atol=1e-10)


@pytest.mark.quick("fused")
@pytest.mark.parametrize("schedule", ["eager", "fused"])
def test_leaves_that_go_home_do_so_in_each_node(group: Groups, x64: None, schedule: Any):
    muon = optax.contrib.muon(0.05, weight_decay=0.1)
    _, state, _ = trained(group(4).hierarchical(2), muon, 3, shard="state", schedule=schedule)
    close(fddp.whole(state).params, plain(muon, 3)[0], rtol=0, atol=1e-10)


def test_each_replica_holds_a_part_of_its_nodes_size(group: Groups):
    for local, count in ((1, 1), (2, 2), (4, 4)):
        step, state, _ = trained(group(4).hierarchical(local), clipped, 0, shard="state")
        shards = [x for x in jax.tree.leaves(state, is_leaf=is_shard) if is_shard(x)]
        elements = {x.shape: x.parts.addressable_shards[0].data.size for x in shards}
        assert elements[3, 7] == -(-21 // count) and elements[3, 7, 37] == 3 * -(-259 // count)
        # Every node has all of it.
        first, second = (np.asarray(shards[0].parts).reshape(4 // local, -1)[k] for k in (0, -1))
        np.testing.assert_array_equal(first, second)
        assert step.group.parts == local


@pytest.mark.parametrize("schedule", ["fused", "staged"])
@pytest.mark.parametrize("shard", ["optimizer", "state"])
def test_parts_cross_the_network_once_and_gathers_do_not(group: Groups, schedule: Any, shard: Any):
    """Each of 8 replicas in nodes of 4 sends 3/4 of a bucket to its node, a part to the other node,
    and gathers 3/4."""
    part_sizes = [-(-21 // 4), -(-7 // 4), 3 * -(-259 // 4), 1]
    _, _, info = trained(
        group(8).hierarchical(4), optax.sgd(0.1), 1, shard=shard, schedule=schedule
    )
    # Scattered among four, summed between two (2 · 1/2 of a part), gathered from four; four bytes a
    # number.
    assert sorted(info.sent.tolist()[:4]) == sorted(
        4 * (3 * part + part + 3 * part) for part in part_sizes
    )


def test_the_network_carries_the_parts_alone(group: Groups):
    """Half of each bucket travels between nodes of two in the compiled program, and no gather
    does."""
    step, state, _ = trained(group(4).hierarchical(2), optax.sgd(0.1), 0, shard="state")
    compiled = step.lower(state, ROWS).compile().as_text() or ""
    between = [line for line in compiled.splitlines() if "{{0,2},{1,3}}" in line]
    inside = [line for line in compiled.splitlines() if "{{0,1},{2,3}}" in line]
    assert between and all(" all-reduce(" in line for line in between)
    assert sum(" all-gather(" in line for line in inside) > 4 and not any(
        " all-reduce(" in line for line in inside
    )
    everyone = [line for line in compiled.splitlines() if "{{0,1,2,3}}" in line]
    assert not everyone


@pytest.mark.quick("state")
@each_way
def test_sums_that_are_pending_join_the_next_step(group: Groups, x64: None, way: Any):
    step = fddp.train_step(loss_fn, clipped, group=group(4).hierarchical(2), bucket_cap_mb=0, **way)
    state = step.init(PARAMS)
    state, _ = step.no_sync(state, ROWS[:24])
    state, _ = step(state, ROWS[24:])
    close(fddp.whole(state).params, plain(clipped, 1)[0], rtol=0, atol=1e-10)


def test_a_state_is_put_together_inside_of_jit(group: Groups):
    _, state, _ = trained(group(4).hierarchical(2), clipped, 1, shard="state")
    close(jax.jit(fddp.whole)(state.params), fddp.whole(state.params), rtol=0, atol=0)
    close(fddp.whole(state.params, group=group(4)), fddp.whole(state.params), rtol=0, atol=0)


def test_nodes_of_one_replica_share_nothing_and_say_so(group: Groups, capfd: Any):
    fddp.train_step(loss_fn, clipped, group=group(4).hierarchical(1), shard="state").init(PARAMS)
    assert (
        "each node of the group has one replica, which holds all of the state"
        in capfd.readouterr().err
    )


def test_the_state_of_other_nodes_is_refused(group: Groups):
    _, state, _ = trained(group(4).hierarchical(2), clipped, 1, shard="state")
    flat_step, _, _ = trained(group(4), clipped, 0, shard="state")
    with pytest.raises(ValueError, match="not in shards of 4 replicas"):
        flat_step(state, ROWS)


def test_a_checkpoint_is_written_once_and_restored_in_other_nodes(group: Groups, tmp_path: Path):
    nodes = group(4).hierarchical(2)
    groups = (group(3), group(8).hierarchical(4), group(4).hierarchical(4))
    expected = {
        shard: does(nodes, tmp_path / "nodes", f"save:{shard}") for shard in ("optimizer", "state")
    }
    for replicas in groups:
        for shard, digest in expected.items():
            for target in ("None", "optimizer", "state"):
                assert does(replicas, tmp_path / "nodes", f"restore:{shard}:{target}") == digest
    plain = does(group(3), tmp_path / "plain", "save:state")
    assert does(nodes, tmp_path / "plain", "restore:state:state") == plain
    # Each part is in it once: the bytes are those of a state whose parts all replicas hold.
    assert does(group(2), tmp_path / "two", "save:state")
    nbytes = [
        sum(x.stat().st_size for x in (tmp_path / name).rglob("*") if x.is_file())
        for name in ("nodes/state", "two")
    ]
    assert nbytes[0] < 1.2 * nbytes[1]
