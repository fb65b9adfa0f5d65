"""Measurements side by side, saved with their provenance.

Machines are shared and noisy: compared functions run interleaved in one process, and a ratio is the
median over rounds of the ratios within a round.
"""

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fddp.runtime import installed

RESULTS = Path(__file__).with_name("results")
PACKAGES = ("jax", "flax", "optax", "mpi4py", "mpi4jax", "mpich")


def question(description: str | None, quick: str) -> argparse.ArgumentParser:
    """Makes the arguments of a question; `quick` says what it does with `--quick`."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=form)
    parser.add_argument("--quick", action="store_true", help=f"{quick}; nothing is saved")
    return parser


def interleave(
    runs: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    warm_up: int = 2,
    pause: Callable[[], Any] = lambda: None,
) -> dict[str, np.ndarray]:
    """Times several functions in turn, and returns the seconds of each round by name.

    `pause` is called before each run: a barrier between ranks.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(warm_up + rounds):
        for name, run in runs.items():
            pause()
            start = time.perf_counter()
            jax.block_until_ready(run())
            if turn >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return {name: np.array(values) for name, values in seconds.items()}


def summary(seconds: np.ndarray) -> dict[str, float]:
    """Median and quartiles, in milliseconds."""
    low, middle, high = 1e3 * np.percentile(seconds, (25, 50, 75))
    return {
        "median_ms": round(middle, 3),
        "quartile_1_ms": round(low, 3),
        "quartile_3_ms": round(high, 3),
    }


def ratio(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
    """The relative time of a to b: median and quartiles of the ratios within a round."""
    low, middle, high = np.percentile(a / b, (25, 50, 75))
    return {"median": round(middle, 4), "quartile_1": round(low, 4), "quartile_3": round(high, 4)}


def save(name: str, results: Any) -> Path:
    """Writes results, which JSON must hold, with their provenance; returns the path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"provenance": provenance(), "results": results}, indent=1) + "\n")
    return path


def saved(name: str) -> Any:
    """Reads the results that `save` has written; an empty dict if there is no file."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text())["results"] if path.exists() else {}


def with_table(page: str, text: str, by: str) -> str:
    """Returns a page with another table between the two marks of the file `by`, which makes it."""
    begin, end = (f"<!-- {by}: {word} -->" for word in ("begin", "end"))
    return re.sub(
        rf"{begin}.*?{end}", lambda _: f"{begin}\n\n{text}\n\n{end}", page, flags=re.DOTALL
    )


def provenance() -> dict[str, Any]:
    """Commit, versions, machine and date."""
    root = Path(__file__).parent
    commit = ""
    with suppress(OSError):  # no git
        command = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(
            command, cwd=root, capture_output=True, text=True, check=False
        ).stdout.strip()
    model = [
        line.split(":")[1].strip()
        for line in _lines("/proc/cpuinfo")
        if line.startswith("model name")
    ]
    return {
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {name: version for name in PACKAGES if (version := installed(name))},
        "python": platform.python_version(),
        "devices": sorted({device.device_kind for device in jax.local_devices()}),
        "processor": model[0] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def busy_and_idle_s() -> tuple[float, float]:
    """Reads for how many seconds all cores together have been busy and idle."""
    (ticks,) = (line.split()[1:8] for line in _lines("/proc/stat") if line.split()[0] == "cpu")
    user, nice, system, idle, waits, *interrupts = (
        int(count) / os.sysconf("SC_CLK_TCK") for count in ticks
    )
    return user + nice + system + sum(interrupts), idle + waits


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
