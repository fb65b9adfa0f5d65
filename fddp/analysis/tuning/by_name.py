"""Tunes a model by its name, for `python -m fddp tune`."""

from types import ModuleType
from typing import Any

import jax
import optax

from fddp.analysis.tuning.search import Tuning, tune_here
from fddp.runtime import group_of


def tune_model(module: ModuleType, preset: str, rows: int = 8, **options: Any) -> Tuning:
    """Tunes a preset of a model's module with SGD and `rows` synthetic rows per process.

    The module offers the names of `fddp.analysis.workload.NEEDED`. The options are those of
    `fddp.tune`. Raises ValueError for an unknown preset.
    """
    if preset not in module.PRESETS:
        raise ValueError(
            f"{module.__name__} has presets {', '.join(module.PRESETS)}, got {preset!r}."
        )
    model = module.PRESETS[preset]
    group = group_of("tune_model", options.pop("group", None))
    batch = module.batch(model, rows, group.rank)
    params, model_state = module.init(model, jax.random.key(0), batch)
    return tune_here(
        module.loss_fn(model),
        optax.sgd(1e-3),
        params,
        batch,
        group=group,
        has_aux=True,
        model_state=model_state,
        **options,
    )
