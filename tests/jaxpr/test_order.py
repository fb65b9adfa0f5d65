"""Gradients become ready in the order of the backward pass, for any wrapping of the loss;
straightening changes no value."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from fddp import grad_order
from fddp.jaxpr.equations import straighten
from fddp.jaxpr.leaves import differentiable, join_leaves, split_leaves
from models import bert

X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
W = np.linspace(-2, 1, 9, dtype=np.float32).reshape(3, 3)


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


@jax.custom_vjp
def layer_with_vjp(w: Any, x: Any) -> Any:
    return layer(w, x)


layer_with_vjp.defvjp(
    lambda w, x: (layer(w, x), (w, x)), lambda saved, g: jax.vjp(layer, *saved)[1](g)
)


@jax.custom_jvp
def layer_with_jvp(w: Any, x: Any) -> Any:
    return layer(w, x)


layer_with_jvp.defjvp(lambda primals, tangents: jax.jvp(layer, primals, tangents))

LAYERS: dict[str, Callable[[Any, Any], Any]] = {
    "plain": layer,
    "jit": jax.jit(layer),
    "checkpoint": jax.checkpoint(layer),
    "checkpoint in jit": jax.jit(jax.checkpoint(layer)),
    "jit in checkpoint": jax.checkpoint(jax.jit(layer)),
    "custom_vjp": layer_with_vjp,
    "custom_jvp": layer_with_jvp,
    "custom_vjp in jit": jax.jit(layer_with_vjp),
}


def chain(kind: str, *names: str) -> Callable[[Any, Any], Any]:
    """A loss that applies the layers of these names one after another."""

    def loss(params: Any, x: Any) -> Any:
        for name in names:
            x = LAYERS[kind](params[name], x)
        return jnp.mean(x**2)

    return loss


def order(loss: Callable[..., Any], params: dict[str, Any], *args: Any) -> list[str]:
    names = sorted(params)  # as JAX flattens a dict
    return [names[i] for i in grad_order(loss, params, *(args or (X,)))]


### Ready order


@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_become_ready_in_the_reverse_of_the_forward_order(kind):
    loss = chain(kind, "first", "second", "third")
    assert order(loss, {"first": W, "second": W, "third": W}) == ["third", "second", "first"]


@pytest.mark.parametrize("kind", LAYERS)
def test_the_order_is_that_of_use_and_not_of_the_alphabet(kind):
    blocks = [f"Block_{k}" for k in range(12)]  # as Flax names them: 10 lies between 1 and 2
    assert order(jax.jit(chain(kind, *blocks)), dict.fromkeys(blocks, W)) == blocks[::-1]
    assert order(chain(kind, "z", "a", "m"), dict.fromkeys("amz", W)) == ["m", "a", "z"]


@pytest.mark.parametrize("kind", LAYERS)
def test_a_tied_parameter_is_ready_when_its_last_cotangent_is_added(kind):
    loss = chain(kind, "tied", "b", "c", "tied")
    assert order(loss, {"b": W, "c": W, "tied": W}) == ["c", "b", "tied"]
    # And no later: nothing before its first use waits for it.
    assert order(chain(kind, "a", "tied", "b", "tied"), {"a": W, "b": W, "tied": W}) == [
        "b",
        "tied",
        "a",
    ]


def test_shapes_are_as_good_as_arrays():
    shape = partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
    params = {"a": W, "z": W}
    assert grad_order(chain("plain", "z", "a"), shape(params), shape(X)) == (0, 1)


def test_integers_have_no_gradient_and_are_not_named():
    def loss(params: Any, x: Any) -> Any:
        return chain("plain", "a", "z")(params, x) * params["count"] * params["flag"]

    assert order(loss, {"a": W, "count": np.int32(3), "flag": np.bool_(True), "z": W}) == ["z", "a"]


def test_complex_parameters_have_gradients():
    loss = lambda params, x: jnp.abs(jnp.sum((x * params["z"]) * params["a"])) ** 2  # noqa: E731
    assert order(loss, {"a": np.complex64(1j), "z": np.complex64(2)}) == ["a", "z"]


@pytest.mark.parametrize("first", ["kernel", "a"])
def test_gradients_of_scanned_layers_are_in_the_order_of_their_loop(first):
    def loss(params: Any, x: Any) -> Any:
        layer = lambda x, p: (jnp.tanh(jnp.sin(x @ p[0]) @ p[1]), None)  # noqa: E731
        x, _ = jax.lax.scan(layer, x, (params[first], params["b"]))
        return jnp.mean((x @ params["head"]) ** 2)

    params = {first: np.stack([W] * 4), "b": np.stack([W] * 4), "head": W}
    assert order(loss, params) == ["head", "b", first]


def test_unused_parameters_have_a_place_in_the_order_too():
    names = order(chain("plain", "a", "z"), dict.fromkeys(["a", "m", "unused", "z"], W))
    assert sorted(names) == ["a", "m", "unused", "z"]
    assert [name for name in names if name in "az"] == ["z", "a"]


def test_metrics_beside_the_loss_do_not_change_the_order():
    loss = chain("plain", "a", "z", "m")
    with_aux = lambda params, x: (loss(params, x), {"norm": jnp.sum(params["z"])})  # noqa: E731
    params = dict.fromkeys("amz", W)
    assert order(with_aux, params) == order(loss, params) == ["m", "z", "a"]


@pytest.mark.parametrize(
    "change", [lambda p: p.astype(jnp.bfloat16), lambda p: 2 * p, lambda p: p.T.T]
)
def test_what_is_done_to_all_parameters_before_the_first_layer_delays_no_gradient(change):
    """The backward pass undoes it last, for one parameter after the other; each could be done at
    once."""
    loss = chain("plain", "c", "a", "d", "b")
    params = dict.fromkeys("abcd", W)
    assert grad_order(lambda p, x: loss(jax.tree.map(change, p), x), params, X) == grad_order(
        loss, params, X
    )


def test_the_order_of_a_loss_with_a_collective_is_refused():
    loss = lambda w, x: jnp.mean(w * x) - jax.lax.pmean(jnp.mean(w), "replica")  # noqa: E731
    with pytest.raises(ValueError, match=r"grad_order: .*unbound axis name: replica"):
        grad_order(loss, jnp.ones(2), jnp.ones(2))


def test_further_arguments_are_passed_on():
    loss = lambda params, x, scale: chain("plain", "z", "a")(params, x) * scale  # noqa: E731
    assert order(loss, {"a": W, "z": W}, X, np.float32(2)) == ["a", "z"]


### Straight programs


def equations(jaxpr: Any) -> list[str]:
    return [eqn.primitive.name for eqn in jaxpr.eqns]


def branching(params: Any, x: Any) -> Any:
    """Nested jits, constants inside them, random numbers, a branch and a loop."""
    noise = jax.random.normal(jax.random.key(0), x.shape, x.dtype)
    scaled = jax.jit(lambda x: jax.jit(lambda x: x * np.arange(3.0).astype(x.dtype))(x) + noise)
    x = jax.lax.cond(
        jnp.sum(x) > 0, jax.jit(lambda x: layer(params["a"], x)), lambda x: x, scaled(x)
    )
    x = jax.lax.fori_loop(0, 3, lambda _, x: jax.jit(layer)(params["b"], x), x)
    return jnp.mean(jax.jit(layer)(params["c"], x) ** 2)


@pytest.mark.steps
@pytest.mark.parametrize("name", [*LAYERS, "branching"])
def test_straightening_leaves_no_jit_and_every_value_as_it_was(name, x64):
    loss = branching if name == "branching" else jax.jit(chain(name, "a", "b", "c", "a"))
    params = {key: jnp.asarray(W, jnp.float64) for key in "abc"}
    x = jnp.asarray(X, jnp.float64)
    closed = jax.make_jaxpr(jax.value_and_grad(loss))(params, x)
    straight = straighten(closed)
    assert not {"jit", "pjit", "closed_call", "core_call"} & set(equations(straight.jaxpr))
    assert straight.in_avals == closed.in_avals and straight.out_avals == closed.out_avals
    args = [*jax.tree.leaves(params), x]
    got, expected = (jax.jit(jaxpr_as_fun(program))(*args) for program in (straight, closed))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-13), got, expected)


def test_loops_and_branches_stay_single_equations():
    closed = jax.make_jaxpr(branching)(dict.fromkeys("abc", W), X)
    assert equations(straighten(closed).jaxpr).count("cond") == 1
    assert equations(straighten(closed).jaxpr).count("scan") == 1


def test_a_straight_program_is_left_alone():
    model = bert.PRESETS["tiny"]
    batch = bert.batch(model, 2)
    params, _ = jax.eval_shape(partial(bert.init, model), jax.random.key(0), batch)
    once = straighten(jax.make_jaxpr(bert.loss_fn(model))(params, batch))
    assert equations(straighten(once).jaxpr) == equations(once.jaxpr)


### Leaves


def test_merge_inverts_split():
    leaves = [np.float32(1), np.int32(2), np.complex64(3), np.bool_(True), jnp.bfloat16(4), 5.0, 6]
    chosen = differentiable(leaves)
    assert chosen == (0, 2, 4, 5)
    assert join_leaves(chosen, *split_leaves(chosen, leaves)) == leaves
