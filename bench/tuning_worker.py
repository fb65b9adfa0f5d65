"""One rank of bench/tuning.py and bench/scaling.py: tunes a problem, then runs every cap that was
simulated.

tuning_worker.py BACKEND PROBLEM ROUNDS PATH [CAP ...]
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import optax

import fddp

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.problems import problem
from bench.record import interleave
from bench.turns import staged
from fddp.analysis.tuning.search import CAPS_MB


def main(backend: str, name: str, rounds: int, path: Path, *caps_mb: float) -> None:
    group = fddp.init(backend)
    task = problem(name, seed=group.rank)
    start = time.perf_counter()
    step = fddp.train_step(task.loss_fn, optax.sgd(1e-3), group=group, has_aux=True)
    state = step.init(task.params, model_state=task.model_state)
    tuning = fddp.tune(step, state, task.batch, caps_mb=caps_mb or CAPS_MB)
    duration = time.perf_counter() - start
    assert tuning.link and tuning.pace and tuning.measured_s  # measured here, not estimated
    runs: dict[str, Any] = {}
    for candidate in tuning.candidates:
        cap: Any = candidate.bucket_cap_mb
        runs[str(cap)] = staged(task, group, cap)
    seconds = interleave(runs, rounds=rounds, pause=group.barrier)
    measured = {
        cap: float(np.median(group.all_reduce(values, op="max"))) for cap, values in seconds.items()
    }
    if group.rank == 0:
        result = {
            "link": tuning.link._asdict(),
            "pace": tuning.pace._asdict(),
            "idle_ms": 1e3 * (tuning.idle_s or 0.0),
            "tune_s": duration,
            "chosen_mb": tuning.bucket_cap_mb,
            "deviation": tuning.deviation,
            "eager_over_staged": (tuning.eager_s or tuning.measured_s) / tuning.measured_s,
            "caps": [
                {
                    "cap_mb": candidate.bucket_cap_mb,
                    "nbytes": candidate.nbytes,
                    "stages_ms": [1e3 * stage for stage in candidate.stages],
                    "updates_ms": [1e3 * update for update in candidate.updates],
                    "predicted_ms": 1e3 * candidate.seconds,
                    "measured_ms": 1e3 * measured[str(candidate.bucket_cap_mb)],
                }
                for candidate in tuning.candidates
            ],
        }
        path.write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]), *map(float, sys.argv[5:]))
