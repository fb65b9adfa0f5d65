"""The table of faults that jaxlib releases have on CPUs, and who says so."""

import os
import subprocess
import sys

import pytest

from fddp.runtime import jaxlib_faults
from fddp.runtime.jaxlib_faults import YNN, known_faults, remark


@pytest.mark.parametrize(
    ("release", "numbers"),
    [
        ("0.10.1", {39264, 49121, 49176}),
        ("0.10.2", {39103, 39257, 49121, 49176}),
        ("0.11.0", {39257, 39741, 49121, 49176}),
        ("0.11.1", {40101, 49121, 49176}),
        ("0.11.2.dev20260901", {49121, 49176}),
        ("0.12.0.1", {49176}),
    ],
)
def test_each_release_has_the_faults_of_its_public_reports(release: str, numbers: set[int]):
    found = {int(fault.source.split("#")[1].split(",")[0]) for fault in known_faults(release)}
    assert found == numbers


def test_an_option_that_avoids_a_fault_silences_it():
    assert remark("0.10.2", "") != "" and "jax-ml/jax#39103" in remark("0.10.2", "")
    flags = f"--xla_dump_to=/tmp {YNN}"
    assert "39103" not in remark("0.10.2", flags)
    assert {fault.flag for fault in known_faults("0.10.2", flags)}.isdisjoint({YNN})


def test_a_fault_of_every_release_is_left_to_the_doctor():
    """No other jaxlib would help."""
    assert known_faults("0.12.0") and remark("0.12.0", "") == ""


# Each prints what it computes and what is right.
PROGRAMS = {
    "jax-ml/jax#39103": """
m = jnp.eye(3)
x = jnp.zeros((32_769, 3)).at[:, 0].set(jnp.arange(32_769.0))
print(jax.jit(lambda x: jax.vmap(lambda row: jnp.sum((m @ row) ** 2))(x))(x)[-1] == 2.0**30)
""",
    "openxla/xla#49121": """
f = lambda x, shift, start: jax.lax.dynamic_slice(jnp.roll(x, shift), [start], [4])
print([*jax.jit(f)(jnp.arange(9), 4, 12)] == [1, 2, 3, 4])
""",
    "openxla/xla#49176": """
f = lambda x: (x + 1).at[1:].set((x + 1)[:-1]).reshape((1, *x.shape))
x = jnp.arange(128).reshape(8, 16)
print([*jax.jit(f)(x)[0, :, 0]] == [1, *range(1, 112, 16)])
""",
}


@pytest.mark.ranks
def test_rank_0_alone_names_a_fault_and_once():
    twice = "import fddp; fddp.init(); fddp.init()"
    words = ["-m", "fddp", "run", "-n", "2", "--by", "processes", "--", sys.executable, "-c", twice]
    completed = subprocess.run(
        [sys.executable, *words],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    said = completed.stdout + completed.stderr
    words = jaxlib_faults.remark(jaxlib_faults_version(), "")
    assert said.count("has a known fault") == bool(words)
    assert f"[0] fddp: {words}" * bool(words) in said


@pytest.mark.steps
@pytest.mark.parametrize("source", PROGRAMS)
def test_the_installed_jaxlib_is_wrong_where_the_table_says_so_alone(source: str):
    script = f"import jax, jax.numpy as jnp\n{PROGRAMS[source]}"
    completed = subprocess.run(
        [sys.executable, "-c", script],
        env={"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    installed = jaxlib_faults.known_faults(jaxlib_faults_version())
    assert (completed.stdout.strip() == "False") == (
        source in [fault.source for fault in installed]
    )


def jaxlib_faults_version() -> str:
    from importlib.metadata import version

    return version("jaxlib")
