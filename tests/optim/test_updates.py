"""An update leaves alone what was not used, whatever the optimizer's state looks like."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

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
    "ignored leaves": (optax.multi_transform(PARTS, {"enc": "x", "head": "y"}), NESTED | {"head": None}),
    "hyperparameters": (optax.inject_hyperparams(optax.adam)(learning_rate=0.1), NESTED),
    "several steps": (optax.MultiSteps(optax.adam(0.1), 1).gradient_transformation(), NESTED),
    "factors": (optax.adafactor(0.1, min_dim_size_to_factor=2), {"enc": {"a": np.ones((3, 4)), "b": np.ones((3, 4))}}),
    "a list": (optax.adamw(0.1), [np.ones(3), np.ones(3)]),
    "one array": (optax.adamw(0.1), np.ones(3)),
    "one array with a label": (optax.multi_transform(PARTS, "x"), np.ones(3)),
}


def numbers(tree: Any, path: str) -> list[np.ndarray]:
    """What a tree, or a state that has such trees in it, holds for a leaf: floats below its path."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    floats = [(jax.tree_util.keystr(name), np.asarray(x)) for name, x in found if np.asarray(x).dtype.kind == "f"]
    return [x for name, x in floats if name.endswith(path) and "hyperparams" not in name]


@pytest.mark.steps
@pytest.mark.parametrize("name", CASES)
def test_what_was_not_used_keeps_its_value_and_its_moments(name):
    optimizer, params = CASES[name]
    leaves, treedef = jax.tree.flatten(jax.tree.map(np.float32, params))
    params = treedef.unflatten(leaves)
    state = optimizer.init(params)
    ones, nothing = jax.tree.map(np.ones_like, params), jax.tree.map(np.zeros_like, params)
    params, state = update(optimizer, ones, state, params, jax.tree.map(lambda _: 2, params))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    for chosen, path in enumerate(paths):
        used = treedef.unflatten([2 * (k == chosen) for k in range(len(leaves))])
        new, new_state = update(optimizer, nothing, state, params, used)
        for other in paths:
            same = [
                np.array_equal(a, b)
                for old_tree, new_tree in ((params, new), (state, new_state))
                for a, b in zip(numbers(old_tree, other), numbers(new_tree, other), strict=True)
            ]
            assert same and (all(same) if other != path else not all(same)), (path, other, same)
    none_used = jax.tree.map(lambda _: 0, params)
    new, _ = update(optimizer, nothing, state, params, none_used)
    jax.tree.map(np.testing.assert_array_equal, new, params)
