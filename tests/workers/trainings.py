"""Trainings of every model in plain JAX and optax, the truth for replicas; this file does not use
the library."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models import bert, gpt, mlp, resnet

STEPS = 5
# of a joined batch: equally many for two, three, four and eight replicas, each in two micro-batches
ROWS = 48
# XLA would spend seconds on programs that run once or five times.
UNOPTIMIZED = {"xla_backend_optimization_level": 0}

MODELS: dict[str, tuple[Any, Any]] = {
    "mlp": (mlp, mlp.PRESETS["tiny"]),
    "resnet-gn": (resnet, resnet.PRESETS["tiny-gn"]),
    "resnet-bn": (resnet, resnet.PRESETS["tiny"]),
    "bert": (bert, bert.PRESETS["tiny"].clone(layers=1, context=8)),
    "gpt": (gpt, gpt.PRESETS["tiny"].clone(layers=1, context=8)),
}


class Rule(NamedTuple):
    """The options of a model's training, and the tolerance between two ways of it."""

    optimizer: optax.GradientTransformation
    dtype: Any
    tolerance: float


RULES = {
    "sgd": Rule(optax.sgd(0.1, momentum=0.9), jnp.float32, 2e-5),
    # Where a gradient is zero in theory, Adam makes full steps of its rounding noise; in float64
    # these show less.
    "adamw": Rule(optax.adamw(1e-3), jnp.float64, 1e-9),
}


class Result(NamedTuple):
    """The result of a training."""

    params: Any
    model_state: Any
    losses: Any
    """The loss of each step, before its update."""


@contextmanager
def precision(rule: str) -> Iterator[None]:
    """Allows float64 in all threads of this process if the rule has it."""
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", RULES[rule].dtype == jnp.float64)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def linen(model: str, rule: str, axis_name: str | None = None) -> Any:
    """The model in the rule's dtype; with BatchNorm over the replicas of `axis_name`."""
    _, module = MODELS[model]
    module = module.clone(dtype=RULES[rule].dtype, param_dtype=RULES[rule].dtype)
    return module.clone(axis_name=axis_name) if axis_name else module


def loss_fn(model: str, rule: str, axis_name: str | None = None) -> Callable[..., Any]:
    return MODELS[model][0].loss_fn(linen(model, rule, axis_name))


def batch(model: str, step: int) -> Any:
    """The joined batch of a step; another one for each."""
    package, module = MODELS[model]
    return package.batch(module, ROWS, seed=step)


@cache
def start(model: str, rule: str) -> tuple[Any, Any]:
    """Parameters and buffers before the first step, as numpy arrays."""
    package = MODELS[model][0]
    rows = batch(model, 0)
    with precision(rule):
        init = jax.jit(
            lambda key: package.init(linen(model, rule), key, rows), compiler_options=UNOPTIMIZED
        )
        return jax.device_get(init(jax.random.key(0)))


@cache
def on_one_device(model: str, rule: str) -> Result:
    """The training on one device that sees the joined batch."""
    with precision(rule):
        return _trained(loss_fn(model, rule), RULES[rule].optimizer, model, *start(model, rule))


def _trained(
    loss: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    model: str,
    params: Any,
    model_state: Any,
) -> Result:
    def joined(params: Any, model_state: Any, rows: Any) -> tuple[Any, Any]:
        if model_state is None:
            return loss(params, rows)[0], None
        value, (model_state, _) = loss(params, rows, model_state=model_state)
        return value, model_state

    @partial(jax.jit, compiler_options=UNOPTIMIZED)
    def step(params: Any, model_state: Any, opt_state: Any, rows: Any) -> Any:
        (value, model_state), grads = jax.value_and_grad(joined, has_aux=True)(
            params, model_state, rows
        )
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), model_state, opt_state, value

    opt_state = optimizer.init(params)
    losses = []
    for number in range(STEPS):
        params, model_state, opt_state, value = step(
            params, model_state, opt_state, batch(model, number)
        )
        losses.append(value)
    return jax.device_get(Result(params, model_state, jnp.stack(losses)))


def relative_error(result: Result, expected: Result) -> float:
    """The largest max|a - b| / max|b| of any leaf: relative to the leaf, for single elements may be
    near zero.

    If a leaf must be zero and is not, its error is infinite; a NaN makes the error NaN.
    """

    def error(a: Any, b: Any) -> float:
        off = float(np.max(np.abs(a - b)))
        size = float(np.max(np.abs(b)))
        return off / size if size else off and np.inf

    return float(np.max(jax.tree.leaves(jax.tree.map(error, result, expected))))
