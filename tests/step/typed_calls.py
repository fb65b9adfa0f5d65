"""Calls as a user writes them, for a type checker to read; nothing runs them.

Each call that is wrong has a comment that lets its error pass. A comment that is not needed is an
error, too.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=error

from typing import Any

import jax.numpy as jnp
import optax

import fddp
from fddp import hooks


def loss_fn(w: Any, batch: Any) -> Any:
    return jnp.mean((batch - w) ** 2)


SGD = optax.sgd(0.1)
OPTIONS: dict[str, Any] = {"bucket_cap_mb": 4}  # for example read from a file

fddp.train_step(loss_fn, SGD)
fddp.train_step(loss_fn, SGD, **OPTIONS)
fddp.train_step(
    loss_fn, SGD, bucket_cap_mb=4, first_bucket_mb=0.5, last_bucket_mb=0, order="reverse"
)
fddp.train_step(loss_fn, SGD, bucket_cap_mb=[1, 4, 25])
fddp.train_step(
    loss_fn, SGD, group=fddp.init(), has_aux=True, accumulation_steps=4, find_unused_parameters=True
)
fddp.train_step(
    loss_fn,
    SGD,
    hook=hooks.bf16(),
    ignore=lambda path: path.endswith("bias"),
)
fddp.train_step(
    loss_fn,
    SGD,
    broadcast_buffers="mean",
    skip_nonfinite=True,
    check_replicas_every=100,
    donate=False,
)
fddp.train_step(loss_fn, SGD, schedule="after", shard="state", virtual_replicas=None)
fddp.value_and_grad(loss_fn, bucket_cap_mb=4, virtual_replicas=8)

fddp.train_step(loss_fn, SGD, bucket_cap=4)  # pyright: ignore[reportCallIssue]
fddp.train_step(loss_fn, SGD, static_graph=True)  # pyright: ignore[reportCallIssue]
fddp.train_step(loss_fn, SGD, bucket_cap_mb="4")  # pyright: ignore[reportArgumentType]
fddp.train_step(loss_fn, SGD, order="forward")  # pyright: ignore[reportArgumentType]
fddp.train_step(loss_fn, SGD, accumulation_steps=1.5)  # pyright: ignore[reportArgumentType]
fddp.train_step(loss_fn, SGD, hook=hooks.bf16)  # pyright: ignore[reportArgumentType]
fddp.train_step(loss_fn, SGD, ignore="bias")  # pyright: ignore[reportArgumentType]
fddp.train_step(loss_fn, SGD, broadcast_buffers="sum")  # pyright: ignore[reportArgumentType]
fddp.train_step(loss_fn, SGD, schedule="later")  # pyright: ignore[reportArgumentType]
fddp.train_step(loss_fn, SGD, shard="parameters")  # pyright: ignore[reportArgumentType]
fddp.value_and_grad(loss_fn, bucket_cap=4)  # pyright: ignore[reportCallIssue]
fddp.value_and_grad(loss_fn, virtual_replicas="8")  # pyright: ignore[reportArgumentType]
