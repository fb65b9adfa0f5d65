"""A sample of the table of `cases.py` on each kind of job, which together hold all of it."""

from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from itertools import cycle
from typing import Any

import jax
import numpy as np
from cases import TABLE, drawn_of
from on_ranks.claims import claim, same_on_all_ranks
from processes import JOBS, QUICK_JOBS

import fddp
from bench import plain
from bench.configurations import Tolerance, step_of
from bench.drawn import Call, Drawn, batch_of, buffers, keys

# A job of the tier `slow` holds twice as many cases as one of the default tier.
SHARES = [*JOBS, *(job for job in JOBS if job not in QUICK_JOBS)]


@claim()
def a_sample_of_all_cases_trains_as_by_plain_jax(group: fddp.Group):
    """In place of "after", which differs from "overlap" in the program alone, "eager"."""
    for number, job in zip(range(len(TABLE)), cycle(SHARES)):
        if job != (group.backend, group.size):
            continue
        drawn = drawn_of(number, group.size)
        schedule = {"after": "eager"}.get(drawn.options["schedule"], "overlap")
        with jax.enable_x64(True), redirect_stderr(StringIO()):  # it says that a step was skipped
            step = step_of(replace(drawn, options=drawn.options | {"schedule": schedule}), group)
            state = step.init(drawn.params, model_state=buffers(drawn), rng=keys(drawn))
            reports = plain.train(drawn)
            losses = list[Any]()
            for call in drawn.calls:
                run = step if call.kind == "step" else step.no_sync
                state, info = run(state, mine(group, drawn, call))
                losses += [info.loss] if call.kind == "step" else []
            params = fddp.whole(state, group=group).params
            close = Tolerance(drawn, len(losses))
            close(f"case {number}: params", jax.device_get(params), reports[-1].params)
            close(f"case {number}: loss", losses, [report.loss for report in reports])
            assert same_on_all_ranks(group, params), number


def mine(group: fddp.Group, drawn: Drawn, call: Call) -> Any:
    """This rank's rows of a call, or its batches."""
    if drawn.rows == "stacked":
        each = len(call.batches) // group.size
        return fddp.Stacked(call.batches[group.rank * each :][:each])
    return jax.tree.map(lambda x: np.split(x, group.size)[group.rank], batch_of(drawn, call))
