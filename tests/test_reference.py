"""Tables and outputs of the reference pages are those of the code."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax
import pytest

import fddp
from fddp import hooks
from fddp.__main__ import main
from fddp.analysis.measure import bytes_of
from fddp.comm.mesh_programs import GPU_OPTIONS
from fddp.jax_internals import OVERLAP_OPTIONS, PIPELINED_ROUNDS
from fddp.step.foreign_options import ANSWERS
from fddp.step.options import CHOICES

ROOT = Path(__file__).parents[1]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| (.*) \|$", section, re.MULTILINE)
    assert lines, f"no table below {heading}"
    return [line.split(" | ") for line in lines[1:]]


def quoted(cell: str) -> list[str]:
    """What stands in code font in a cell."""
    return re.findall(r"`([^`]*)`", cell)


### Options


OPTIONS = page("options.md")


def test_each_option_has_a_row_with_its_default():
    table = rows(OPTIONS, "All options")
    assert [(name, default) for name, _, default, _, _ in table] == [
        (f"`{field.name}`", f"`{field.default!r}`") for field in fields(fddp.Options)
    ]
    assert [name for name, *_, effect in table if not effect.strip()] == []


def test_a_row_lists_all_values_of_an_option():
    values = {quoted(name)[0]: quoted(cell) for name, cell, *_ in rows(OPTIONS, "All options")}
    for name, choices in CHOICES.items():
        assert values[name] == [repr(choice) for choice in choices], name
    optional = [field.name for field in fields(fddp.Options) if type(None) in get_args(field.type)]
    assert "hook" in optional and [name for name in optional if "None" not in values[name]] == []


def test_the_page_answers_ddps_arguments_as_the_error_does():
    table = rows(OPTIONS, "DDP's arguments without an option")
    assert len(table) > 10
    for argument, answer in table:
        assert ANSWERS[quoted(argument)[0]] == answer


### Memory


MEMORY = page("memory.md")
REPLICAS = 4
WIDTH = 512
LAYERS = 16
COUNT = LAYERS * WIDTH**2  # of parameters
LAYOUTS: dict[str, dict[str, Any]] = {
    "`shard=None`": {},
    '`"optimizer"`': {"shard": "optimizer"},
    '`"state"`': {"shard": "state"},
}
PRECISIONS: dict[str, tuple[Any, Any]] = {
    "float32, SGD": (jnp.float32, optax.sgd(0.1)),
    "float32, SGD with momentum": (jnp.float32, optax.sgd(0.1, momentum=0.9)),
    "float32, AdamW": (jnp.float32, optax.adamw(0.1)),
    "float32, `optax.adamw(…, mu_dtype=jnp.bfloat16)`": (
        jnp.float32,
        optax.adamw(0.1, mu_dtype=jnp.bfloat16),
    ),
    "bfloat16 parameters, AdamW": (jnp.bfloat16, optax.adamw(0.1)),
}
Groups = Callable[[int], fddp.Group]


def tanh_layers(params: Any, x: Any) -> Any:
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def per_parameter(
    group: fddp.Group, dtype: Any = jnp.float32, optimizer: Any = None, **options: Any
) -> list[float]:
    """Bytes of each field of the state, and of the gradients, per parameter."""
    params = [jnp.zeros((64, 64), dtype)] * 4
    step = fddp.train_step(tanh_layers, optimizer or optax.adamw(0.1), group=group, **options)
    step.init(params)
    held = bytes_of(step.local_form)
    gradients = sum(bucket.nbytes for bucket in step.plan.buckets)
    nbytes = (*(held[name] for name in ("params", "opt_state", "hook_state")), gradients)
    return [n / (4 * 64 * 64) for n in nbytes]


def test_a_replica_holds_between_steps_what_the_formulas_say(group: Groups):
    text = MEMORY.partition("\n## Bytes per parameter\n")[2].partition("Other optimizers")[0]
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line[:1] == "|"]
    heads, _, *table = lines
    formulas = {cells[0].strip("*"): [cell.strip("*") for cell in cells[1:]] for cells in table}
    assert heads == list(LAYOUTS)
    for column, options in enumerate(LAYOUTS.values()):
        params, opt_state, _, gradients = per_parameter(group(REPLICAS), **options)
        for name, nbytes in (
            ("parameters", params),
            ("optimizer state", opt_state),
            ("between steps", params + opt_state),
        ):
            expected = eval(formulas[name][column], {"n": REPLICAS})
            assert nbytes == pytest.approx(expected, abs=0.01), (name, options)
        assert gradients == 4


def test_optimizers_and_precisions_change_the_bytes_as_the_table_says(group: Groups):
    text = MEMORY.partition("Other optimizers and precisions")[2]
    table = re.findall(r"^\| (.*) \| (\d) \| (\d) \| (\d) \| \d", text, re.MULTILINE)
    assert {name for name, *_ in table} >= set(PRECISIONS)
    for name, *cells in table:
        if name in PRECISIONS:
            params, opt_state, _, gradients = per_parameter(group(REPLICAS), *PRECISIONS[name])
            assert [params, opt_state, gradients] == pytest.approx(
                [float(cell) for cell in cells], abs=0.01
            ), name


def test_the_memory_of_a_hook_is_eight_bytes_per_parameter(group: Groups):
    _, _, hook_state, _ = per_parameter(group(REPLICAS), hook=hooks.quantize())
    assert hook_state == 8 and "holds 8 further bytes" in MEMORY


@pytest.mark.usefixtures("optimized")
@pytest.mark.quick("none", "shard optimizer")
@pytest.mark.steps
@pytest.mark.parametrize(
    "row",
    [
        "none",
        '`shard="optimizer"`',
        '`shard="state"`',
        "`accumulation_steps=2`",
        "`donate=False`",
        "`bucket_cap_mb=1000`",
    ],
    ids=lambda row: re.sub(r"\W+", " ", row).strip(),
)
def test_xla_plans_the_peaks_of_the_table(group: Groups, row: str):
    """Later versions of XLA may plan somewhat other buffers."""
    (cells,) = [cells for cells in rows(MEMORY, "The peak of a step") if cells[0] == row]
    between, peak = (float(cell) for cell in cells[1:])
    options: dict[str, Any] = {"bucket_cap_mb": 4}
    if row != "none":
        options |= eval(f"dict({row.strip('`')})")
    step = fddp.train_step(tanh_layers, optax.adamw(0.1), group=group(REPLICAS), **options)
    state = step.shapes([jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS)
    memory = fddp.audit(step, state, jax.ShapeDtypeStruct((16, WIDTH), jnp.float32)).memory
    assert memory is not None
    assert memory.resident / COUNT == pytest.approx(between, abs=0.05)
    assert memory.peak / COUNT == pytest.approx(peak, rel=0.05)


### The command line


COMMANDS = page("command-line.md")
EXAMPLES = dict(
    re.findall(r"```console\n\$ python -m fddp ([^\n]*)\n(.*?)```", COMMANDS, re.DOTALL)
)
SOURCES = "".join(path.read_text() for path in sorted((ROOT / "fddp").rglob("*.py")))
HELLO = 'import fddp\nprint("hello from rank", fddp.init().rank)\n'
KILLED = """
import os, signal, time
import fddp, jax.numpy as jnp, optax

group = fddp.init()
step = fddp.train_step(lambda w, x: jnp.mean((x - w) ** 2), optax.sgd(0.5), group=group)
state = step.init(jnp.zeros(()))
for k in range(5):
    if group.rank == 1 and k == 3:
        time.sleep(2)  # rank 0 is waiting by then
        os.kill(os.getpid(), signal.SIGKILL)
    state, info = step(state, jnp.ones(8))
"""


def words(output: str) -> list[list[str]]:
    """The words of each line, with numbers and digests as a letter."""
    masked = re.sub(r"\b[0-9a-f]{16}\b|\d+(\.\d+)?", "N", output)
    return [line.split() for line in masked.splitlines()]


def of_ranks(folder: Path, script: str, **variables: str) -> str:
    """The output of `python -m fddp run -n 2 --by processes hello.py`, without errors."""
    (folder / "hello.py").write_text(script)
    (example,) = [command for command in EXAMPLES if command.startswith("run ")]
    command = [sys.executable, "-m", "fddp", *shlex.split(example)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=300
    ).stdout


def test_the_page_has_a_section_and_an_example_of_each_command():
    names = ["run", "flight", "doctor"]
    assert sorted(re.findall(r"^## ([a-z]+)$", COMMANDS, re.MULTILINE)) == sorted(names)
    examples = {command.split()[0] for command in EXAMPLES}
    assert sorted({*examples, "doctor"}) == sorted(names)  # doctor's output is of one machine


@pytest.mark.ranks
def test_run_prints_the_lines_of_the_page(tmp_path: Path):
    (shown,) = [output for command, output in EXAMPLES.items() if command.startswith("run ")]
    assert sorted(of_ranks(tmp_path, HELLO).splitlines()) == shown.splitlines()


@pytest.mark.ranks
@pytest.mark.slow
def test_flight_prints_the_lines_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    records = tmp_path / "records"
    of_ranks(tmp_path, KILLED, FDDP_FLIGHT_DIR=str(records))
    assert main(["flight", str(records)]) == 0
    assert words(capsys.readouterr().out) == words(EXAMPLES["flight FOLDER"])


def test_the_page_names_every_variable_that_fddp_reads_or_sets():
    own = set(re.findall(r"\bFDDP_[A-Z]+(?:_[A-Z]+)*\b", SOURCES)) - {"FDDP_VARIABLES"}
    foreign = set(re.findall(r'environ(?:\.\w+)?[(\[]\s*"([A-Z]\w+)"', SOURCES))
    assert {"FDDP_GRACE_S", "FDDP_SECRET"} <= own and "JAX_PLATFORMS" in foreign
    named = set(re.findall(r"`([A-Z][A-Z_0-9]+)(?:=\w+)?`", COMMANDS))
    searched = {"PATH"}
    assert sorted((own | foreign) - named - searched) == []
    assert sorted(name for name in named if name.startswith("FDDP_") and name not in own) == []


### Installing


INSTALLING = page("installing.md")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_each_extra_has_a_row_with_its_packages():
    installed = {
        extra: list(dict.fromkeys(re.match(r"[\w-]+", text)[0] for text in requirements))  # pyright: ignore[reportOptionalSubscript]
        for extra, requirements in PROJECT["optional-dependencies"].items()
    }
    assert "mpi" in installed
    shown = {
        quoted(extra)[0]: [name.partition("[")[0] for name in quoted(packages)]
        for extra, packages, _ in rows(INSTALLING, "Extras")
    }
    assert shown == installed


def test_the_page_names_the_pythons_and_the_jax_of_the_project():
    pythons = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert f"Python {pythons[0]} to {pythons[-1]}" in INSTALLING
    (bounds,) = [text for text in PROJECT["dependencies"] if text.startswith("jax>")]
    least, below = re.findall(r"0\.(\d+)", bounds)
    assert f"JAX 0.{least} to 0.{int(below) - 1}" in INSTALLING


@pytest.mark.quick("Windows")
@pytest.mark.steps
@pytest.mark.parametrize(
    ("platform", "absent", "error"),
    [
        ("Windows", "sys.modules['fcntl'] = None", ""),
        ("macOS", "del os.memfd_create, os.pidfd_open, os.sched_getaffinity", ""),
    ],
    ids=["Windows", "macOS"],
)
def test_import_without_a_platforms_calls_does_what_the_page_says(
    platform: str, absent: str, error: str
):
    (row,) = [cells for cells in rows(INSTALLING, "Platforms") if cells[0] == platform]
    script = f"import os, sys; {absent}; import fddp; fddp.init()"
    completed = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (completed.returncode != 0) == bool(error) == ("raises" in row[1]), completed.stderr
    assert error in completed.stderr and (not error or "ModuleNotFoundError" in completed.stderr)


### GPU clusters


def test_the_page_lists_the_options_of_xla_on_gpus():
    text = page("gpu-clusters.md")
    table = {quoted(name)[0]: quoted(value)[0] for name, value, _ in rows(text, "Options of XLA")}
    options = GPU_OPTIONS.keys() - PIPELINED_ROUNDS.keys() - OVERLAP_OPTIONS.keys()
    assert {name: table[name] for name in options} == {name: GPU_OPTIONS[name] for name in options}
    assert [name for name in GPU_OPTIONS if f"`{name}`" not in text] == []
    assert len(table) == len(GPU_OPTIONS) - len(OVERLAP_OPTIONS)
