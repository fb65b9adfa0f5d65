"""Flax modules become losses and come back as modules: `fddp.from_linen`, `fddp.from_nnx`."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from trees import close, same_bits
from truth import by_plain_jax

import fddp
from models.tensor_parallel import two_axes

pytestmark = pytest.mark.steps

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)


class Net(nnx.Module):
    """A layer, a norm with running averages, and noise."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.noise = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.noise(self.norm(self.layer(x)))


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        return linen.BatchNorm(not train, name="norm")(linen.Dense(4, name="layer")(x))


def with_nnx(group: fddp.Group, **options: Any) -> tuple[Any, fddp.TrainStep, fddp.TrainState]:
    net = fddp.from_nnx(Net(nnx.Rngs(0)), lambda model, x: jnp.mean((model(x) - 1) ** 2))
    step = fddp.train_step(net.loss_fn, optax.adam(0.1), group=group, **options)
    return net, step, step.init(net.params, model_state=net.model_state, rng=jax.random.key(1))


def with_linen(group: fddp.Group, **options: Any) -> tuple[Any, fddp.TrainStep, fddp.TrainState]:
    net = fddp.from_linen(Linen(), lambda model, x: jnp.mean((model(x, train=True) - 1) ** 2))
    params, model_state = net.init(jax.random.key(0), X)
    step = fddp.train_step(net.loss_fn, optax.adam(0.1), group=group, **options)
    return net, step, step.init(params, model_state=model_state)


def by_hand(params: Any, buffers: Any) -> np.ndarray:
    """The outputs of either net for X, outside training."""
    x = X @ params["layer"]["kernel"] + params["layer"]["bias"]
    x = (x - buffers["mean"]) / np.sqrt(buffers["var"] + 1e-5)
    return x * params["norm"]["scale"] + params["norm"]["bias"]


def on_host(tree: Any) -> Any:
    return jax.tree.map(np.array, tree)


@pytest.mark.parametrize("size", [1, 4])
def test_a_state_becomes_an_nnx_module_that_later_steps_leave_alone(group, size):
    net, step, state = with_nnx(group(size))
    state, _ = step(state, X)
    model = net.module(state)
    want = by_hand(on_host(state.params), on_host(state.model_state)["norm"])
    state, _ = step(state, X)
    assert isinstance(model, Net) and {
        len(x.devices()) for x in jax.tree.leaves(nnx.state(model))
    } == {1}
    model.eval()
    np.testing.assert_allclose(model(X), want, rtol=1e-4, atol=1e-5)
    want = by_hand(on_host(state.params), on_host(state.model_state)["norm"])
    later = net.module(state)
    later.eval()
    np.testing.assert_allclose(later(X), want, rtol=1e-4, atol=1e-5)


def test_modules_of_one_state_are_independent_and_can_train_on(group):
    net, _, state = with_nnx(group(2))
    a = net.module(state)
    b = net.module(state)
    before = on_host(nnx.state(b, nnx.Not(nnx.RngKey)))
    # in training: draws numbers, moves averages
    first = a(X)
    second = a(X)
    assert not np.array_equal(first, second)
    jax.tree.map(np.testing.assert_array_equal, on_host(nnx.state(b, nnx.Not(nnx.RngKey))), before)
    np.testing.assert_array_equal(b(X), first)
    np.testing.assert_array_equal(state.model_state["norm"]["mean"], 0)


def test_a_state_becomes_a_bound_linen_module_that_later_steps_leave_alone(group):
    net, step, state = with_linen(group(4))
    state, _ = step(state, X)
    model = net.module(state)
    want = by_hand(on_host(state.params), on_host(state.model_state)["batch_stats"]["norm"])
    step(state, X)
    np.testing.assert_allclose(model(X), want, rtol=1e-4, atol=1e-5)
    assert jax.tree.structure(model.variables) == jax.tree.structure(
        {"params": state.params, **state.model_state}
    )


def test_modules_without_buffers_come_back_too(group):
    net = fddp.from_linen(linen.Dense(1), lambda model, x: jnp.mean(model(x) ** 2))
    params, model_state = net.init(jax.random.key(0), X)
    state = fddp.train_step(net.loss_fn, optax.sgd(0.1), group=group(2)).init(params)
    np.testing.assert_allclose(
        net.module(state)(X), X @ params["kernel"] + params["bias"], rtol=1e-5
    )
    assert model_state is None
    module = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    net = fddp.from_nnx(module, lambda model, x: jnp.mean(model(x) ** 2))
    state = fddp.train_step(net.loss_fn, optax.sgd(0.1), group=group(2)).init(net.params)
    np.testing.assert_allclose(net.module(state)(X), module(jnp.asarray(X)), rtol=1e-5)


@pytest.mark.parametrize("make", [with_nnx, with_linen])
def test_what_lies_in_parts_stays_in_parts(make):
    mesh = two_axes(2, 2)
    net, _, state = make(fddp.mesh_group(mesh))
    halves = NamedSharding(mesh, PartitionSpec(None, mesh.axis_names[1]))
    kernel = jax.device_put(state.params["layer"]["kernel"], halves)
    state = state._replace(
        params=state.params | {"layer": state.params["layer"] | {"kernel": kernel}}
    )
    model = net.module(state)
    variables = (
        jax.tree.leaves(nnx.state(model)) if make is with_nnx else jax.tree.leaves(model.variables)
    )
    assert [x.sharding for x in variables if x.shape == (3, 4)] == [halves]
    if make is with_nnx:
        model.eval()
    buffers = state.model_state if make is with_nnx else state.model_state["batch_stats"]
    np.testing.assert_allclose(
        model(X), by_hand(on_host(state.params), on_host(buffers["norm"])), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("make", [with_nnx, with_linen])
def test_a_state_in_shards_becomes_a_module_as_a_whole_one_does(group, make):
    net, step, state = make(group(4), shard="state")
    state, _ = step(state, X)
    _, plain, plain_state = make(group(4))
    plain_state, _ = plain(plain_state, X)
    got = net.module(state)
    want = net.module(plain_state)
    if make is with_nnx:
        got.eval()
        want.eval()
    np.testing.assert_allclose(got(X), want(X), rtol=1e-5, atol=1e-6)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.dropout(self.linear(x))


class Scanned(nnx.Module):
    """Layers under `nnx.scan`, each with a stream of random numbers."""

    def __init__(self, layers: int, rngs: nnx.Rngs) -> None:
        self.layers = nnx.split_rngs(splits=layers)(nnx.vmap(Layer, axis_size=layers))(rngs)

    def __call__(self, x: Any) -> Any:
        return nnx.scan(lambda x, layer: (layer(x), None))(x, self.layers)[0]


def test_each_scanned_layer_draws_from_a_stream_of_its_own(group):
    net = fddp.from_nnx(Scanned(3, nnx.Rngs(0)), lambda model, x: jnp.mean(model(x) ** 2))
    drawn = nnx.merge(*nnx.split(Scanned(3, nnx.Rngs(0))))
    key = jax.random.key(7)
    streams = jax.tree.leaves(nnx.state(drawn, nnx.RngKey))
    assert [x.shape for x in streams] == [(3,)]
    # By hand: layer k drops with the k-th key that the step's key is split into.
    graph, rngs, variables = nnx.split(drawn, nnx.RngState, ...)
    is_key = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(rngs)]
    keys = jax.random.split(jax.random.fold_in(key, is_key.index(True)), 3)
    fresh = [
        keys if typed else jnp.zeros_like(x) for typed, x in zip(is_key, jax.tree.leaves(rngs))
    ]
    by_hand = nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(rngs), fresh), variables)
    want = jnp.mean(by_hand(jnp.asarray(X)) ** 2)
    np.testing.assert_allclose(
        net.loss_fn(net.params, X, model_state=net.model_state, rng=key), want, rtol=1e-6
    )
    step = fddp.train_step(net.loss_fn, optax.sgd(0.1), group=group(2))
    state, info = step(step.init(net.params, model_state=net.model_state, rng=key), X)
    assert np.isfinite(info.loss) and jax.tree.leaves(net.module(state)(X))


def test_a_used_up_state_has_no_module(group):
    net, step, state = with_nnx(group(2))
    later, _ = step(state, X)
    with pytest.raises(ValueError, match=r"this state is used up.*donate=False"):
        net.module(state)
    net.module(later)


def test_an_nnx_module_whose_buffers_change_needs_them():
    net = fddp.from_nnx(Net(nnx.Rngs(0)), lambda model, x: jnp.mean(model(x)))
    step = fddp.train_step(net.loss_fn, optax.adam(0.1))
    with pytest.raises(
        ValueError, match=r"has buffers: give step\.init\(net\.params, model_state="
    ):
        step(step.init(net.params, rng=jax.random.key(0)), X)


def test_a_module_of_a_state_in_shards_is_put_together_once(group):
    """The gathered arrays have no other owner, and are not copied."""
    net, step, state = with_nnx(group(2), shard="state")
    module = net.module(state)
    before = on_host(nnx.to_pure_dict(nnx.state(module, nnx.Param)))
    same_bits(before, on_host(fddp.whole(state.params)))
    step(state, X)
    same_bits(before, on_host(nnx.to_pure_dict(nnx.state(module, nnx.Param))))


### Sown values


class Sowing(linen.Module):
    """A layer that sows the mean of its squares into one collection, and counts its passes in
    another."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        passes = self.variable("counts", "passes", lambda: jnp.zeros(()))
        passes.value += not self.is_initializing()
        y = linen.Dense(4, name="layer")(x)
        self.sow("losses", "squares", jnp.mean(y**2))
        return y


def balanced(model: Any, x: Any) -> Any:
    y = model(x)
    return jnp.mean((y - 1) ** 2) + 0.5 * sum(jax.tree.leaves(model.variables["losses"]))


@pytest.mark.parametrize("shard", [None, "state"])
def test_a_loss_reads_what_linen_modules_sow_in_this_pass(group, shard: Any):
    net = fddp.from_linen(Sowing(), balanced, sown=("losses",))
    params, buffers = net.init(jax.random.key(0), X)
    assert jax.tree.map(float, buffers) == {"counts": {"passes": 0}}

    def loss(p: Any, x: Any) -> Any:
        y = x @ p["layer"]["kernel"] + p["layer"]["bias"]
        return jnp.mean((y - 1) ** 2) + 0.5 * jnp.mean(y**2)

    expected = by_plain_jax(loss, optax.adam(0.1), params, [X] * 3)
    step = fddp.train_step(net.loss_fn, optax.adam(0.1), group=group(2), shard=shard)
    state = step.init(params, model_state=buffers)
    for value in expected.losses:
        state, info = step(state, X)
        np.testing.assert_allclose(info.loss, value, rtol=1e-5)
    close(fddp.whole(state.params), expected.params, rtol=1e-4, atol=1e-6)
    assert jax.tree.map(float, state.model_state) == {"counts": {"passes": 3}}


def test_sown_values_that_would_be_buffers_are_refused():
    net = fddp.from_linen(Sowing(), balanced)
    params, buffers = net.init(jax.random.key(0), X)
    step = fddp.train_step(net.loss_fn, optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"\['losses'\].*sown=\('intermediates', 'losses'\)"):
        step(step.init(params, model_state=buffers), X)
    with pytest.raises(
        TypeError, match=r"sown must be a sequence of names, got 'losses': give \('losses',\)"
    ):
        fddp.from_linen(Sowing(), balanced, sown="losses")


def test_nnx_modules_that_keep_what_they_sow_are_refused():
    def loss(model: Any, x: Any, pop: bool) -> Any:
        y = model(x)
        model.squares = nnx.Intermediate(jnp.mean(y**2))
        sown = nnx.pop(model, nnx.Intermediate) if pop else {}
        return jnp.mean(y) + sum(jax.tree.leaves(sown))

    for pop in (True, False):
        net = fddp.from_nnx(Net(nnx.Rngs(0)), partial(loss, pop=pop))
        step = fddp.train_step(net.loss_fn, optax.sgd(0.1))
        state = step.init(net.params, model_state=net.model_state, rng=jax.random.key(1))
        with (
            nullcontext()
            if pop
            else pytest.raises(ValueError, match=r"nnx\.pop\(model, nnx\.Intermediate\)")
        ):
            step(state, X)


class Clipped(nnx.Module):
    """Writes its weights as it runs, inside of Flax's transformations or not."""

    def __init__(self, transform: Any, write: bool) -> None:
        self.layer = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.transform = transform
        self.write = write

    def __call__(self, x: Any) -> Any:
        def run(layer: nnx.Linear, x: Any) -> Any:
            if self.write:
                layer.kernel[...] = jnp.clip(layer.kernel[...], -1, 1)
            return layer(x)

        return self.transform(run)(self.layer, x)


@pytest.mark.parametrize(
    "transform", [lambda f: f, nnx.jit, nnx.remat], ids=["as is", "jit", "remat"]
)
def test_a_module_that_writes_its_parameters_is_refused(transform: Any):
    def trained(write: bool) -> Any:
        net = fddp.from_nnx(Clipped(transform, write), lambda model, x: jnp.mean(model(x) ** 2))
        step = fddp.train_step(net.loss_fn, optax.sgd(0.1))
        return step(step.init(net.params, model_state=net.model_state), np.ones((8, 3), np.float32))

    trained(False)
    with pytest.raises(ValueError, match=r"the loss writes into the nnx\.Param layer/kernel"):
        trained(True)


def test_layers_in_fp8_are_refused_with_the_collection_that_gradients_overwrite():
    class Scaled(linen.Module):  # as Fp8DirectDotGeneralOp
        @linen.compact
        def __call__(self, x: Any) -> Any:
            scale = self.variable("_overwrite_with_gradient", "scale", jnp.ones, ())
            return linen.Dense(4)(x) * scale.value

    module = Scaled()
    net = fddp.from_linen(module, lambda model, x: jnp.mean(model(x) ** 2))
    x = np.ones((8, 4), np.float32)
    with pytest.raises(ValueError, match="has a collection '_overwrite_with_gradient'"):
        net.init(jax.random.key(0), x)
    variables = dict(module.init(jax.random.key(0), x))
    with pytest.raises(ValueError, match="has a collection '_overwrite_with_gradient'"):
        net.loss_fn(variables.pop("params"), x, model_state=variables)
