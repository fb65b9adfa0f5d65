"""Tunes a model by its name: what `python -m fddp tune` calls."""

from typing import Any

import jax
import optax

from fddp.analysis.tuning.search import Tuning, tune_here
from fddp.runtime import group_of


def tune_model(module: Any, preset: str, rows: int = 8, **options: Any) -> Tuning:
    """Tunes a model by name, under SGD and with made-up rows.

    Args:
      module: has `PRESETS`, `init(model, key, batch)`, `batch(model, rows, seed)` and `loss_fn(model)`, as models/.
      preset: one of its `PRESETS`.
      rows: of each process.
      **options: of `fddp.tune`.

    Returns:
      The tuning.

    Raises:
      ValueError: there is no such preset.
    """
    if preset not in module.PRESETS:
        raise ValueError(f"{module.__name__} has presets {', '.join(module.PRESETS)}, got {preset!r}.")
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
