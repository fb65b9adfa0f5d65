"""A model by its name on the command line, as shapes: `models.gpt:tiny`.

Any module will do that offers `PRESETS`, `init(model, key, batch)`, `batch(model, rows)` and `loss_fn(model)`, as those
in models/ do.
"""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax

from fddp.comm import Group
from fddp.step import TrainState
from fddp.training import TrainStep, train_step

NEEDED = ("PRESETS", "init", "batch", "loss_fn")


class Workload(NamedTuple):
    """A loss with metrics, and the shapes of what it takes."""

    loss_fn: Callable[..., Any]
    params: Any
    model_state: Any
    batch: Any
    """Rows of all replicas."""

    def step(self, group: Group, **options: Any) -> tuple[TrainStep, TrainState]:
        """An AdamW step on this workload, and the shapes of its first state.

        Args:
          group: the replicas.
          **options: fields of `fddp.Options`.

        Returns:
          The step and the state, of `jax.ShapeDtypeStruct`s.
        """
        step = train_step(self.loss_fn, optax.adamw(1e-3), group=group, has_aux=True, **options)
        return step, step.shapes(self.params, model_state=self.model_state)


def read_workload(name: str, rows: int) -> Workload:
    """Finds a model by name, as shapes; nothing is computed but the synthetic batch.

    Args:
      name: module:preset, "models.gpt:tiny".
      rows: rows of the batch, over all replicas.

    Returns:
      The workload.

    Raises:
      ValueError: as `read_model`.
    """
    module, preset = read_model(name)
    model = module.PRESETS[preset]
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), module.batch(model, rows))
    params, model_state = jax.eval_shape(lambda: module.init(model, jax.random.key(0), batch))
    return Workload(module.loss_fn(model), params, model_state, batch)


def read_model(name: str) -> tuple[Any, str]:
    """Finds a module that offers models, and one of its presets.

    Args:
      name: module:preset, "models.gpt:tiny"; the module is looked for in the current folder too.

    Returns:
      The module and the preset's name.

    Raises:
      ValueError: there is no such module or preset, or the module lacks something.
    """
    path, colon, preset = name.partition(":")
    if not colon or "/" in path or path.endswith(".py"):
        raise ValueError(f"a model is named module:preset, models.gpt:tiny say; got {name!r}.")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        raise ValueError(f"{error}; {path} is looked for from this folder, {Path.cwd()}.") from error
    missing = [needed for needed in NEEDED if not hasattr(module, needed)]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)}; a model's module offers {', '.join(NEEDED)}.")
    if preset not in module.PRESETS:
        raise ValueError(f"{path} has the presets {', '.join(module.PRESETS)}, none is {preset!r}.")
    return module, preset
