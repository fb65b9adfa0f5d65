"""Any loss that JAX can differentiate trains as on one replica, however its program is made.

Rematerialisation, tied weights, several forwards, hand-written gradients, frozen parts, loops and
branches; each for three steps, one bucket per leaf, against plain JAX and optax on the joined batch
in float64.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trees
from every_schedule import SCHEDULES
from jax.ad_checkpoint import checkpoint_name
from truth import by_plain_jax

import fddp

close = partial(trees.close, rtol=1e-12, atol=1e-13)

pytestmark = pytest.mark.steps

REPLICAS = 4
STEPS = 3
RNG = np.random.default_rng(5)
LAYERS = {
    "first": {"w": RNG.normal(size=(3, 4)), "b": RNG.normal(size=4)},
    "second": {"w": RNG.normal(size=(4, 4)), "b": RNG.normal(size=4)},
    "third": {"w": RNG.normal(size=(4, 2)), "b": RNG.normal(size=2)},
}
STACK = {
    "w": RNG.normal(size=(3, 3, 3)) / 2,
    "b": RNG.normal(size=(3, 3)),
    "scale": RNG.normal(size=3),
}
X = RNG.normal(size=(STEPS, 8, 3))
TOKENS = RNG.integers(0, 6, size=(STEPS, 8, 5))
Apply = Callable[[Any, Any], jax.Array]


class Program(NamedTuple):
    """A loss, its parameters and its data."""

    loss: Callable[[Any, Any], jax.Array]
    params: Any = LAYERS
    batches: Any = X
    optimizer: optax.GradientTransformation = optax.adam(1e-2)


def dense(layer: Any, x: Any) -> jax.Array:
    return jnp.tanh(x @ layer["w"] + layer["b"])


def net(params: Any, x: Any, apply: Apply = dense) -> jax.Array:
    for layer in ("first", "second", "third"):
        x = apply(params[layer], x)
    return x


def mean_square(params: Any, x: Any, model: Apply = net) -> jax.Array:
    return jnp.mean((model(params, x) - x[:, :2]) ** 2)


PROGRAMS: dict[str, Program] = {}


def program(*fields: Any, **more: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(loss: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[loss.__name__.replace("_", " ")] = Program(loss, *fields, **more)
        return loss

    return register


### Rematerialisation


@program()
def rematerialised_layers(params: Any, x: Any) -> jax.Array:
    return mean_square(params, x, partial(net, apply=jax.checkpoint(dense)))


@program()
def rematerialised_twice_nested(params: Any, x: Any) -> jax.Array:
    return mean_square(params, x, jax.checkpoint(partial(net, apply=jax.checkpoint(dense))))


@program()
def rematerialised_all_but_products(params: Any, x: Any) -> jax.Array:
    return mean_square(params, x, jax.checkpoint(net, policy=jax.checkpoint_policies.dots_saveable))


@program()
def rematerialised_all_but_named_values(params: Any, x: Any) -> jax.Array:
    policy = jax.checkpoint_policies.save_only_these_names("kept")
    named = partial(net, apply=lambda layer, x: checkpoint_name(dense(layer, x), "kept"))
    return mean_square(params, x, jax.checkpoint(named, policy=policy))


### Loops and branches


@program(STACK)
def rematerialised_inside_a_scan_over_layers(params: Any, x: Any) -> jax.Array:
    layers = {name: params[name] for name in ("w", "b")}
    x, _ = jax.lax.scan(jax.checkpoint(lambda x, layer: (dense(layer, x), None)), x, layers)
    return jnp.mean((x * params["scale"]) ** 2)


@program()
def a_branch_on_the_data_and_a_loop(params: Any, x: Any) -> jax.Array:
    first = dense(params["first"], x)
    second = jax.vmap(
        lambda row: jax.lax.cond(row[0] > 0, partial(dense, params["second"]), jnp.sin, row)
    )(first)
    second = jax.lax.fori_loop(0, 2, lambda _, h: dense(params["second"], h), second)
    return jnp.mean((dense(params["third"], second) - x[:, :2]) ** 2)


@program()
def one_compiled_layer_called_three_times(params: Any, x: Any) -> jax.Array:
    compiled = jax.jit(dense)
    h = compiled(params["first"], x)
    for _ in range(2):
        h = compiled(params["second"], h)
    return jnp.mean((compiled(params["third"], h) - x[:, :2]) ** 2)


### Tied weights


@program(
    {
        "embedding": RNG.normal(size=(6, 4)),
        "layer": {"w": RNG.normal(size=(4, 4)), "b": RNG.normal(size=4)},
    },
    TOKENS,
)
def an_embedding_tied_with_the_output(params: Any, tokens: Any) -> jax.Array:
    hidden = dense(params["layer"], params["embedding"][tokens[:, :-1]])
    logits = hidden @ params["embedding"].T
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))


@program()
def one_layer_used_first_and_last(params: Any, x: Any) -> jax.Array:
    h = net(params, x)
    decoded = jnp.tanh(h @ params["third"]["w"].T) @ params["first"]["w"].T
    return jnp.mean((decoded - x) ** 2)


### Several forwards and one backward


@program()
def two_views_of_a_batch(params: Any, x: Any) -> jax.Array:
    first_view = net(params, x)
    two = net(params, 2 * x[:, ::-1])
    return jnp.mean((first_view - two) ** 2) - 0.1 * jnp.mean(first_view * two)


@program()
def a_gradient_inside_the_loss(params: Any, x: Any) -> jax.Array:
    slope = jax.vmap(jax.grad(lambda row: net(params, row)[0]))(x)
    return mean_square(params, x) + jnp.mean((jnp.sum(slope**2, axis=1) - 1) ** 2)


### Gradients written by hand


@jax.custom_vjp
def straight_through(x: jax.Array) -> jax.Array:
    return jnp.round(x)


straight_through.defvjp(lambda x: (jnp.round(x), jnp.abs(x) < 2), lambda inside, g: (g * inside,))


@jax.custom_vjp
def scaled(layer: Any, x: Any) -> jax.Array:
    return dense(layer, x)


def scaled_forward(layer: Any, x: Any) -> Any:
    y = dense(layer, x)
    return y, (layer, x, y)


def scaled_backward(saved: Any, g: Any) -> Any:
    layer, x, y = saved
    g = 3 * g * (1 - y**2)
    return {"w": x.T @ g, "b": jnp.sum(g, axis=0)}, g @ layer["w"].T


scaled.defvjp(scaled_forward, scaled_backward)


@jax.custom_jvp
def halved(x: jax.Array) -> jax.Array:
    return jax.nn.softplus(x)


halved.defjvp(
    lambda primals, tangents: (halved(*primals), 0.5 * tangents[0] * jax.nn.sigmoid(primals[0]))
)


@program()
def custom_vjp(params: Any, x: Any) -> jax.Array:
    return mean_square(params, straight_through(2 * x), partial(net, apply=scaled))


@program()
def custom_vjp_rematerialised(params: Any, x: Any) -> jax.Array:
    return mean_square(
        params,
        x,
        jax.checkpoint(partial(net, apply=lambda p, x: straight_through(scaled(p, x) * 2))),
    )


@program()
def custom_jvp(params: Any, x: Any) -> jax.Array:
    return mean_square(
        params, x, partial(net, apply=lambda layer, x: halved(x @ layer["w"] + layer["b"]))
    )


### Frozen parts

WITH_INTEGERS = LAYERS | {
    "count": np.int32(3),
    "mask": np.array([True, False, True]),
    "table": np.array([2, 0, 1]),
}


@program(optimizer=optax.adamw(1e-2, weight_decay=0.1))
def a_part_without_gradient(params: Any, x: Any) -> jax.Array:
    return mean_square(params | {"second": jax.lax.stop_gradient(params["second"])}, x)


@program()
def an_unused_part(params: Any, x: Any) -> jax.Array:
    return jnp.mean((dense(params["third"], dense(params["first"], x)) - x[:, :2]) ** 2)


@program(WITH_INTEGERS)
def integers_and_flags_that_take_part(params: Any, x: Any) -> jax.Array:
    return mean_square(params, (x * params["mask"])[:, params["table"]] * params["count"])


def halves(params: Any) -> Any:
    """Names of the optimizers: biases and the whole first layer are frozen."""
    frozen = lambda path: path[-1].key == "b" or path[0].key == "first"  # noqa: E731
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "frozen" if frozen(path) else "trained", params
    )


@program(
    optimizer=optax.multi_transform(
        {"trained": optax.adam(1e-2), "frozen": optax.set_to_zero()}, halves
    )
)
def partitions_that_optax_leaves_alone(params: Any, x: Any) -> jax.Array:
    return mean_square(params, x)


### Every program under every schedule


def parted(tree: Any) -> tuple[Any, Any]:
    """Floats, and all other leaves; each tree has None in place of the other's leaves."""
    floats = jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else None, tree)
    return floats, jax.tree.map(
        lambda x: None if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def together(floats: Any, integers: Any) -> Any:
    return jax.tree.map(
        lambda a, b: b if a is None else a, floats, integers, is_leaf=lambda x: x is None
    )


@cache
def by_one_replica(name: str) -> tuple[Any, list[Any]]:
    """Parameters after the last step, and the loss of each, of one replica on the joined
    batches."""
    loss, params, batches, optimizer = PROGRAMS[name]
    floats, integers = parted(params)
    of_floats = lambda floats, batch: loss(together(floats, integers), batch)  # noqa: E731
    result = by_plain_jax(of_floats, optimizer, floats, batches)
    return jax.device_get((together(result.params, integers), result.losses))


@pytest.mark.quick(
    "a branch on the data and a loop-overlap",
    "a gradient inside the loss-overlap",
    "two views of a batch-overlap",
    "integers and flags that take part-overlap",
    "an embedding tied with the output-overlap",
    "rematerialised inside a scan over layers-overlap",
    "custom vjp rematerialised-overlap",
    "one compiled layer called three times-overlap",
    "an unused part-overlap",
    "partitions that optax leaves alone-overlap",
)
@SCHEDULES
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_trains_as_on_one_replica(group, x64, schedule, name):
    loss, params, batches, optimizer = PROGRAMS[name]
    step = fddp.train_step(
        loss, optimizer, group=group(REPLICAS), schedule=schedule, bucket_cap_mb=0
    )
    state = step.init(params)
    losses = []
    for batch in batches:
        state, info = step(state, batch)
        losses.append(info.loss)
    close((state.params, losses), by_one_replica(name))
    leaves = jax.tree.leaves(parted(params)[0])
    assert sorted(len(bucket.leaves) for bucket in step.plan.buckets) == [1] * len(leaves)


def test_the_references_move_what_is_not_frozen(x64):
    for name, (_, params, _, _) in PROGRAMS.items():
        moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), by_one_replica(name)[0], params)
        still = [jax.tree_util.keystr(path, simple=True, separator="/") for path, x in
                 jax.tree_util.tree_leaves_with_path(moved) if not x]  # fmt: skip
        expected = {
            "an unused part": ["second/b", "second/w"],
            "partitions that optax leaves alone": ["first/b", "first/w", "second/b", "third/b"],
            "integers and flags that take part": ["count", "mask", "table"],
            "one layer used first and last": [],
        }
        assert still == expected.get(name, []), name


@SCHEDULES
def test_one_array_at_two_places_of_a_tree_is_two_parameters(group, x64, schedule):
    shared = jnp.asarray(RNG.normal(size=3))
    params = {"in": shared, "out": shared}

    def loss(params: Any, x: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(x * params["in"]) * params["out"] - 1) ** 2)

    step = fddp.train_step(loss, optax.sgd(0.1), group=group(REPLICAS), schedule=schedule)
    state = step.init(params)
    for x in X:
        state, _ = step(state, x)
    expected = by_plain_jax(loss, optax.sgd(0.1), params, X).params
    close(state.params, expected)
    assert not np.allclose(expected["in"], expected["out"])


### Two players

GAN = {
    "generator": {"w": RNG.normal(size=(3, 3)), "b": RNG.normal(size=3)},
    "discriminator": {
        "w": RNG.normal(size=(3, 4)),
        "b": RNG.normal(size=4),
        "head": RNG.normal(size=4),
    },
}
OTHERS = {"discriminator": "generator", "generator": "discriminator"}
OPTIMIZERS = {"discriminator": optax.adam(1e-2), "generator": optax.sgd(0.1, momentum=0.9)}


def judged(params: Any, x: Any) -> jax.Array:
    return dense(params["discriminator"], x) @ params["discriminator"]["head"]


def player_loss(player: str, params: Any, x: Any) -> jax.Array:
    generated = judged(params, dense(params["generator"], x[:, ::-1]))
    if player == "generator":
        return jnp.mean(jax.nn.softplus(-generated))
    return jnp.mean(jax.nn.softplus(generated) + jax.nn.softplus(-judged(params, x)))


@SCHEDULES
def test_two_players_freeze_and_thaw_each_other(group, x64, schedule):
    steps = {}
    states = {}
    for player, opponent in OTHERS.items():
        steps[player] = fddp.train_step(
            partial(player_loss, player),
            OPTIMIZERS[player],
            group=group(REPLICAS),
            schedule=schedule,
            bucket_cap_mb=0,
            ignore=lambda path, opponent=opponent: path.startswith(f"{opponent}/"),
        )
        states[player] = steps[player].init(GAN)
    expected = GAN
    opt_states = {player: OPTIMIZERS[player].init(GAN[player]) for player in OTHERS}
    params = states["discriminator"].params
    for x in X:
        for player, opponent in OTHERS.items():
            states[player], info = steps[player](states[player]._replace(params=params), x)
            params = states[player].params
            loss, grads = jax.value_and_grad(
                lambda player_params, player=player, x=x, all_params=expected: player_loss(
                    player, all_params | {player: player_params}, x
                )
            )(expected[player])
            updates, opt_states[player] = OPTIMIZERS[player].update(
                grads, opt_states[player], expected[player]
            )
            frozen = expected[opponent]
            expected = {player: optax.apply_updates(expected[player], updates), opponent: frozen}
            close((params, info.loss), (expected, loss))
    assert [bucket.names[0].split("/")[0] for bucket in steps["generator"].plan.buckets] == [
        "generator"
    ] * 2


def test_a_loss_is_traced_once_and_again_under_other_settings_of_jax(group):
    calls = list[Any]()

    def loss(params: Any, x: Any) -> jax.Array:
        calls.append(jax.config.values["jax_default_matmul_precision"])
        return jnp.mean((x @ params) ** 2)

    step = fddp.train_step(loss, optax.sgd(0.1), group=group(2))
    state = step.init(np.ones((3, 2), np.float32))
    for precision in (None, None, "float32"):
        with jax.default_matmul_precision(precision):
            state, _ = step(state, np.float32(X[0]))
    assert calls == [None, "float32"]
