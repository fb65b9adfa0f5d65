"""An eager step beyond the larger of its computing and its traffic: where does the time go?

    sudo .venv/bin/python bench/bound.py [--problems mlp mlp640 gpt] [--turns 6] [--quick]

On two hosts, one core each, the stages of a step are timed without traffic, and eager steps with
it; the kernel counts the busy time of each core. Steps are then simulated with these times, one
behind the other, with the messages in the best order that a search finds:

  bound      the larger of computing alone and of the bytes over the rate
  order      no launcher beats it: a layer's next forward pass waits for its sum, and the sum for
             its backward pass
  cut        the same with each message in four, in any order
  core       the order's, on a core that also sends: while traffic is under way it computes only in
             the time left over
  own order  the same in the order that fddp has chosen
  measured   eager
"""

import argparse
import json
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import numpy as np

import fddp

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.overlap import CAPS_MB
from bench.overlap_worker import OPTIMIZER, by_itself
from bench.problems import problem
from bench.record import busy_and_idle_s, save, saved
from bench.two_hosts import ask
from fddp.schedules import Communicate, Pace, TaskList, simulate
from fddp.schedules.message_order import leaving_in
from fddp.schedules.tasks import Task
from fddp.schedules.values import Value

RATE = "1gbit"
BYTES_PER_S = 1e9 / 8 * 1448 / 1514  # of an Ethernet frame's bytes so many are a message's
STEPS = 8  # in a turn
SIMULATED = 8  # steps; the last half counts
TRIALS = 600  # of a search
BACKENDS = ("mpi", "gloo")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", nargs="+", default=["mlp", "mlp640", "gpt"])
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="2 turns, nothing is saved")
    args = parser.parse_args()
    for name in args.problems:
        for backend in BACKENDS:
            turns = 2 if args.quick else args.turns
            results = ask(backend, RATE, __file__, "--rank", backend, name, turns)
            against = results["step_ms"]["bound"]
            words = ", ".join(
                f"{key} {ms:.0f} ({ms / against:.2f})" for key, ms in results["step_ms"].items()
            )
            share = results["core_for_traffic"]
            print(
                f"{name:7} {backend:5} {words}; traffic takes {share:.0%} of the core", flush=True
            )
            if not args.quick:
                print(save("bound", saved("bound") | {f"{name}, {backend}": results}))


def rank(backend: str, name: str, turns: int, path: Path) -> None:
    """Times a way without traffic and one with it, in turns; rank 0 simulates and writes."""
    group = fddp.init(backend)
    ways = {
        "alone": Way(by_itself(backend), name, group.rank),
        "eager": Way(group, name, group.rank),
    }
    for way in ways.values():
        way.steps(2)
    times_of_way: dict[str, list[tuple[float, float]]] = {key: [] for key in ways}
    for _ in range(turns):
        for key, way in ways.items():
            group.barrier()
            times_of_way[key].append(way.steps(STEPS))
    seconds = {
        key: group.all_reduce(np.median(np.array(values), axis=0), op="max")
        for key, values in times_of_way.items()
    }
    if group.is_main:
        path.write_text(json.dumps(evaluate(ways["alone"], ways["eager"].tasks, seconds)))


class Way:
    """Eager steps of a group."""

    def __init__(self, group: fddp.Group, name: str, seed: int) -> None:
        task = problem(name, seed=seed)
        cap = CAPS_MB[name]
        caps: Any = {"bucket_cap_mb": cap, "first_bucket_mb": cap, "last_bucket_mb": cap}
        self._step = fddp.train_step(
            task.loss_fn, OPTIMIZER, group=group, has_aux=True, schedule="eager", **caps
        )
        self._state = self._step.init(task.params, model_state=task.model_state)
        self._batch = task.batch
        self._spans: dict[str, list[float]] = {}

    def steps(self, count: int) -> tuple[float, float]:
        """Seconds of a step, and busy seconds of this core in it."""
        (core,) = os.sched_getaffinity(0)
        self._once()
        busy, _ = busy_and_idle_s(core)
        began = perf_counter()
        for _ in range(count):
            self._once()
        duration = perf_counter() - began
        busy = busy_and_idle_s(core)[0] - busy
        jax.block_until_ready(self._state)
        return duration / count, busy / count

    def _once(self) -> None:
        self._state, info = self._step(self._state, self._batch)
        jax.block_until_ready(info.loss)
        for span in self._step.timeline().spans:
            self._spans.setdefault(span.name, []).append(span.seconds)

    @property
    def tasks(self) -> TaskList:
        return self._step.tasks(self._state, self._batch)

    @property
    def seconds(self) -> dict[str, float]:
        """The median of each task."""
        return {name: float(np.median(values)) for name, values in self._spans.items()}

    @property
    def nbytes(self) -> list[int]:
        """The bytes of each message."""
        return [bucket.nbytes for bucket in self._step.plan.buckets]


def evaluate(local: Way, listed: TaskList, seconds: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Milliseconds of a step: measured and simulated ones."""
    (lone, lone_busy), (measured, busy) = (seconds[key].tolist() for key in ("alone", "eager"))
    sends = {f"bucket {k}": size / BYTES_PER_S for k, size in enumerate(local.nbytes)}
    traffic = sum(sends.values())
    seconds_of = local.seconds | sends
    computed = sum(
        seconds_of.get(task.name, 0.0) for task in listed.tasks if not isinstance(task, Communicate)
    )
    seconds_of |= {
        name: s * lone / computed for name, s in seconds_of.items() if name not in sends
    }  # Python's share, spread
    share = min(0.95, max(0.0, (busy - lone_busy) / traffic))
    core = Pace(1 - share, 1.0)
    in_four = seconds_of | {
        f"{name} {piece}": s / 4 for name, s in sends.items() for piece in range(4)
    }
    bounds = {
        "computing": lone,
        "traffic": traffic,
        "bound": max(lone, traffic),
        "order": best(listed, seconds_of, Pace()),
        "cut": best(in_pieces(listed, 4), in_four, Pace()),
        "core": best(listed, seconds_of, core),
        "own order": period(listed, listed.messages, seconds_of, core),
        "measured": measured,
    }
    return {
        "step_ms": {key: round(1e3 * s, 1) for key, s in bounds.items()},
        "core_for_traffic": round(share, 3),
        "busy_ms": [round(1e3 * lone_busy, 1), round(1e3 * busy, 1)],
    }


def best(listed: TaskList, seconds: Mapping[str, float], pace: Pace) -> float:
    """The shortest period of steps that a search over the orders of messages finds."""
    draw = random.Random(0)
    order = list(listed.messages)
    least = period(listed, order, seconds, pace)
    for _ in range(TRIALS):
        candidate = list(order)
        candidate.insert(draw.randrange(len(order)), candidate.pop(draw.randrange(len(order))))
        duration = period(listed, candidate, seconds, pace)
        if duration <= least:
            least = duration
            order = candidate
    return least


def period(
    listed: TaskList, order: Sequence[Communicate], seconds: Mapping[str, float], pace: Pace
) -> float:
    """Seconds of a step amid many others, if each starts its ready work while the last one's sums
    arrive."""
    tasks = list[Task]()
    carried = dict[Value, Value]()
    for number in range(SIMULATED):
        numbered = partial(_at, number)
        once = [
            _renamed(task, number, carried, numbered) for task in leaving_in(listed, order).tasks
        ]
        carried = {value.replaces: numbered(value) for value in listed.results if value.replaces}
        tasks += once
    seconds_of = {
        f"{number} {name}": s for number in range(SIMULATED) for name, s in seconds.items()
    }
    line = simulate(tasks, seconds_of, pace, queue=lambda task: task.kind)
    last = max(
        (span for span in line.compute if span.name.startswith(f"{SIMULATED - 1} ")),
        key=lambda span: span.end,
    )
    name = last.name.split(" ", 1)[1]
    end_of = {span.name: span.end for span in line.compute}
    half = SIMULATED // 2
    return (last.end - end_of[f"{half - 1} {name}"]) / half


def in_pieces(listed: TaskList, pieces: int) -> TaskList:
    """A list with its messages in pieces; readers of a sum read all of them."""

    def cut(task: Task) -> list[Task]:
        if not isinstance(task, Communicate):
            reads = [
                piece
                for value in task.reads
                for piece in (pieces_of(value) if value.kind == "sum" else [value])
            ]
            return [task._replace(reads=tuple(reads))]
        (sum_, *_) = task.writes
        return [
            task._replace(name=f"{task.name} {p}", writes=(piece,))
            for p, piece in enumerate(pieces_of(sum_))
        ]

    def pieces_of(value: Value) -> list[Value]:
        return [Value(value.kind, value.number, str(p)) for p in range(pieces)]

    return listed._replace(tasks=tuple(piece for task in listed.tasks for piece in cut(task)))


def _renamed(
    task: Task, number: int, carried: Mapping[Value, Value], numbered: Callable[[Value], Value]
) -> Task:
    reads = (carried[value] if value in carried else numbered(value) for value in task.reads)
    return task._replace(
        name=f"{number} {task.name}", reads=tuple(reads), writes=tuple(map(numbered, task.writes))
    )


def _at(number: int, value: Value) -> Value:
    return Value(f"{number} {value.kind}", value.number, value.path)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))
    else:
        main()
