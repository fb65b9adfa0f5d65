"""Every test sees eight CPU devices in one process, float32 by default, and equal random
examples."""

import gc
import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import hypothesis
import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh
from processes import COMPILATION_CACHE, PATIENT_MPI, UNOPTIMIZED
from tiers import leave_to_slow

import fddp

pytest.register_assert_rewrite("on_ranks.job")  # tests that two modules import

collect_ignore = [
    "workers",
    "on_ranks",
    "step/typed_calls.py",
]  # scripts, whose examples pytest would look for

# Before any test uses a device: JAX's backends start once and keep their settings.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
os.environ |= UNOPTIMIZED | PATIENT_MPI  # also for the processes of a test
jax.config.update("jax_disable_most_optimizations", True)

# Tracing makes many objects and few cycles: with Python's own thresholds the collector takes 7 % of
# the time.
gc.set_threshold(100_000, 50, 100)

# XLA compiles for each new shape, so an example takes as long as it takes.
hypothesis.settings.register_profile("fddp", deadline=None, derandomize=True, max_examples=40)
hypothesis.settings.load_profile("fddp")


def pytest_configure(config: pytest.Config) -> None:
    """All processes of the suite share JAX's compilation cache, in a folder of pytest's own."""
    if hasattr(config, "cache"):  # unless pytest runs without: -p no:cacheprovider
        folder = str(config.cache.mkdir(f"xla-{jax.__version__}-{processor()}"))
        os.environ |= dict(zip(COMPILATION_CACHE, (folder, "0"), strict=True))
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    leave_to_slow(items)


def processor() -> str:
    """A digest of this processor's features, for which XLA compiles."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((x for x in lines if x.startswith(("flags", "Features"))), "")
    return hashlib.sha256(flags.encode()).hexdigest()[:8]


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One worker more than cores, for many tests wait; over eight would need more memory than they
    save time."""
    return min(len(os.sched_getaffinity(0)) + 1, 8)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the seconds of each file, slowest first, so that growth is seen."""
    seconds = defaultdict[str, float](float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.location[0]] += report.duration
    slowest = sorted(((s, file) for file, s in seconds.items() if s >= 10), reverse=True)
    if slowest:
        terminalreporter.section("seconds per file, of 10 and more")
        for s, file in slowest:
            terminalreporter.write_line(f"{s:7.0f} {file}")


@cache
def first_replicas(count: int) -> fddp.Group:
    return fddp.mesh_group(Mesh(np.array(jax.devices()[:count]), "replica"))


@pytest.fixture
def group() -> Callable[[int], fddp.Group]:
    """`group(n)`: replicas on the first n devices."""
    return first_replicas


@pytest.fixture
def x64() -> Iterator[None]:
    """Float64 inside this test only."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def optimized() -> Iterator[None]:
    """XLA's usual optimizations, for claims about compiled programs."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def uncached() -> Iterator[None]:
    """XLA compiles every program: for claims about compiling."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX looks at the setting once only
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Restores the precision after a test."""
    yield
    assert not jax.config.read("jax_enable_x64")
