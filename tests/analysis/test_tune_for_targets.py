"""Schedules and caps for GPUs, without a GPU: the choice is the shortest estimate, and is not
behind plain JAX."""

import importlib.util
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import square
from trees import close

import fddp
from bench.plain_jax import compiled_plain
from fddp.analysis.auditing.targets import read_target
from fddp.analysis.workload import Workload
from models import bert, mlp, scanned

# The claims are about XLA's programs: all optimizations are on.
pytestmark = pytest.mark.usefixtures("optimized")
aot = pytest.mark.aot

# Twelve layers of some 6 MiB, which are summed inside of their loop.
SCANNED = scanned.scanned(scanned.gpt.PRESETS["bytes"].clone(layers=12, width=384, hidden=1024))
# name: (module, model, rows of a replica)
MODELS: dict[str, tuple[Any, Any, int]] = {
    "mlp": (mlp, mlp.PRESETS["1024"], 256),
    "one layer of bert": (bert, bert.PRESETS["base"].clone(layers=1), 8),
    "scanned layers": (scanned, SCANNED, 16),
}


def workload(name: str, target: str) -> Workload:
    module, model, rows = MODELS[name]
    example = module.batch(model, rows * read_target(target).size)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), example)
    params, model_state = jax.eval_shape(lambda: module.init(model, jax.random.key(0), batch))
    return Workload(module.loss_fn(model), params, batch, model_state)


@cache
def tuned(name: str, target: str, *caps_mb: float) -> fddp.Tuning:
    work = workload(name, target)
    return fddp.tune(*work.forms(read_target(target).group()), target, caps_mb=caps_mb or None)


@aot
@pytest.mark.parametrize(
    "check_all", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["best and worst", "each"]
)
def test_an_estimate_is_that_of_an_audit_and_the_shortest_is_taken(check_all):
    tuning = tuned("mlp", "h100:2x8")
    work = workload("mlp", "h100:2x8")
    assert (
        len(tuning.candidates) == 6
    )  # three schedules, and 32 MiB under a cap of 100 are the plan under 25
    slowest = max(tuning.candidates, key=lambda candidate: candidate.seconds)
    for candidate in tuning.candidates if check_all else (tuning.best, slowest):
        options: Any = {"schedule": candidate.schedule, "bucket_cap_mb": candidate.bucket_cap_mb}
        audit = fddp.audit(*work.forms(read_target("h100:2").group(), **options), "h100:2x8")
        assert audit.timeline is not None
        estimate = audit.timeline.seconds, audit.timeline.exposed
        assert estimate == (candidate.seconds, candidate.exposed_s)
        assert audit.plan == candidate.plan
    assert tuning.best.seconds == min(candidate.seconds for candidate in tuning.candidates)
    assert tuning.step.options.schedule == tuning.schedule == tuning.best.schedule
    assert tuning.step.options.bucket_cap_mb == tuning.bucket_cap_mb == tuning.best.bucket_cap_mb


@aot
def test_a_tuning_is_printed_with_what_train_step_takes():
    tuning = tuned("mlp", "h100:2x8")
    title, head, *rows, last = str(tuning).splitlines()
    assert title == "h100:2x8, estimated at peak rates" and head.startswith("schedule")
    (best,) = [row for row in rows if row.endswith("best")]
    assert f"{1e3 * tuning.best.seconds:.2f}" in best and len(rows) == len(tuning.candidates)
    step = fddp.train_step(square, optax.sgd(0.1), **eval(f"dict({last})"))
    assert step.options.schedule == tuning.schedule
    assert step.with_options(schedule=tuning.schedule).options.schedule == tuning.schedule


@aot
@pytest.mark.parametrize(
    ("name", "target"),
    [
        pytest.param("mlp", "h100:8", marks=pytest.mark.slow),
        pytest.param("mlp", "a100:8", marks=pytest.mark.slow),
        pytest.param("one layer of bert", "h100:8", marks=pytest.mark.slow),
        pytest.param("scanned layers", "a100:2x8", marks=pytest.mark.slow),
    ],
)
def test_a_step_that_was_tuned_for_a_target_is_not_estimated_behind_plain_jax(name, target):
    tuning = tuned(name, target, 100)
    work = workload(name, target)
    programs = compiled_plain(*work.forms(read_target(target).group()), target)
    assert tuning.best.seconds <= min(plain.timeline.seconds for plain in programs)


@aot
@pytest.mark.parametrize(
    ("target", "share"),
    [("h100:2x8", 0.96), pytest.param("a100:2x8", 0.95, marks=pytest.mark.slow)],
)
def test_between_hosts_a_tuned_step_takes_less_than_plain_jaxs(target, share):
    work = workload("mlp", target)
    programs = compiled_plain(*work.forms(read_target(target).group()), target)
    plain = min((plain.timeline for plain in programs), key=lambda line: line.seconds)
    assert sum(span.seconds for span in plain.communication) >= 0.1 * plain.seconds
    assert tuned("mlp", target).best.seconds <= share * plain.seconds


@aot
@pytest.mark.steps
def test_a_tuned_step_goes_on_from_the_state_of_the_step_that_was_given(group):
    def loss(params: Any, x: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"]) ** 2)

    params = {"a": np.ones((4, 8), np.float32), "b": np.ones((8, 1), np.float32)}
    step = fddp.train_step(loss, optax.adam(0.1), group=group(2), donate=False, bucket_cap_mb=0)
    rows = np.arange(32, dtype=np.float32).reshape(8, 4)
    state, _ = step(step.init(params), rows)
    tuning = fddp.tune(step, state, rows, target="h100:2", caps_mb=[25])
    assert [len(candidate.plan.buckets) for candidate in tuning.candidates] == [2, 2, 2, 1, 1, 1]
    results = [trainer(state, rows)[0].params for trainer in (step, tuning.step)]
    close(*results, rtol=1e-6, atol=1e-7)
    assert len(tuning.step.plan.buckets) == len(tuning.best.plan.buckets)


@aot
def test_a_step_of_several_programs_is_refused(group):
    step = fddp.train_step(square, optax.sgd(0.1), group=group(2), schedule="staged")
    with pytest.raises(ValueError, match="schedule='staged'; give it 'fused'"):
        fddp.tune(step, step.init(jnp.ones(())), jnp.ones(4), target="h100:2")


def test_an_unknown_target_is_refused_by_name(group):
    step = fddp.train_step(square, optax.sgd(0.1), group=group(2))
    with pytest.raises(ValueError, match=r"a100, h100, h200.*got 'b300:8'"):
        fddp.tune(step, step.init(jnp.ones(())), jnp.ones(4), target="b300:8")


def test_a_missing_compiler_is_named(group, monkeypatch):
    step = fddp.train_step(square, optax.sgd(0.1), group=group(2))
    state = step.init(jnp.ones(()))
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name.startswith("jax_plugins") else find(name),
    )
    with pytest.raises(RuntimeError, match=r"jax-cuda13-pjrt, not installed here: pip install"):
        fddp.tune(step, state, jnp.ones(4), target="h100:2")
