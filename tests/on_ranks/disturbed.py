"""Steps whose threads are disturbed have the bits of steps that are not."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import jax
import numpy as np
import pytest
from on_ranks.claims import claim
from on_ranks.one_program import ADAM, batches, loss, mine, net
from trees import equal

import fddp
from fddp.comm.program_lane import ProgramLane

STEPS = 100
OPTIONS: dict[str, dict[str, Any]] = {
    "overlap": {},
    "after": {"schedule": "after"},
    "eager": {"schedule": "eager"},
    "eager shards": {"schedule": "eager", "shard": "state"},
    "shards, micro-batches": {"shard": "optimizer", "accumulation_steps": 2},
    "a hook with a memory": {"hook": fddp.hooks.quantize(block=8)},
}


@claim(sizes=(2,), quick=())
def steps_with_sleeps_in_all_threads_have_the_bits_of_steps_without(group: fddp.Group):
    rows = batches(group, STEPS)
    for name, options in OPTIONS.items():
        calm = trained(group, rows, options)
        with disturbed(Random(f"{name} {group.rank}")):
            shaken = trained(group.subgroup(range(group.processes)), rows, options)
        equal(shaken, calm)


def trained(group: fddp.Group, rows: np.ndarray, options: dict[str, Any]) -> Any:
    """The parameters after a step with each batch."""
    step = fddp.train_step(loss, ADAM, group=group, bucket_cap_mb=0, **options)
    state = step.init(net(layers=2))
    for batch in rows:
        state, _ = step(state, mine(group, batch))
    return jax.device_get(fddp.whole(state, group=group).params)


@contextmanager
def disturbed(draw: Random) -> Iterator[None]:
    """Lanes that are made now sleep around each message and in each done, while another thread
    holds the GIL again and again."""
    make = ProgramLane.__init__
    ended = threading.Event()

    def sleep() -> None:
        time.sleep(draw.choice((0, 0, 0, 1e-4, 2e-3)))

    def sending(send: Callable[..., None], *message: Any) -> None:
        sleep()
        send(*message)
        sleep()

    def awaited(token: np.ndarray) -> np.ndarray:
        sleep()
        return token

    def done(call: Callable[..., Any], tokens: Sequence[jax.Array], *rest: Any) -> Any:
        token = jax.pure_callback(awaited, jax.ShapeDtypeStruct((), tokens[0].dtype), tokens[0])
        return call([token, *tokens[1:]], *rest)

    def init(lane: Any, size: int, token: Any, sends: Sequence[Any], journal: Any) -> None:
        make(lane, size, token, [partial(sending, send) for send in sends], journal)
        lane.carrier = replace(lane.carrier, done=partial(done, lane.carrier.done))

    def hold() -> None:
        while not ended.wait(draw.random() / 50):
            sum(range(draw.randrange(1_000_000)))  # a call in C

    holder = threading.Thread(target=hold)
    holder.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProgramLane, "__init__", init)
        try:
            yield
        finally:
            ended.set()
            holder.join()
