"""Compiles programs for reading only."""

import math
from typing import Any

import jax
from jax._src import config


def compile_to_read(lowered: Any, options: dict[str, Any] | None = None) -> jax.stages.Compiled:
    """Compiles a program to read its text or memory, such as a program for absent GPUs.

    JAX would write a program for absent devices into its compilation cache, and warn at each later
    run that it cannot be loaded. Relies on the backend that a lowered program names.
    """
    if lowered._lowering.compile_args["backend"].runtime_type == "compile_only_runtime":
        return _compile_unsaved(lowered, options)
    return lowered.compile(compiler_options=options)


def _compile_unsaved(
    lowered: jax.stages.Lowered, options: dict[str, Any] | None = None
) -> jax.stages.Compiled:
    """Compiles a program without writing it into JAX's compilation cache."""
    with config.persistent_cache_min_compile_time_secs(math.inf):
        return lowered.compile(compiler_options=options)
