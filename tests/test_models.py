"""The models are those of their papers, in plain Flax: they do not know the library."""

import ast
import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import bert, gpt, mlp, resnet, scanned

pytestmark = pytest.mark.steps

ROWS = 4
TINY = {
    "mlp": (mlp, mlp.PRESETS["tiny"]),
    "resnet": (resnet, resnet.PRESETS["tiny"]),
    "resnet-gn": (resnet, resnet.PRESETS["tiny-gn"]),
    "bert": (bert, bert.PRESETS["tiny"]),
    "gpt": (gpt, gpt.PRESETS["tiny"]),
}
tiny = pytest.mark.parametrize("name", TINY)


@cache
def build(name: str) -> tuple[Any, Any, Any]:
    """Returns (params, model_state, batch) of a tiny model."""
    module, model = TINY[name]
    batch = module.batch(model, ROWS)
    return *module.init(model, jax.random.key(0), batch), batch


def shapes(module: Any, model: Any, batch: Any) -> tuple[Any, Any, Any]:
    """Returns the result of `build` without computing a number: enough to trace."""
    return *jax.eval_shape(partial(module.init, model), jax.random.key(0), batch), batch


def value_and_grad(module: Any, model: Any) -> Any:
    """Returns `(params, model_state, batch) -> ((loss, (model_state, aux)), gradients)` for every
    model."""
    loss = module.loss_fn(model)

    def joined(params: Any, model_state: Any, batch: Any):
        if model_state is not None:
            return loss(params, batch, model_state=model_state)
        value, aux = loss(params, batch)
        return value, (None, aux)

    return jax.jit(jax.value_and_grad(joined, has_aux=True))


@cache
def compiled(name: str) -> Any:
    return value_and_grad(*TINY[name])


@cache
def evaluate(name: str) -> Any:
    """Returns ((loss, (model_state, aux)), gradients) of a tiny model at `build(name)`."""
    return compiled(name)(*build(name))


### Sizes


@pytest.mark.quick(
    "models.gpt-bytes-1623744-38", "models.resnet-18-11689512-62", "models.mlp-1024-8388608-8"
)
@pytest.mark.parametrize(
    ("module", "preset", "parameters", "leaves"),
    [
        (mlp, "1024", 8 * 2**20, 8),
        (resnet, "18", 11_689_512, 62),
        (resnet, "18-gn", 11_689_512, 62),
        (resnet, "50", 25_557_032, 161),
        (bert, "base", 109_503_546, 189),
        (gpt, "360m", 361_821_120, 290),
        (gpt, "bytes", 1_623_744, 38),
    ],
)
def test_presets_have_the_size_of_the_published_models(module, preset, parameters, leaves):
    # BERT: 109,514,298 with two segment embeddings of 768 and twelve key biases of 768, which ours
    # has not.
    model = module.PRESETS[preset]
    tree = jax.tree.leaves(shapes(module, model, module.batch(model, 1))[0])
    assert (sum(x.size for x in tree), len(tree)) == (parameters, leaves)


def test_mlp_1024_has_32_MiB_of_gradients():
    params, *_ = shapes(mlp, mlp.PRESETS["1024"], mlp.batch("1024", 1))
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params)) == 32 * 2**20


def test_synthetic_batches_follow_the_seed_and_the_size():
    batch = resnet.batch("50", 2)
    assert batch["image"].shape == (2, 64, 64, 3)
    assert resnet.batch("18-digits", 2)["image"].shape == (2, 8, 8, 1)
    assert resnet.batch("18", 1, size=96)["image"].shape == (1, 96, 96, 3)
    assert gpt.batch("360m", 2)["tokens"].shape == (2, 1025)
    assert bert.batch("base", 2, length=64)["tokens"].shape == (2, 64)
    np.testing.assert_array_equal(batch["image"], resnet.batch("50", 2)["image"])
    assert not np.array_equal(batch["image"], resnet.batch("50", 2, seed=1)["image"])


### Claims about every model


@pytest.mark.quick("gpt", "resnet", "mlp")
@tiny
def test_gradients_flow_into_every_leaf(name):
    _, grads = evaluate(name)
    still = [jax.tree_util.keystr(k) for k, g in jax.tree.leaves_with_path(grads) if not jnp.any(g)]
    assert still == []


@tiny
def test_models_are_deterministic_under_jit(name):
    module, model = TINY[name]
    params, model_state, batch = build(name)
    initialized = module.init(model, jax.random.key(0), module.batch(model, ROWS))
    jax.tree.map(np.testing.assert_array_equal, (params, model_state), initialized)
    jax.tree.map(np.testing.assert_array_equal, evaluate(name), compiled(name)(*initialized, batch))


@pytest.mark.parametrize(
    ("name", "choices"), [("resnet", 10), ("resnet-gn", 10), ("bert", 256), ("gpt", 256)]
)
def test_a_fresh_model_guesses_among_all_choices(name, choices):
    (loss, (_, aux)), _ = evaluate(name)
    assert abs(loss - math.log(choices)) < 0.1 * math.log(choices)
    assert 0 <= aux["accuracy"] <= 1


@tiny
def test_float64_stays_float64(name):
    module, model = TINY[name]
    with jax.enable_x64(True):
        model = model.clone(dtype=jnp.float64, param_dtype=jnp.float64)
        batch = {
            k: v.astype(float) if v.dtype == np.float32 else v
            for k, v in module.batch(model, ROWS).items()
        }
        args = shapes(module, model, batch)
        assert all(x.dtype == jnp.float64 for x in jax.tree.leaves(args[:2]))
        # Not one intermediate of forward and backward is narrower: none of the digits is lost on
        # the way.
        trace = str(jax.make_jaxpr(value_and_grad(module, model))(*args))
        assert "f64[" in trace and "f32" not in trace and "f16" not in trace


@tiny
def test_float32_stays_float32_where_float64_is_enabled(name):
    module, model = TINY[name]
    with jax.enable_x64(True):
        args = shapes(module, model, module.batch(model, ROWS))
        out = jax.eval_shape(value_and_grad(module, model), *args)
        assert all(x.dtype == jnp.float32 for x in jax.tree.leaves((out, args[:2])))


@tiny
def test_bfloat16_computes_a_float32_loss_and_keeps_float32_parameters(name):
    module, model = TINY[name]
    model = model.clone(dtype=jnp.bfloat16)
    args = shapes(module, model, module.batch(model, ROWS))
    trace = jax.make_jaxpr(value_and_grad(module, model))(*args)
    assert "bf16[" in str(trace)
    assert all(x.dtype == jnp.float32 for x in (*trace.out_avals, *jax.tree.leaves(args[:2])))


@pytest.mark.parametrize("name", ["mlp", "resnet-gn", "bert", "gpt"])
def test_the_loss_of_a_batch_is_the_mean_of_its_shards(name):
    module, model = TINY[name]
    params, _, batch = build(name)
    (loss, (_, aux)), _ = evaluate(name)
    shards = jax.tree.map(lambda x: x.reshape(2, ROWS // 2, *x.shape[1:]), batch)
    losses, auxes = jax.jit(jax.vmap(partial(module.loss_fn(model), params)))(shards)
    close = partial(np.testing.assert_allclose, rtol=1e-5)
    jax.tree.map(lambda a, b: close(a.mean(), b), (losses, auxes), (loss, aux))


@pytest.mark.parametrize("name", ["bert", "gpt"])
def test_dropout_acts_only_where_an_rng_is_given(name):
    module, model = TINY[name]
    params, _, batch = build(name)
    dropping = jax.jit(module.loss_fn(model.clone(dropout=0.5)))
    assert "random_bits" not in str(jax.make_jaxpr(dropping)(params, batch))
    first, repeated, different = (
        dropping(params, batch, rng=jax.random.key(i))[0] for i in (1, 1, 2)
    )
    assert first == repeated != different


### ResNet


def neighbours_replaced(images: np.ndarray) -> np.ndarray:
    """Keeps the first image of the batch and no other."""
    return np.concatenate([images[:1], images[1:] ** 2])


def test_group_norm_has_no_buffers_and_treats_every_image_by_itself():
    model = resnet.PRESETS["tiny-gn"]
    params, model_state, batch = build("resnet-gn")
    assert model_state is None and not resnet.has_buffers(model)
    predict = jax.jit(partial(resnet.predict, model))
    before, after = (
        predict(params, None, x) for x in (batch["image"], neighbours_replaced(batch["image"]))
    )
    np.testing.assert_allclose(before[0], after[0], atol=1e-6)
    assert not np.allclose(before[1:], after[1:], atol=1e-4)


def test_batch_norm_moves_every_buffer_and_predict_reads_the_running_averages():
    model = resnet.PRESETS["tiny"]
    params, fresh, batch = build("resnet")
    (_, (moved, _)), _ = evaluate("resnet")
    assert jax.tree.structure(fresh) == jax.tree.structure(moved)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: jnp.any(a != b), fresh, moved)))

    predict = jax.jit(partial(resnet.predict, model))
    before = predict(params, moved, batch["image"])
    assert not np.allclose(before, predict(params, fresh, batch["image"]), atol=1e-4)
    # Not the statistics of the batch at hand: an image does not see its neighbours.
    after = predict(params, moved, neighbours_replaced(batch["image"]))
    np.testing.assert_allclose(before[0], after[0], atol=1e-6)


def test_batch_norm_over_an_axis_sees_the_whole_batch():
    model = resnet.PRESETS["tiny"].clone(axis_name="replica")
    params, model_state, batch = build("resnet")
    joined, _ = evaluate("resnet")
    # Initialised outside of any axis, with the same leaves.
    outside = shapes(resnet, model, batch)[:2]
    assert jax.tree.structure(outside) == jax.tree.structure((params, model_state))

    loss = jax.vmap(
        partial(resnet.loss_fn(model), params, model_state=model_state), axis_name="replica"
    )
    replicas = jax.jit(loss)(jax.tree.map(lambda x: x.reshape(2, ROWS // 2, *x.shape[1:]), batch))
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(lambda a, b: close(a.mean(0), b), replicas, joined)


### Language models


def logits(name: str) -> Any:
    _, model = TINY[name]
    return jax.jit(lambda tokens: model.apply({"params": build(name)[0]}, tokens))


def replaced(tokens: np.ndarray, place: int) -> np.ndarray:
    """Writes another token in one place of every row."""
    changed = tokens.copy()
    changed[:, place] = (changed[:, place] + 1) % 256
    return changed


def test_gpt_is_causal():
    tokens = build("gpt")[-1]["tokens"]
    place = 20
    before, after = map(logits("gpt"), (tokens, replaced(tokens, place)))
    np.testing.assert_array_equal(before[:, :place], after[:, :place])
    assert jnp.all(jnp.any(before[:, place:] != after[:, place:], axis=-1))


def test_scanned_layers_compute_what_written_out_layers_do():
    model = gpt.PRESETS["tiny"]
    looped = scanned.scanned(model)
    batch = gpt.batch(model, 2)
    params, _ = gpt.init(model, jax.random.key(0), batch)
    stacked = scanned.stacked(params)
    assert jax.tree.map(
        jnp.shape, scanned.init(looped, jax.random.key(0), batch)[0]
    ) == jax.tree.map(jnp.shape, stacked)
    value, _ = jax.jit(gpt.loss_fn(model))(params, batch)
    looped_value, _ = jax.jit(scanned.loss_fn(looped))(stacked, batch)
    np.testing.assert_allclose(looped_value, value, rtol=1e-6)


def test_layers_that_are_left_out_might_as_well_not_be_there():
    model = gpt.PRESETS["tiny"].clone(layers=3, layer_drop=0.5)
    batch = gpt.batch(model, ROWS)
    params, _ = gpt.init(model, jax.random.key(0), batch)
    value_and_grad = jax.jit(
        jax.value_and_grad(lambda p, rng: gpt.loss_fn(model)(p, batch, rng=rng)[0])
    )
    sizes = set()
    for seed in range(4):
        loss, grads = value_and_grad(params, jax.random.key(seed))
        kept_layers = [
            i for i in range(3) if any(np.any(x) for x in jax.tree.leaves(grads[f"layer_{i}"]))
        ]
        layers = {f"layer_{k}": params[f"layer_{i}"] for k, i in enumerate(kept_layers)}
        shorter = gpt.loss_fn(model.clone(layers=len(kept_layers), layer_drop=0.0))
        expected, _ = shorter({**layers, "embed": params["embed"], "norm": params["norm"]}, batch)
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
        sizes.add(len(kept_layers))
    assert len(sizes) > 1


def test_layers_are_left_out_as_often_as_asked_and_only_with_an_rng():
    model = gpt.PRESETS["tiny"].clone(layers=8, layer_drop=0.25)
    draw = lambda key: model.apply({}, rngs={"layer_drop": key}, method="kept_layers")  # noqa: E731
    masks = np.asarray(jax.vmap(draw)(jax.random.split(jax.random.key(0), 500)))
    assert masks.shape == (500, 8)
    np.testing.assert_allclose(masks.mean(axis=0), 0.75, atol=0.08)
    assert model.apply({}, method="kept_layers") is None
    plain = gpt.PRESETS["tiny"]
    params, _, batch = build("gpt")
    losses = [gpt.loss_fn(m)(params, batch)[0] for m in (plain, plain.clone(layer_drop=0.9))]
    assert losses[0] == losses[1]


def test_bert_reads_in_both_directions():
    tokens = build("bert")[-1]["tokens"]
    place = 20
    before, after = map(logits("bert"), (tokens, replaced(tokens, place)))
    assert jnp.all(jnp.any(before != after, axis=-1))


def test_rotary_products_depend_only_on_relative_position():
    q, k = np.random.default_rng(0).standard_normal((2, 1, 8, 2, 16), np.float32)

    def products(start: int, distance: int) -> jax.Array:
        positions = start + 3 * jnp.arange(8)
        return jnp.sum(gpt.rotary(q, positions + distance) * gpt.rotary(k, positions), -1)

    np.testing.assert_allclose(products(0, 5), products(40, 5), atol=1e-4)
    np.testing.assert_allclose(products(7, 0), jnp.sum(q * k, -1), atol=1e-4)
    assert not np.allclose(products(0, 5), products(0, 6), atol=1e-1)


def test_bert_ignores_targets_that_are_not_masked():
    params, _, batch = build("bert")
    loss = jax.jit(bert.loss_fn(bert.PRESETS["tiny"]))
    mask = batch["mask"]
    targets = batch["targets"]
    elsewhere = batch | {"targets": np.where(mask, targets, 0)}
    hidden = batch | {"targets": np.where(mask, 0, targets)}
    assert loss(params, batch)[0] == loss(params, elsewhere)[0] != loss(params, hidden)[0]


def test_bert_masks_the_same_number_in_every_row():
    batch = bert.batch("base", 16)
    assert np.all(batch["mask"].sum(-1) == round(bert.MASKED_SHARE * 128))
    assert np.all((batch["tokens"] == batch["targets"]) | batch["mask"])
    assert 0.6 < np.mean(batch["tokens"][batch["mask"]] == bert.MASK_TOKEN) < 0.95


### Independence


def test_models_never_import_the_library():
    scripts = (Path(__file__).parents[1] / "models").glob("*.py")
    files = [
        f for f in scripts if '__name__ == "__main__"' not in f.read_text()
    ]  # the others are a user's scripts
    assert len(files) >= 5
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [n for n in names if n.split(".")[0] == "fddp"], f"{file.name} imports fddp"
