"""A state in shards: the same training, in less memory, for the same bytes."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_schedule import SCHEDULES
from trees import close
from truth import by_plain_jax

import fddp
from fddp.analysis.measure import bytes_of
from fddp.buckets import whole_forms
from fddp.jax_internals import find_collectives, parse

pytestmark = pytest.mark.steps

Groups = Callable[[int], fddp.Group]
both = pytest.mark.parametrize("shard", ["optimizer", "state"])
DRAW = np.random.default_rng(3)
# No size is divided by 3 or 5 replicas; a scalar and a leaf of two have fewer elements than there
# are replicas.
PARAMS = {
    "w": DRAW.normal(size=(3, 7)),
    "b": DRAW.normal(size=2),
    "v": DRAW.normal(size=(7, 2)),
    "s": np.float64(0.5),
    "empty": np.zeros((3, 0)),
}
ROWS = DRAW.normal(size=(120, 3))
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw, clipped": lambda: optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(0.05)),
    "adamw, masked": lambda: optax.adamw(
        0.05, mask={"w": True, "b": False, "v": True, "s": False, "empty": False}
    ),
    "optimistic gradient descent": lambda: optax.optimistic_gradient_descent(0.05),  # sets a flag
    "rprop": lambda: optax.rprop(0.05),
    "lamb": lambda: optax.lamb(0.05),
    "prodigy": lambda: optax.contrib.prodigy(),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.05), 2).gradient_transformation(),
    # Leaves with an owner.
    "muon, clipped": lambda: optax.chain(
        optax.clip_by_global_norm(0.3), optax.contrib.muon(0.05, weight_decay=0.1)
    ),
    "muon, skipping": lambda: optax.apply_if_finite(optax.contrib.muon(0.05), 3),
    "adafactor": lambda: optax.adafactor(0.05, min_dim_size_to_factor=2),
    "a rate in the state": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.05),
}


# In the default tier: element by element, a norm, an owner of whole leaves, and two states in
# turns.
OF_EACH_KIND = [
    (3, "momentum"),
    (3, "adamw, clipped"),
    (5, "lamb"),
    (2, "muon, clipped"),
    (3, "MultiSteps"),
]


def loss_fn(p: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ p["w"]) @ p["v"] + p["b"] - p["s"]) ** 2) + jnp.sum(p["empty"])


def plain(optimizer: optax.GradientTransformation, steps: int) -> tuple[Any, Any]:
    """Plain JAX on the joined batch: parameters and the optimizer's state."""
    return by_plain_jax(loss_fn, optimizer, PARAMS, [ROWS * (k + 1) for k in range(steps)])[:2]


@pytest.mark.quick(
    "2-muon, clipped-state", "5-lamb-optimizer", "3-MultiSteps-state", "3-momentum-optimizer"
)
@both
@pytest.mark.parametrize(
    ("n", "name"),
    [
        pytest.param(*case, marks=[] if case in OF_EACH_KIND else [pytest.mark.slow])
        for case in [
            *((3, name) for name in OPTIMIZERS),
            *((n, "lamb") for n in (1, 5)),
            *((n, "muon, clipped") for n in (1, 2, 4)),
        ]
    ],
)
def test_training_in_shards_is_training(group: Groups, x64: None, n: int, name: str, shard: Any):
    make = OPTIMIZERS[name]
    step = fddp.train_step(loss_fn, make(), group=group(n), shard=shard, bucket_cap_mb=0)
    state = step.init(PARAMS)
    for k in range(4):
        state, _ = step(state, ROWS * (k + 1))
    # A shard of a moment is a part of the moment; a count is a count.
    state = fddp.whole(state, group=group(n))
    close((state.params, state.opt_state), plain(make(), 4))


@both
def test_each_replica_holds_a_part_of_the_state_and_no_more(group: Groups, shard: Any):
    n = 4
    params = {"w": np.ones((33, 5), np.float32), "b": np.ones(3, np.float32)}
    step = fddp.train_step(
        lambda p, x: jnp.mean(x @ p["w"]) + jnp.mean(p["b"]),
        optax.adam(0.1),
        group=group(n),
        shard=shard,
    )
    state = step.init(params)
    state, _ = step(state, np.ones((4, 33), np.float32))
    arrays = [
        *jax.tree.leaves(state.opt_state),
        *(jax.tree.leaves(state.params) if shard == "state" else ()),
    ]
    shards = [shard for x in arrays if x.ndim for shard in x.addressable_shards]
    for device in (
        group(n).placement.place(jnp.ones(()), group(n).placement.per_replica.__class__()).devices()
    ):
        nbytes = sum(shard.data.nbytes for shard in shards if shard.device == device)
        # Two moments of 165 and 3 floats, and the parameters, each filled up to a multiple of the
        # replicas.
        assert nbytes == (3 if shard == "state" else 2) * 4 * (42 + 1)


@SCHEDULES
def test_scattered_and_gathered_bytes_are_those_of_an_all_reduce(group: Groups, schedule: str):
    n = 4
    params = {"w": np.ones((8, 5), np.float32), "b": np.ones(16, np.float32)}
    step_bytes = []
    for shard in (None, "optimizer", "state"):
        options = {"shard": shard, "schedule": schedule, "bucket_cap_mb": 0}
        step = fddp.train_step(
            lambda p, x: jnp.mean(x @ p["w"]) + jnp.mean(p["b"]),
            optax.adam(0.1),
            group=group(n),
            **options,
        )
        _, info = step(step.init(params), np.ones((4, 8), np.float32))
        by_name = dict(
            zip([bucket.names for bucket in step.plan.buckets], np.asarray(info.sent).tolist())
        )
        step_bytes.append(by_name)
    # Loss and metrics ride in the first bucket of an ordinary step, and alone here.
    carrier = next(iter(step_bytes[0]))
    assert step_bytes[1] | {carrier: 0} == step_bytes[0] | {carrier: 0}
    assert step_bytes[2] == step_bytes[1] == {("w",): 2 * 3 * 40, ("b",): 2 * 3 * 16}


@both
def test_no_sum_of_gradients_comes_back_whole(group: Groups, shard: Any):
    """The program's all-reduce is that of loss and metrics."""
    params = {"w": np.ones((64, 8), np.float32)}
    step = fddp.train_step(
        lambda p, x: jnp.mean((x @ p["w"]) ** 2), optax.adam(0.1), group=group(4), shard=shard
    )
    compiled = step.lower(step.init(params), np.ones((4, 64), np.float32)).compile()
    kinds = [collective.kind for collective in find_collectives(parse(compiled.as_text() or ""))]
    assert sorted(kinds) == ["all-gather", "all-reduce", "all-to-all"]


@both
def test_what_no_replica_used_stays_with_its_moments(group: Groups, shard: Any):
    def loss(p: Any, x: Any) -> Any:
        return jax.lax.cond(x[0, 0] > 0, lambda: jnp.sum(p["a"] ** 2), lambda: jnp.sum(p["b"] ** 2))

    step = fddp.train_step(
        loss, optax.adamw(0.1), group=group(2), shard=shard, find_unused_parameters=True
    )
    state = step.init({"a": np.ones(3, np.float32), "b": np.ones(5, np.float32)})
    state, _ = step(state, np.ones((4, 1), np.float32))
    before = jax.tree.map(np.asarray, fddp.whole(state, group=group(2)))
    state, info = step(state, -np.ones((4, 1), np.float32))
    after = fddp.whole(state, group=group(2))
    assert jax.tree.map(int, info.used) == {"a": 0, "b": 2}
    for old, new in (
        (before.params, after.params),
        (before.opt_state[0].mu, after.opt_state[0].mu),
    ):
        np.testing.assert_array_equal(old["a"], new["a"])
        assert np.all(old["b"] != new["b"])


@both
def test_what_micro_batches_send_is_a_scatter_each_and_one_gather(group: Groups, shard: Any):
    params = {"w": np.ones((8, 5), np.float32), "b": np.ones(16, np.float32)}
    nbytes = []
    for steps in (1, 2, 3):
        step = fddp.train_step(
            lambda p, x: jnp.mean(x @ p["w"]) + jnp.mean(p["b"]),
            optax.adam(0.1),
            group=group(4),
            shard=shard,
            accumulation_steps=steps,
            bucket_cap_mb=0,
        )
        _, info = step(step.init(params), np.ones((24, 8), np.float32))
        nbytes.append(np.asarray(info.sent).tolist())
    leaves = [40 if bucket.names == ("w",) else 16 for bucket in step.plan.buckets]
    for steps, nbytes_of_step in zip((1, 2, 3), nbytes):
        assert nbytes_of_step[:2] == [
            (steps + 1) * 3 * size for size in leaves
        ]  # three parts of a quarter of 4 bytes each
        assert nbytes_of_step[2] == nbytes[0][2]


@both
def test_a_python_number_is_trained_in_shards(group: Groups, shard: Any):
    def loss(p: Any, x: Any) -> Any:
        return jnp.mean((x * p["s"] - p["w"]) ** 2)

    params = {"w": np.zeros(3, np.float32), "s": 0.5}
    step = fddp.train_step(loss, optax.sgd(0.1), group=group(2), shard=shard)
    state, _ = step(step.init(params), np.full((2, 3), 2, np.float32))
    np.testing.assert_allclose(fddp.whole(state.params)["s"], 0.5 - 0.1 * 4, rtol=1e-6)


@both
def test_an_update_may_print_a_norm_over_all_shards(group: Groups, shard: Any, capfd: Any):
    def printing(updates: Any, params: Any) -> Any:
        del params
        jax.debug.print("norm {}", optax.tree.norm(updates))
        return updates

    optimizer = optax.chain(optax.stateless(printing), optax.sgd(0.5))
    step = fddp.train_step(
        lambda w, x: jnp.mean((x - w) ** 2), optimizer, group=group(4), shard=shard
    )
    state, _ = step(step.init(jnp.zeros(16)), np.ones((8, 16), np.float32))
    jax.effects_barrier()
    # The gradient is −2 / 16 in each of 16 elements.
    assert capfd.readouterr().out == "norm 0.5\n" * 4
    np.testing.assert_array_equal(fddp.whole(state.params), np.full(16, 0.0625))


@both
def test_an_update_may_print_a_sum_on_all_replicas_and_a_leaf_on_its_home(group, shard, capfd):
    def printing(updates: Any, params: Any) -> Any:
        del params
        jax.debug.print("sum {}", jnp.sum(updates))
        jax.debug.print("leaf {}", updates)
        return updates

    optimizer = optax.chain(optax.stateless(printing), optax.sgd(0.5))
    step = fddp.train_step(
        lambda w, x: jnp.mean((x - w) ** 2), optimizer, group=group(2), shard=shard
    )
    step(step.init(jnp.zeros(2)), np.ones((4, 2), np.float32))
    jax.effects_barrier()
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines) == ["leaf [-1. -1.]", "sum -2.0", "sum -2.0"]


@both
def test_an_update_that_prints_several_leaves_at_once_is_refused(group: Groups, shard: Any):
    def printing(updates: Any, params: Any) -> Any:
        del params
        jax.debug.print("{} {}", updates["v"], updates["w"])
        return updates

    optimizer = optax.chain(optax.stateless(printing), optax.sgd(0.5))
    step = fddp.train_step(loss_fn, optimizer, group=group(2), shard=shard)
    with pytest.raises(ValueError, match=r"of several leaves needs whole arrays.*for each leaf"):
        step.init(jax.tree.map(np.float32, PARAMS))


@both
def test_a_leaf_that_is_ignored_has_no_shard_and_stays(group: Groups, shard: Any):
    step = fddp.train_step(
        loss_fn, optax.adam(0.1), group=group(3), shard=shard, ignore=lambda name: name == "w"
    )
    state = step.init(jax.tree.map(np.float32, PARAMS))
    assert state.opt_state[0].mu["w"] is None
    state, _ = step(state, ROWS.astype(np.float32))
    np.testing.assert_array_equal(state.params["w"], PARAMS["w"].astype(np.float32))
    assert np.all(
        np.asarray(fddp.whole(state, group=group(3)).params["v"]) != PARAMS["v"].astype(np.float32)
    )


@both
def test_where_one_shard_overflows_all_replicas_skip_and_lower_the_scale(group: Groups, shard: Any):
    def loss(p: Any, x: Any) -> Any:
        return jnp.sum(p["w"] * x[0])

    step = fddp.train_step(loss, fddp.dynamic_scale(optax.adam(0.1)), group=group(2), shard=shard)
    state = step.init({"w": np.ones(4, np.float32)})
    scale = float(state.opt_state.scale)
    # The last element's gradient alone is not finite, and lies in the last replica's shard.
    state, _ = step(state, np.array([[1, 1, 1, np.inf]] * 2, np.float32))
    assert float(state.opt_state.scale) < scale
    np.testing.assert_array_equal(fddp.whole(state, group=group(2)).params["w"], np.ones(4))
    state, _ = step(state, np.ones((2, 4), np.float32))
    assert np.all(np.asarray(fddp.whole(state, group=group(2)).params["w"]) < 1)


@both
def test_a_step_that_is_not_finite_changes_no_shard(group: Groups, shard: Any, capfd: Any):
    step = fddp.train_step(
        lambda p, x: jnp.sum(p["w"] * x[0]),
        optax.adam(0.1),
        group=group(2),
        shard=shard,
        skip_nonfinite=True,
    )
    state, _ = step(step.init({"w": np.ones(4, np.float32)}), np.ones((2, 4), np.float32))
    before = jax.tree.map(np.asarray, (state.params, state.opt_state))
    capfd.readouterr()
    state, info = step(state, np.array([[1, 1, 1, np.inf]] * 2, np.float32))
    assert bool(info.skipped)
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), before)
    for _ in range(2):
        state, info = jax.block_until_ready(step(state, np.ones((2, 4), np.float32)))
    assert "step 2 was skipped: its gradient of w was the first" in capfd.readouterr().err


@both
def test_an_evaluation_inside_jit_takes_a_state_whole(group: Groups, shard: Any):
    step = fddp.train_step(loss_fn, optax.adam(0.1), group=group(3), shard=shard)
    state, _ = step(step.init(jax.tree.map(np.float32, PARAMS)), ROWS.astype(np.float32))
    inside = jax.jit(lambda state: fddp.whole(state, group=group(3)))(state)
    outside = fddp.whole(state, group=group(3))
    assert inside.opt_state[0].mu["w"].shape == inside.params["w"].shape == (3, 7)
    jax.tree.map(np.testing.assert_array_equal, inside, outside)


@pytest.mark.quick("state-optimizer")
@pytest.mark.parametrize(("first", "later"), [("optimizer", "state"), ("state", "optimizer")])
def test_a_checkpoint_of_shards_is_whole_and_goes_on_on_other_numbers_of_replicas(
    group: Groups, tmp_path: Path, x64: None, first: str, later: str
):
    def make(n: int, shard: Any) -> tuple[fddp.TrainStep, fddp.TrainState]:
        step = fddp.train_step(loss_fn, optax.adamw(0.05), group=group(n), shard=shard)
        return step, step.init(PARAMS)

    step, state = make(3, first)
    state, _ = step(state, ROWS)
    with fddp.Checkpoints(tmp_path / "saved", step, every=1) as checkpoints:
        checkpoints.save(state)
    expected = plain(optax.adamw(0.05), 1)
    for n, shard in ((3, first), (5, later), (2, None)):
        step, like = make(n, shard)
        with fddp.Checkpoints(tmp_path / "saved", step, every=1) as checkpoints:
            state, _ = checkpoints.restore(like)
        gathered = fddp.whole(state, group=group(n))
        close((gathered.params, gathered.opt_state), expected)
        state, _ = step(state, 2 * ROWS)
        close(fddp.whole(state, group=group(n)).params, plain(optax.adamw(0.05), 2)[0])


@both
def test_forms_are_those_of_the_state(group: Groups, shard: Any):
    step = fddp.train_step(loss_fn, optax.adam(0.1), group=group(3), shard=shard)
    params = jax.tree.map(np.float32, PARAMS)
    form = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    assert form(step.shapes(params)) == form(step.init(params))


def test_parameters_are_gathered_in_the_order_in_which_the_forward_pass_uses_them(group: Groups):
    """Tied embeddings are ready last and used first; leaves that are cast at the beginning are used
    at their multiplication."""

    def loss(p: Any, x: Any) -> Any:
        narrow = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
        h = narrow["embedding"][x]
        skip = h
        for name in ("b", "a"):  # the alphabet is not the order
            h = jnp.tanh(h @ narrow[name])
        h = jax.checkpoint(lambda h, w: jnp.tanh(h @ w))(h + skip, narrow["remat"])
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, narrow["scanned"])
        return jnp.mean((h @ narrow["embedding"].T).astype(jnp.float32) ** 2)

    square = np.full((4, 4), 0.1, np.float32)
    params = dict.fromkeys(("a", "b", "remat"), square) | {"scanned": np.stack([square] * 3)}
    params["embedding"] = np.linspace(-1, 1, 40, dtype=np.float32).reshape(10, 4)
    results = []
    for shard in (None, "state"):
        options: Any = {"bucket_cap_mb": 0, "shard": shard}
        step = fddp.train_step(loss, optax.sgd(0.1), group=group(2), **options)
        state = step.init(params)
        for _ in range(3):
            state, _ = step(state, np.arange(8, dtype=np.int32))
        results.append(fddp.whole(state, group=group(2)).params)
    # Rounding to 16 bits, and omitted rounding inside a stage, depend on where a program is
    # cut.
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4), *results)


@both
def test_a_plan_says_that_it_is_scattered_and_gathered_and_how_much_of_it_is_padding(
    group: Groups, shard: str
):
    def plan(n: int, shard: Any) -> fddp.BucketPlan:
        step = fddp.train_step(loss_fn, optax.adam(0.1), group=group(n), shard=shard)
        step.init(jax.tree.map(np.float32, PARAMS))
        return step.plan

    uncut = plan(4, None)
    cut = plan(4, shard)
    # 21, 2, 14 and 1 elements are filled up to 24, 4, 16 and 4.
    line = f"each is scattered to 4 replicas and gathered, with {4 * 10} bytes of padding"
    assert cut.padding == 40 and line in str(cut).splitlines()
    assert "scattered" not in str(uncut) and (uncut.padding, uncut.buckets) == (0, cut.buckets)
    assert len({uncut.digest, cut.digest, plan(3, shard).digest}) == 3
    # One replica has it all.
    assert "scattered" not in str(plan(1, shard)) and plan(1, shard).padding == 0


def test_what_cannot_be_cut_is_refused_by_name(group: Groups):
    params = {"b": np.ones(3, np.float32), "w": np.ones((4, 3), np.float32)}

    def init(optimizer: optax.GradientTransformation, **options: Any) -> Any:
        return fddp.train_step(
            lambda p, x: jnp.sum(p["w"]), optimizer, shard="optimizer", **options
        ).init(params)

    with pytest.raises(
        ValueError, match=r"b \(concatenate of several leaves\), w \(.*\)\. Leave shard out"
    ):
        init(optax.flatten(optax.adam(0.1)))
    with pytest.raises(
        ValueError, match=r"cannot be divided so: b \(a state that is in parts only afterwards\)"
    ):
        init(optax.sm3(0.1))
    complex_leaf = {"w": jnp.ones(3, jnp.complex64)}
    with pytest.raises(ValueError, match="adam takes complex leaves without split_real_and_imag"):
        fddp.train_step(
            lambda p, x: jnp.sum(abs(p["w"])),
            optax.contrib.split_real_and_imaginary(optax.adam(0.1)),
            shard="optimizer",
        ).init(complex_leaf)
    with pytest.raises(ValueError, match="nothing to share"):
        fddp.train_step(lambda w, x: w, optax.adam(0.1), shard="optimizer").init(jnp.ones(()))
    with pytest.raises(ValueError, match="shard must be 'optimizer', 'state' or None, got 'all'"):
        fddp.train_step(loss_fn, optax.adam(0.1), shard="all")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="no optimizer whose state could be shared"):
        fddp.value_and_grad(loss_fn, shard="optimizer")


@both
def test_a_state_that_is_not_in_the_steps_shards_is_refused(group: Groups, shard: Any):
    params = jax.tree.map(np.float32, PARAMS)
    x = ROWS.astype(np.float32)
    step = fddp.train_step(loss_fn, optax.adam(0.1), group=group(3), shard=shard, donate=False)
    state, _ = step(step.init(params), x)
    other_step = fddp.train_step(
        loss_fn, optax.adam(0.1), group=group(2), shard=shard, donate=False
    )
    for wrong, with_step in (
        (fddp.whole(state, group=group(3)), step),
        (other_step.init(params), step),
        (state, other_step),
    ):
        with pytest.raises(ValueError, match=r"not in shards of \d replicas"):
            with_step(wrong, x)
    with pytest.raises(ValueError, match="this step has no shard="):
        fddp.train_step(loss_fn, optax.adam(0.1), group=group(3))(state, x)
    step(state, x)


def test_forms_and_copies_of_the_host_are_put_together_too(group: Groups):
    step = fddp.train_step(loss_fn, optax.adam(0.1), group=group(3), shard="optimizer")
    state = step.init(jax.tree.map(np.float32, PARAMS))
    expected = fddp.whole(state, group=group(3))
    jax.tree.map(
        np.testing.assert_array_equal, fddp.whole(jax.device_get(state), group=group(3)), expected
    )
    forms = fddp.whole(step.shapes(jax.tree.map(np.float32, PARAMS)), group=group(3))
    assert forms.opt_state[0].mu["w"].shape == (3, 7)


### Nothing to save

MATRIX = {"w": np.ones((8, 3), np.float32)}
SMALL = {"b": np.ones(3, np.float32), "s": np.float32(1)}


def warnings_and_savings(
    group: fddp.Group, shard: Any, optimizer: optax.GradientTransformation, params: Any, capfd: Any
) -> tuple[list[str], int]:
    """The warnings of `step.init`, and the number of bytes that it saves."""
    step = fddp.train_step(lambda p, x: jnp.mean(x), optimizer, group=group, shard=shard)
    capfd.readouterr()
    step.init(params)
    whole, held = (
        sum(bytes_of(x).values()) for x in (whole_forms(step.local_form), step.local_form)
    )
    return capfd.readouterr().err.splitlines(), whole - held


@pytest.mark.parametrize(
    ("n", "shard", "optimizer", "params", "reason"),
    [
        (
            4,
            "optimizer",
            optax.sgd(0.1),
            MATRIX,
            "this optimizer's state has nothing of the parameters' shapes",
        ),
        (1, "optimizer", optax.adam(0.1), MATRIX, "there is one replica"),
        (1, "state", optax.sgd(0.1), MATRIX, "there is one replica"),
        (
            4,
            "state",
            optax.adam(0.1),
            dict.fromkeys("ab", np.float32(1)),
            "no leaf has more than one element",
        ),
    ],
)
def test_where_sharing_saves_nothing_the_first_rank_says_so_in_a_line(
    group: Groups, capfd: Any, n: int, shard: str, optimizer: Any, params: Any, reason: str
):
    lines, saved = warnings_and_savings(group(n), shard, optimizer, params, capfd)
    assert (
        saved == 0
        and len(lines) == 1
        and f"fddp: shard={shard!r} saves nothing: {reason}" in lines[0]
    )
    assert warnings_and_savings(replace(group(n), rank=1), shard, optimizer, params, capfd) == (
        [],
        0,
    )


@pytest.mark.parametrize(
    ("shard", "optimizer", "params"),
    [
        ("optimizer", optax.adam(0.1), MATRIX),
        ("optimizer", optax.sgd(0.1, momentum=0.9), MATRIX),
        ("state", optax.sgd(0.1), MATRIX),
        # Fewer elements than replicas: some hold padding, and each holds less than all.
        ("optimizer", optax.adam(0.1), SMALL),
    ],
)
def test_where_sharing_saves_something_nothing_is_said(
    group: Groups, capfd: Any, shard: str, optimizer: Any, params: Any
):
    lines, saved = warnings_and_savings(group(4), shard, optimizer, params, capfd)
    assert lines == [] and saved > 0


def test_where_no_sharing_was_asked_for_nothing_is_said(group: Groups, capfd: Any):
    assert warnings_and_savings(group(1), None, optax.sgd(0.1), MATRIX, capfd) == ([], 0)


def test_a_group_that_does_not_hold_the_shards_is_told_so(group: Groups):
    step = fddp.train_step(loss_fn, optax.adam(0.1), group=group(2), shard="state")
    state = step.init(jax.tree.map(np.float32, PARAMS))
    close(fddp.whole(state.params), fddp.whole(state.params, group=group(2)))
    with pytest.raises(
        ValueError, match="2 devices hold the parts, and the group is another, of 3 replicas"
    ):
        fddp.whole(state, group=group(3))


def test_a_function_may_be_mapped_over_a_state_in_shards(group: Groups):
    state = fddp.train_step(loss_fn, optax.adam(0.1), group=group(2), shard="state").init(PARAMS)
    assert "Shard of shape [" in repr(jax.tree.map(jnp.shape, state.params))


@pytest.mark.quick("state")
@both
def test_a_step_is_told_of_shards_that_other_devices_hold(group: Groups, shard: Any):
    step = fddp.train_step(loss_fn, optax.adam(0.1), group=group(2), shard=shard)
    state = step.init(PARAMS)
    for devices in ([2, 3], [1, 0]):
        moved = step.on(
            fddp.mesh_group(jax.sharding.Mesh(np.array(jax.devices())[devices], "replica"))
        )
        with pytest.raises(
            ValueError, match=r"shards that devices \[0, 1\] hold, and .* are devices"
        ):
            moved(state, ROWS)
        moved_state, _ = moved(moved.init(PARAMS), ROWS)
        with pytest.raises(ValueError, match=r"shards that devices \[0, 1\] hold"):
            moved(state, ROWS)
        moved(moved_state, ROWS)
    step(state, ROWS)


def test_parameters_that_lie_along_the_replicas_begin_a_state(group: Groups):
    replicas = group(4)
    mesh = jax.sharding.Mesh(jax.devices()[:4], "replica")
    along = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("replica"))
    make = lambda: {"w": jnp.arange(24.0).reshape(8, 3)}  # noqa: E731
    for shard in (None, "state"):
        step = fddp.train_step(
            lambda p, x: jnp.mean(x @ p["w"]), optax.adam(0.1), group=replicas, shard=shard
        )
        states = [step.init(params) for params in (make(), jax.jit(make, out_shardings=along)())]
        close(*map(fddp.whole, states), rtol=0, atol=0)
