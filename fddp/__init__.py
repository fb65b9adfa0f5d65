"""Data-parallel training for JAX, as pure functions.

>>> import fddp, jax.numpy as jnp, optax
>>> step = fddp.train_step(lambda w, x: jnp.mean((x - w) ** 2), optax.sgd(0.5))
>>> state, info = step(step.init(jnp.zeros(())), jnp.ones(8))
>>> float(state.params)
1.0

`help(fddp.train_step)` describes a name.

Start: init, launch, shutdown, Group, mesh_group, mpi_group, round_robin, Communicator, alive, \
preempted, elastic
Train: train_step, TrainStep, Options, TrainState, StateInFlight, StepInfo, value_and_grad, \
evaluate, whole, Checkpoints
Losses: Weighted, Joined, Shared, mixed_precision, from_linen, Linen, from_nnx, Nnx, BatchNorm, \
conv_general_dilated
Optimizers: local_steps, LocalState, dynamic_scale, DynamicScaleState
Data: samples, Stacked, join, gather_rows
Hooks: hooks, Hook, GradBucket, all_reduce
Buckets: grad_order, make_plan, BucketPlan, Bucket, Leaf, pack, unpack
Look inside: check, Checked, measure, Measurement, tune, Tuning, audit, Audit
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fddp import hooks as hooks
from fddp.buckets import Bucket as Bucket
from fddp.buckets import BucketPlan as BucketPlan
from fddp.buckets import Leaf as Leaf
from fddp.buckets import make_plan as make_plan
from fddp.buckets import pack as pack
from fddp.buckets import unpack as unpack
from fddp.comm import Communicator as Communicator
from fddp.comm import Group as Group
from fddp.comm import mesh_group as mesh_group
from fddp.comm import mpi_group as mpi_group
from fddp.comm import round_robin as round_robin
from fddp.data import evaluate as evaluate
from fddp.data import gather_rows as gather_rows
from fddp.data import join as join
from fddp.data import samples as samples
from fddp.hooks import GradBucket as GradBucket
from fddp.hooks import Hook as Hook
from fddp.hooks import all_reduce as all_reduce
from fddp.jaxpr import grad_order as grad_order
from fddp.losses import Joined as Joined
from fddp.losses import Shared as Shared
from fddp.losses import Stacked as Stacked
from fddp.losses import Weighted as Weighted
from fddp.losses import mixed_precision as mixed_precision
from fddp.optim import DynamicScaleState as DynamicScaleState
from fddp.optim import dynamic_scale as dynamic_scale
from fddp.runtime import alive as alive
from fddp.runtime import expect_no_gpu as expect_no_gpu
from fddp.runtime import init as init
from fddp.runtime import launch as launch
from fddp.runtime import preempted as preempted
from fddp.runtime import shutdown as shutdown
from fddp.sharding import whole as whole
from fddp.step import Options as Options
from fddp.step import StateInFlight as StateInFlight
from fddp.step import StepInfo as StepInfo
from fddp.step import TrainState as TrainState
from fddp.training import TrainStep as TrainStep
from fddp.training import train_step as train_step
from fddp.training import value_and_grad as value_and_grad
from fddp.training.local_steps import LocalState as LocalState
from fddp.training.local_steps import local_steps as local_steps

if TYPE_CHECKING:
    from fddp import elastic as elastic
    from fddp.analysis.audit import Audit as Audit
    from fddp.analysis.audit import audit as audit
    from fddp.analysis.mean_over_rows import Checked as Checked
    from fddp.analysis.mean_over_rows import check as check
    from fddp.analysis.measure import Measurement as Measurement
    from fddp.analysis.measure import measure as measure
    from fddp.analysis.tune import Tuning as Tuning
    from fddp.analysis.tune import tune as tune
    from fddp.checkpoints import Checkpoints as Checkpoints
    from fddp.modules.batch_norm import BatchNorm as BatchNorm
    from fddp.modules.convolution import conv_general_dilated as conv_general_dilated
    from fddp.modules.flax import Linen as Linen
    from fddp.modules.flax import Nnx as Nnx
    from fddp.modules.flax import from_linen as from_linen
    from fddp.modules.flax import from_nnx as from_nnx

# Loaded at first use: observers, and modules that need Flax.
_LATER = {
    **dict.fromkeys(("Audit", "audit"), "fddp.analysis.audit"),
    **dict.fromkeys(("Checked", "check"), "fddp.analysis.mean_over_rows"),
    **dict.fromkeys(("Measurement", "measure"), "fddp.analysis.measure"),
    **dict.fromkeys(("Tuning", "tune"), "fddp.analysis.tune"),
    "BatchNorm": "fddp.modules.batch_norm",
    "Checkpoints": "fddp.checkpoints",
    "conv_general_dilated": "fddp.modules.convolution",
    **dict.fromkeys(("Linen", "Nnx", "from_linen", "from_nnx"), "fddp.modules.flax"),
}


def __getattr__(name: str) -> Any:
    if name == "elastic":
        return import_module("fddp.elastic")
    if name not in _LATER:
        raise AttributeError(f"module 'fddp' has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    """Lists the public names alone, for completion: no room and no import."""
    names = (k for k, x in globals().items() if getattr(x, "__module__", "").startswith("fddp."))
    return sorted({"hooks", "elastic", *names, *_LATER})


# At import, since JAX may be used before fddp.init is called.
expect_no_gpu()
del expect_no_gpu
