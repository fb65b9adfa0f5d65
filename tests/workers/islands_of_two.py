"""Two islands of two replicas, with a quorum of one, merge in a written order: `islands_of_two.py
FOLDER CASE ...`.

Prints the shared parameters of each case, as JSON. An island is two ranks, or one with two devices.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import optax
from problems import layer

import fddp
from fddp.islands.merge_log import Merged, read_log

RATE = 0.1
# The island of each merge.
ORDER = (0, 0, 1, 0, 1)
# Options of local_steps, and of the step; "after" merges all islands meet, and go on from a
# checkpoint.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "whole": ({}, {"schedule": "fused"}),
    "buckets": ({"mix": 0.25}, {"schedule": "auto", "bucket_cap_mb": 0}),
    "in shards": ({"mix": 0.25}, {"shard": "state"}),
    "start": ({"start": 2}, {"schedule": "fused"}),
    "restored": ({}, {"schedule": "fused"}),
}
MET = 3  # merges before the meeting of "restored"


def draws(island: int, count: int) -> list[np.ndarray]:
    """Batches of an island: their sizes differ, so that its steps weigh differently."""
    draw = np.random.default_rng(island)
    return [draw.normal(size=(4 + 4 * (k % 2), 3)) for k in range(count)]


def first_params() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(7)
    return {"b": draw.normal(size=5), "w": draw.normal(size=(3, 5))}


def main(folder: Path, *names: str) -> None:
    group = fddp.init()
    results = {name: trained(group, folder / name, name, *CASES[name]) for name in names}
    print(json.dumps(results))


def trained(
    group: fddp.Group, folder: Path, name: str, local: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """The shared parameters after all merges."""
    if group.is_main:
        folder.mkdir()
    group.barrier()
    outer = optax.sgd(0.7, momentum=0.9)
    chosen: Any = {
        "outer": outer,
        "every": 2,
        "island": 2,
        "quorum": 1,
        "log": folder / "log",
        **local,
    }

    def island_step() -> fddp.TrainStep:
        return fddp.train_step(
            layer, fddp.local_steps(optax.sgd(RATE), **chosen), group=group, **options
        )

    step = island_step()
    state = step.init(first_params())
    island_size = group.processes // 2  # ranks of an island
    island, place = divmod(group.rank, island_size)
    start = chosen.get("start", 0)
    batches_of_island = iter(
        [
            np.split(rows, island_size)[place]
            for rows in draws(island, start + 2 * ORDER.count(island))
        ]
    )
    for _ in range(start):
        state, _ = step(state, next(batches_of_island))
    for number, turn in enumerate(ORDER):
        if name == "restored" and number == MET:
            state = fddp.meet(step, state)
            with fddp.Checkpoints(folder / "saved", step) as checkpoints:
                checkpoints.save(state, now=True)
            step = island_step()
            with fddp.Checkpoints(folder / "saved", step) as checkpoints:
                state, _ = checkpoints.restore(step.init(first_params()))
        if turn == island:
            state, _ = step(
                state, next(batches_of_island)
            )  # the first one of all islands is settled together
            wait(folder / f"{number - 1}")
            state, _ = step(state, next(batches_of_island))
            (folder / f"{number}").touch()
    state = fddp.meet(step, state)
    log = [line.islands for line in read_log(folder / "log") if isinstance(line, Merged)]
    assert log == [(turn,) for turn in ORDER], log
    shared = {key: x.parts.addressable_shards[0].data for key, x in state.opt_state.shared.items()}
    return {key: np.asarray(x).tolist() for key, x in shared.items()}


def wait(path: Path) -> None:
    while not (path.exists() or path.name == "-1"):
        time.sleep(0.005)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
