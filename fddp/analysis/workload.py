"""The workload that a command line names: `module:function`, or one of `fddp.analysis.workloads`.

The function takes no arguments and returns `(loss_fn, params, batch)`, or `(loss_fn, params, batch,
model_state)`, as for `fddp.train_step` and `step.init`. Commands draw the rows of all replicas from
the batch. For a model too large for this host, commands that only compile also take params that are
`jax.ShapeDtypeStruct`s.

A module that defines `PRESETS`, `init(model, key, batch)`, `batch(model, rows, seed)` and
`loss_fn(model)`, like those in models/, has a workload for each preset: `module:preset`.
"""

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jaxtyping import PyTree

from fddp.analysis import workloads
from fddp.comm import Group
from fddp.step import TrainState
from fddp.training import TrainStep, train_step

OPTIMIZER = "optax.adamw(1e-3)"
PROTOCOL = (
    "a workload is named module:function, such as train:workload, and the function returns "
    "(loss_fn, params, batch); fddp has 'mlp' and 'transformer'"
)
ROWS = 8  # of a replica, for a preset


class Workload(NamedTuple):
    """A loss, its parameters or their shapes, and the rows of some replicas."""

    loss_fn: Callable[..., Any]
    params: Any
    batch: Any
    model_state: Any = None
    has_aux: bool = True

    def step(self, group: Group, **options: Any) -> TrainStep:
        """Makes a step of this workload with the optimizer `OPTIMIZER`."""
        optimizer = optax.adamw(1e-3)
        return train_step(self.loss_fn, optimizer, group=group, has_aux=self.has_aux, **options)

    def init(self, step: TrainStep) -> TrainState:
        """Makes the first state of a step of this workload."""
        return step.init(self.params, model_state=self.model_state)

    def forms(self, group: Group, **options: Any) -> tuple[TrainStep, TrainState, PyTree]:
        """Makes a step, with the shapes of its first state and of the batch."""
        step = self.step(group, **options)
        state = step.shapes(self.params, model_state=self.model_state)
        return step, state, jax.tree.map(_form, self.batch)


def find_workload(name: str) -> Callable[..., Workload]:
    """Returns (rows=None, replicas=1, seed=0, shapes=False) → the workload of that name.

    `rows` is the number of a replica's rows; None: all rows of the function's batch. With `shapes`
    the parameters of a preset are not computed.
    """
    path, _, attribute = name.partition(":")
    if name in workloads.__all__:
        path = workloads.__name__
        attribute = name
    if not attribute or "/" in path or path.endswith(".py"):
        raise ValueError(f"{PROTOCOL}; got {name!r}.")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        words = f"{error}; {path} is searched from the current folder, {Path.cwd()}."
        raise ValueError(words) from error
    presets = getattr(module, "PRESETS", {})
    function = getattr(module, attribute, None)
    if attribute not in presets and not callable(function):
        also = f"; its presets are {', '.join(presets)}" if presets else ""
        raise ValueError(f"{path} has no function {attribute!r}{also}: {PROTOCOL}.")

    def make(
        rows: int | None = None, replicas: int = 1, seed: int = 0, *, shapes: bool = False
    ) -> Workload:
        if attribute in presets:
            size = (rows or ROWS) * replicas
            return _of_preset(module, presets[attribute], size, seed, shapes=shapes)
        return _of_function(name, function, rows, replicas, seed)

    return make


def _of_preset(module: Any, model: Any, rows: int, seed: int, *, shapes: bool) -> Workload:
    batch = module.batch(model, rows, seed)
    init = partial(module.init, model)
    if shapes:
        init = partial(jax.eval_shape, init)
    params, model_state = init(jax.random.key(0), jax.tree.map(_form, batch))
    return Workload(module.loss_fn(model), params, batch, model_state)


def _of_function(name: str, function: Any, rows: int | None, replicas: int, seed: int) -> Workload:
    result = function()
    if not isinstance(result, tuple) or len(result) not in (3, 4) or not callable(result[0]):
        raise ValueError(f"{name} returned {type(result).__name__} {result!r:.60}: {PROTOCOL}.")
    workload = Workload(*result)
    sizes = {x.shape[0] if getattr(x, "ndim", 0) else 0 for x in jax.tree.leaves(workload.batch)}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(f"{name}: the leaves of its batch need equally many rows, one or more.")
    (size,) = sizes
    # Different rows on each replica: sums of equal numbers would be exact in any order.
    chosen = np.random.default_rng(seed).integers(size, size=(rows or size) * replicas)
    has_aux = True
    if workload.model_state is None:
        value = jax.eval_shape(workload.loss_fn, workload.params, workload.batch)
        has_aux = type(value) is tuple  # `Weighted` is a subclass
    batch = jax.tree.map(lambda x: np.asarray(x)[chosen], workload.batch)
    return workload._replace(batch=batch, has_aux=has_aux)


def _form(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
