"""Shapes of a model that the command line names: `models.gpt:tiny`.

Its module must offer `PRESETS`, `init(model, key, batch)`, `batch(model, rows)` and
`loss_fn(model)`, like those in models/.
"""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import optax

from fddp.comm import Group
from fddp.step import TrainState
from fddp.training import TrainStep, train_step

NEEDED = ("PRESETS", "init", "batch", "loss_fn")


class Workload(NamedTuple):
    """A loss with metrics, and its inputs or their shapes."""

    loss_fn: Callable[..., Any]
    params: Any
    model_state: Any
    batch: Any

    def step(self, group: Group, **options: Any) -> tuple[TrainStep, TrainState]:
        """Returns an AdamW step on this workload, and the shapes of its first state."""
        step = train_step(self.loss_fn, optax.adamw(1e-3), group=group, has_aux=True, **options)
        return step, step.shapes(self.params, model_state=self.model_state)


def read_workload(name: str, rows: int) -> Workload:
    """Returns the shapes of module:preset, with `rows` rows; computes only the synthetic batch."""
    module, preset = read_model(name)
    model = module.PRESETS[preset]
    batch = module.batch(model, rows)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    params, model_state = jax.eval_shape(lambda: module.init(model, jax.random.key(0), batch))
    return Workload(module.loss_fn(model), params, model_state, batch)


def make_workload(name: str, rows: int, seed: int) -> Workload:
    """Returns module:preset with its values and `rows` rows, drawn with the seed."""
    module, preset = read_model(name)
    model = module.PRESETS[preset]
    batch = module.batch(model, rows, seed)
    params, model_state = module.init(model, jax.random.key(0), batch)
    return Workload(module.loss_fn(model), params, model_state, batch)


def read_model(name: str) -> tuple[ModuleType, str]:
    """Splits module:preset into the imported module and the preset's name."""
    path, colon, preset = name.partition(":")
    if not colon or "/" in path or path.endswith(".py"):
        raise ValueError(f"a model is named module:preset, such as models.gpt:tiny; got {name!r}.")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        words = f"{error}; {path} is searched from the current folder, {Path.cwd()}."
        raise ValueError(words) from error
    missing = [name for name in NEEDED if not hasattr(module, name)]
    if missing:
        raise ValueError(
            f"{path} has no {', '.join(missing)}; a model's module offers {', '.join(NEEDED)}."
        )
    if preset not in module.PRESETS:
        raise ValueError(f"{path} has the presets {', '.join(module.PRESETS)}, none is {preset!r}.")
    return module, preset
