"""A model of models/ with arrays: its loss, its first parameters, and a batch that lies on the
device."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

import fddp


class Workload(NamedTuple):
    """A loss with metrics, first parameters, and rows."""

    loss_fn: Callable[..., Any]
    params: Any
    model_state: Any
    batch: Any

    def step(
        self, optimizer: optax.GradientTransformation, **options: Any
    ) -> tuple[fddp.TrainStep, fddp.TrainState]:
        """A step and its first state; `options` as `fddp.train_step` takes them."""
        step = fddp.train_step(self.loss_fn, optimizer, has_aux=True, **options)
        return step, step.init(self.params, model_state=self.model_state)


def read(name: str, replicas: int = 1) -> Workload:
    """Makes a workload of so many replicas, from module:preset:rows of one; preset@layers has as
    many layers."""
    module, model, rows = _model(name, replicas)
    batch = jax.device_put(module.batch(model, rows))
    params, model_state = jax.jit(lambda: module.init(model, jax.random.key(0), batch))()
    return Workload(module.loss_fn(model), params, model_state, batch)


def shapes(name: str, replicas: int = 1) -> Workload:
    """Makes a workload like `read`, with shapes in place of arrays."""
    module, model, rows = _model(name, replicas)
    form = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)  # noqa: E731
    batch = jax.tree.map(form, module.batch(model, rows))
    params, model_state = jax.eval_shape(lambda x: module.init(model, jax.random.key(0), x), batch)
    return Workload(module.loss_fn(model), params, model_state, batch)


def _model(name: str, replicas: int) -> tuple[Any, Any, int]:
    model_name, _, rows = name.rpartition(":")
    preset_name, _, layers = model_name.partition("@")
    module_name, preset = preset_name.split(":")
    module = importlib.import_module(f"models.{module_name}")
    model = module.PRESETS[preset].clone(**({"layers": int(layers)} if layers else {}))
    return module, model, replicas * int(rows)
