"""An update leaves unused parameters alone, for any structure of the optimizer's state."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fddp
from fddp.optim.updates import update

PARTS: dict[Any, Any] = {"x": optax.adamw(0.1, weight_decay=0.5), "y": optax.sgd(0.1, momentum=0.9)}
NESTED = {"enc": {"a": np.ones(3), "b": np.full(3, 2.0)}, "head": np.full(2, 3.0)}


def by_path(params: Any) -> Any:
    return {name: "y" if name == "head" else "x" for name in params}


CASES = {
    "adamw": (optax.adamw(0.1), NESTED),
    "labels": (optax.multi_transform(PARTS, {"enc": {"a": "x", "b": "y"}, "head": "y"}), NESTED),
    "labels of subtrees": (optax.multi_transform(PARTS, {"enc": "x", "head": "y"}), NESTED),
    "labels by a function": (optax.multi_transform(PARTS, by_path), NESTED),
    "a mask of subtrees": (
        optax.chain(
            optax.masked(optax.trace(0.9), {"enc": True, "head": False}),
            optax.add_decayed_weights(0.5),
            optax.scale(-0.1),
        ),
        NESTED,
    ),
    "ignored leaves": (
        optax.multi_transform(PARTS, {"enc": "x", "head": "y"}),
        NESTED | {"head": None},
    ),
    "hyperparameters": (optax.inject_hyperparams(optax.adam)(learning_rate=0.1), NESTED),
    "several steps": (optax.MultiSteps(optax.adam(0.1), 1).gradient_transformation(), NESTED),
    "factors": (
        optax.adafactor(0.1, min_dim_size_to_factor=2),
        {"enc": {"a": np.ones((3, 4)), "b": np.ones((3, 4))}},
    ),
    "a list": (optax.adamw(0.1), [np.ones(3), np.ones(3)]),
    "one array": (optax.adamw(0.1), np.ones(3)),
    "one array with a label": (optax.multi_transform(PARTS, "x"), np.ones(3)),
}


def numbers(tree: Any, path: str) -> list[np.ndarray]:
    """The leaf's arrays in a tree, or in a state of such trees: floats below its path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    floats = [
        (jax.tree_util.keystr(name), np.asarray(x))
        for name, x in leaves
        if np.asarray(x).dtype.kind == "f"
    ]
    return [x for name, x in floats if name.endswith(path) and "hyperparams" not in name]


@pytest.mark.steps
@pytest.mark.parametrize("name", CASES)
def test_what_was_not_used_keeps_its_value_and_its_moments(name):
    optimizer, params = CASES[name]
    leaves, treedef = jax.tree.flatten(jax.tree.map(np.float32, params))
    params = treedef.unflatten(leaves)
    state = optimizer.init(params)
    ones = jax.tree.map(np.ones_like, params)
    nothing = jax.tree.map(np.zeros_like, params)
    params, state = update(optimizer, ones, state, params, jax.tree.map(lambda _: 2, params))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    for chosen, path in enumerate(paths):
        used = treedef.unflatten([2 * (k == chosen) for k in range(len(leaves))])
        new, new_state = update(optimizer, nothing, state, params, used)
        for leaf_path in paths:
            same = [
                np.array_equal(a, b)
                for old_tree, new_tree in ((params, new), (state, new_state))
                for a, b in zip(
                    numbers(old_tree, leaf_path), numbers(new_tree, leaf_path), strict=True
                )
            ]
            assert same and (all(same) if leaf_path != path else not all(same)), (
                path,
                leaf_path,
                same,
            )
    none_used = jax.tree.map(lambda _: 0, params)
    new, _ = update(optimizer, nothing, state, params, none_used)
    jax.tree.map(np.testing.assert_array_equal, new, params)


### Counts


DECAY = optax.linear_schedule(0.1, 0.0, 6)
COUNTED: dict[str, Any] = {
    "adam": lambda: optax.adam(0.05),
    "clipped adamw": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.05)),
    "a schedule": lambda: optax.sgd(DECAY),
    "adam with a schedule": lambda: optax.adam(DECAY),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.sgd)(DECAY),
    "noise": lambda: optax.chain(optax.add_noise(0.01, 0.5, key=jax.random.key(3)), optax.sgd(0.1)),
    "a loss scale": lambda: fddp.dynamic_scale(optax.adam(0.05), growth_interval=2),
}
RNG = np.random.default_rng(0)
NETS = {
    name: {
        "u": RNG.normal(size=(3, 4)).astype(np.float32),
        "v": RNG.normal(size=4).astype(np.float32),
    }
    for name in ("d", "g")
}
TURNS = "dddgdddg"
BATCHES = RNG.normal(size=(len(TURNS), 8, 3)).astype(np.float32)


def net(params: Any, x: Any) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["u"]) @ params["v"] - 1) ** 2)


def in_turns(group: fddp.Group, optimizer: Any, **options: Any) -> fddp.TrainState:
    """Trains one of two nets in each step, chosen by a flag in the batch."""

    def loss(params: Any, batch: Any) -> jax.Array:
        of_d = partial(net, params["d"], batch["x"])
        of_g = partial(net, params["g"], batch["x"])
        return jax.lax.cond(batch["is_d"][0], of_d, of_g)

    step = fddp.train_step(loss, optimizer, group=group, find_unused_parameters=True, **options)
    state = step.init(NETS)
    for turn, x in zip(TURNS, BATCHES):
        state, _ = step(state, {"x": x, "is_d": np.full(len(x), turn == "d")})
    return state


@pytest.mark.quick(
    "clipped adamw-{'shard': 'optimizer'}",
    "a loss scale-{'shard': 'optimizer'}",
    "noise-{}",
    "adam with a schedule-{}",
)
@pytest.mark.steps
@pytest.mark.parametrize("options", [{}, {"shard": "optimizer"}], ids=str)
@pytest.mark.parametrize("name", COUNTED)
def test_parts_that_alternate_train_as_with_separate_optimizers(group, name, options):
    """Compared with two optimizers in plain JAX, each updated only in its turns."""
    optimizers: dict[Any, Any] = {part: COUNTED[name]() for part in NETS}
    params = dict[str, Any](NETS)
    states = {part: optimizers[part].init(NETS[part]) for part in NETS}
    for part, x in zip(TURNS, BATCHES):
        grads = jax.grad(net)(params[part], x)
        updates, states[part] = optimizers[part].update(grads, states[part], params[part])
        params[part] = optax.apply_updates(params[part], updates)
    together = optax.partition(optimizers, {"d": "d", "g": "g"})
    trained = fddp.whole(in_turns(group(4), together, **options).params)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6), trained, params)


@pytest.mark.steps
def test_one_count_for_all_parts_counts_every_step_that_uses_a_part(group):
    """Adam in float64 by hand: the steps of both parts correct its bias, those of one its
    moments."""
    state = in_turns(group(4), optax.adam(0.05))
    assert int(state.opt_state[0].count) == len(TURNS)
    params = jax.tree.map(np.float64, NETS)
    moments = jax.tree.map(lambda x: (np.zeros_like(x), np.zeros_like(x)), params)
    for count, (part, x) in enumerate(zip(TURNS, BATCHES), start=1):
        with jax.enable_x64(True):
            wide = jax.tree.map(jnp.asarray, params[part])
            grads = jax.tree.map(np.asarray, jax.grad(net)(wide, np.float64(x)))
        for name, g in grads.items():
            mu, nu = moments[part][name]
            mu = 0.9 * mu + 0.1 * g
            nu = 0.999 * nu + 0.001 * g**2
            moments[part][name] = mu, nu
            step = mu / (1 - 0.9**count) / (np.sqrt(nu / (1 - 0.999**count)) + 1e-8)
            params[part][name] = params[part][name] - 0.05 * step
    close = partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)
    jax.tree.map(close, state.params, params)


def test_a_step_in_which_no_leaf_is_used_changes_no_count():
    optimizer = optax.adam(DECAY)
    params = {"a": np.float32(1), "b": np.float32(2)}
    state = optimizer.init(params)
    nothing = jax.tree.map(np.zeros_like, params)
    _, after = update(optimizer, nothing, state, params, {"a": 0, "b": 0})
    assert jax.tree.map(np.asarray, after) == jax.tree.map(np.asarray, state)
    _, after = update(optimizer, nothing, state, params, {"a": 0, "b": 1})
    assert [int(x) for x in (after[0].count, after[1].count)] == [1, 1]
