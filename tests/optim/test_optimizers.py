"""An optax transformation trains as plain JAX on the joined batch, or `train_step` refuses it.

All of optax's aliases and contrib's optimizers are tested, by the names that these modules list.
Their parts (`scale_by_…`) are tested in them.
"""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trees
from optax._src import alias
from problems import of_fast_params
from truth import by_plain_jax

import fddp

close = partial(trees.close, rtol=1e-4, atol=1e-6)

pytestmark = pytest.mark.steps

REPLICAS = 2
RNG = np.random.default_rng(8)
PARAMS = {"w": RNG.normal(size=(4, 3)).astype(np.float32), "b": np.ones(3, np.float32)}
BATCHES = [RNG.normal(size=(8, 4)).astype(np.float32) for _ in range(4)]

MAKERS: dict[str, Callable[..., Any]] = {
    name: make
    for module in (alias, optax.contrib)
    for name, make in vars(module).items()
    if not name.startswith(("_", "scale_by_")) and callable(make) and not inspect.isclass(make)
    if module is optax.contrib or isinstance(make, partial) or make.__module__ == alias.__name__
}
# Their arguments, in addition to a learning rate of 0.1 if they take one.
ARGUMENTS: dict[str, Callable[[Any], Any]] = {
    "differentially_private_aggregate": lambda make: make(1.0, 0.1, key=0),
    "dpsgd": lambda make: make(0.1, 1.0, 0.1, seed=0),
    "mechanize": lambda make: make(optax.sgd(0.1)),
    "noisy_sgd": lambda make: make(0.1, key=0),
    # Of itself it only scales.
    "reduce_on_plateau": lambda make: optax.chain(
        optax.sgd(0.1), make(factor=0.5, patience=1, rtol=0.5)
    ),
    "sam": lambda make: make(
        optax.sgd(0.1), optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    ),
    "schedule_free": lambda make: make(optax.sgd(0.1), 0.1),
    "split_real_and_imaginary": lambda make: make(optax.adam(0.1)),
}
EXTRA_ARGS: Any = (
    optax.GradientTransformationExtraArgs
)  # whose type knows no update with keywords of its own
PER_EXAMPLE = "the gradient of each example"
REFUSED = {
    # its line search computes the loss at several lengths of a step; without the search it trains
    "lbfgs": "value_fn",
    "sophia": "obj_fn",  # differentiates the loss a second time, in random directions
    "hutchinson_estimator_diag_hessian": "obj_fn",  # the gradient estimate of sophia
    "dpsgd": PER_EXAMPLE,  # clips it, before the mean is made
    "differentially_private_aggregate": PER_EXAMPLE,
}
NO_OPTIMIZERS = {"schedule_free_eval_params"}  # reads parameters off a state
# The others train in plain JAX without the loss.
WITH_VALUE = {"polyak_sgd", "momo", "momo_adam", "reduce_on_plateau"}


# One of each kind in the default tier: element by element, a norm, the loss, several states of
# parameters, one optimizer inside of another, the random, and one that reads two dtypes apart.
OF_EACH_KIND = {
    "adam",
    "lamb",
    "reduce_on_plateau",
    "schedule_free",
    "mechanize",
    "noisy_sgd",
    "split_real_and_imaginary",
    "muon",
    "adafactor",
    "sm3",
    "momo",
    "sam",
}


def loss_fn(params: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["w"]) + params["b"] - 0.3) ** 2)


def optimizer_by_name(name: str) -> Any:
    make = MAKERS[name]
    rate = {"learning_rate": 0.1} if "learning_rate" in inspect.signature(make).parameters else {}
    return ARGUMENTS[name](make) if name in ARGUMENTS else make(**rate)


@cache
def expected(name: str) -> Any:
    """The parameters after training with an optimizer of optax in plain JAX."""
    optimizer = (
        optimizer_by_name(name)
        if name in WITH_VALUE
        else optax.GradientTransformation(*optimizer_by_name(name))
    )
    return by_plain_jax(loss_fn, optimizer, PARAMS, BATCHES).params


def over_replicas(
    group: Any,
    optimizer: Any,
    params: Any,
    loss: Any = loss_fn,
    *,
    batches: Any = BATCHES,
    **options: Any,
):
    step = fddp.train_step(loss, optimizer, group=group(REPLICAS), **options)
    state = step.init(params)
    for x in batches:
        state, _ = step(state, x)
    return state


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in OF_EACH_KIND else [pytest.mark.slow])
        for name in sorted(MAKERS.keys() - REFUSED - NO_OPTIMIZERS)
    ],
)
def test_an_optimizer_of_optax_trains_as_in_plain_jax(group, name):
    assert not all(np.array_equal(x, PARAMS[leaf]) for leaf, x in expected(name).items())
    close(over_replicas(group, optimizer_by_name(name), PARAMS).params, expected(name))


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_asks_for_more_than_a_step_has_is_refused_where_the_step_is_made(group, name):
    for optimizer in (
        optimizer_by_name(name),
        optax.chain(optax.clip(1.0), optimizer_by_name(name)),
        fddp.dynamic_scale(optimizer_by_name(name)),
    ):
        with pytest.raises(
            TypeError,
            match=rf"the optimizer's update needs {REFUSED[name]}.* which a step does not have",
        ):
            fddp.train_step(loss_fn, optimizer, group=group(1))


@pytest.mark.parametrize(
    ("optimizer", "argument"),
    [
        (optax.scale_by_backtracking_linesearch(5), "value_fn"),
        (optax.scale_by_zoom_linesearch(5), "value_fn"),
        (optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True), "grad_fn"),
        (EXTRA_ARGS(lambda p: (), lambda u, s, p=None, *, tokens, **_: (u, s)), "tokens"),
    ],
    ids=["backtracking", "zoom", "opaque sam", "the user's own"],
)
def test_so_is_every_other_that_asks_for_a_function(group, optimizer, argument):
    with pytest.raises(
        TypeError, match=rf"needs {argument}, which a step does not have.*linesearch=None"
    ):
        fddp.train_step(loss_fn, optimizer, group=group(1))


def test_what_only_the_parameters_show_is_refused_by_init(group):
    labels = {"layer": "search", "bias": "rest"}  # for other names than those made up
    optimizer = optax.partition({"search": optax.lbfgs(), "rest": optax.sgd(0.1)}, labels)
    step = fddp.train_step(lambda p, x: loss_fn(p["layer"], x), optimizer, group=group(1))
    with pytest.raises(TypeError, match="needs value_fn, which a step does not have"):
        step.init({"layer": PARAMS, "bias": np.ones(2, np.float32)})


def test_lbfgs_without_a_line_search_trains(group):
    optimizer = optax.lbfgs(0.1, linesearch=None)
    expected = by_plain_jax(loss_fn, optimizer, PARAMS, BATCHES).params
    close(over_replicas(group, optimizer, PARAMS).params, expected)


def test_extra_arguments_reach_what_is_wrapped(group):
    for wrap in (
        lambda inner: optax.chain(optax.clip_by_global_norm(1.0), inner),
        lambda inner: optax.MultiSteps(inner, 2),
        lambda inner: fddp.dynamic_scale(inner),
    ):
        optimizer = wrap(optax.polyak_sgd())
        plain = EXTRA_ARGS(optimizer.init, optimizer.update)  # which MultiSteps is not
        expected = by_plain_jax(loss_fn, plain, PARAMS, BATCHES).params
        close(over_replicas(group, optimizer, PARAMS).params, expected)


def test_a_step_that_dynamic_scale_passes_over_leaves_the_extra_state_alone(group):
    inner = optax.chain(
        optax.adam(0.1), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.5)
    )
    bad = np.full_like(BATCHES[0], np.nan)
    got = over_replicas(
        group, fddp.dynamic_scale(inner), PARAMS, batches=[BATCHES[0], bad, *BATCHES[1:]]
    )
    close(got.params, by_plain_jax(loss_fn, inner, PARAMS, BATCHES).params)
    assert int(got.opt_state.inner[0][0].count) == len(BATCHES)
    assert np.isfinite(got.opt_state.inner[1].best_value)


def test_the_loss_that_an_optimizer_sees_is_that_of_all_rows_however_unequal(group):
    weighted = lambda p, x: fddp.Weighted(jnp.mean(p * x), jnp.sum(x))  # noqa: E731
    optimizer = EXTRA_ARGS(
        lambda params: jnp.zeros(()),
        lambda updates, state, params=None, *, value, grad, **_: (updates, value + 0 * grad),
    )
    state = over_replicas(
        group, optimizer, np.float32(1), weighted, batches=[np.array([1.0, 3.0], np.float32)]
    )
    assert float(state.opt_state) == (1 + 9) / 4


def test_lookahead_of_the_fast_gradients_trains_as_in_plain_jax(group):
    optimizer = of_fast_params(optax.lookahead(optax.adam(0.1), 2, 0.5))
    start = optax.LookaheadParams.init_synced(PARAMS)
    ahead = lambda params, x: loss_fn(params.fast, x)  # noqa: E731
    expected = by_plain_jax(ahead, optimizer, start, BATCHES).params
    close(over_replicas(group, optimizer, start, ahead).params, expected)
