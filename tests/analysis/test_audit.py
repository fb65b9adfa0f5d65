"""The schedules that XLA compiles for GPUs, without a GPU, hold the promises of a step.

Shapes are chosen so that operations are real and compiling is quick: rows are those of one replica.
"""

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError
from typing import Any, NamedTuple
from unittest.mock import patch

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from problems import square

import fddp
from fddp.analysis.audit import Audit, read
from fddp.analysis.targets import target_group
from fddp.comm import forget_device_caches, mesh_programs
from fddp.hooks.reductions import reductions
from fddp.jax_internals import parse
from models import bert, gpt, mlp, resnet

# The claims are about XLA's programs: all optimizations are on.
pytestmark = pytest.mark.usefixtures("optimized")
aot = pytest.mark.aot
slow = pytest.mark.slow

# name: (model, rows, options). A GPT of 5 MiB needs smaller buckets than a BERT-base of 418.
MODELS = {
    "mlp": (mlp, mlp.PRESETS["1024"], 256, {"bucket_cap_mb": 4}),
    "gpt": (gpt, gpt.PRESETS["bytes"], 16, {"bucket_cap_mb": 1}),
    "two layers of gpt": (gpt, gpt.PRESETS["bytes"].clone(layers=2), 16, {"bucket_cap_mb": 0.5}),
    "three layers of bert": (bert, bert.PRESETS["base"].clone(layers=3), 8, {}),
    "bert": (bert, bert.PRESETS["base"], 8, {}),
    "resnet": (resnet, resnet.PRESETS["50"], 16, {}),
}
TRANSFORMERS = [
    "two layers of gpt",
    *(pytest.param(name, marks=slow) for name in ("gpt", "three layers of bert", "bert")),
]
on_both_targets = pytest.mark.parametrize("target", ["h100:8", pytest.param("a100:8", marks=slow)])


class Workload(NamedTuple):
    """A loss, the shapes of its parameters and buffers, and the rows of all replicas."""

    loss_fn: Callable[..., Any]
    params: Any
    batch: Any
    model_state: Any = None
    has_aux: bool = True


@cache
def audited(name, target):
    module, model, rows, options = MODELS[name]
    return look(workload(module, model, rows * target_group(target).size), target, **options)


@contextmanager
def more_options(options):
    """Adds options of XLA for GPUs to the programs of groups that its block makes."""
    with ExitStack() as stack:
        # A mesh has one placement as long as it is remembered, and a placement has its options.
        stack.callback(forget_device_caches)
        more = mesh_programs.GPU_OPTIONS | options
        stack.enter_context(patch.object(mesh_programs, "GPU_OPTIONS", more))
        forget_device_caches()
        yield


def look(workload, target, **options):
    settings = {"group": target_group("h100:2"), "has_aux": workload.has_aux, **options}
    step = fddp.train_step(workload.loss_fn, optax.adamw(1e-3), **settings)
    state = step.shapes(workload.params, model_state=workload.model_state)
    return fddp.audit(step, state, workload.batch, target)


def newer_xla_for_hopper(target):
    return target.startswith("h100") and jax.__version_info__ >= (0, 11)


def workload(module, model, rows):
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), module.batch(model, rows)
    )
    params, model_state = shapes(module, model, batch)
    return Workload(module.loss_fn(model), params, batch, model_state)


def shapes(module, model, batch):
    return jax.eval_shape(lambda: module.init(model, jax.random.key(0), batch))


def plain_mlp(rows, **fields):
    return workload(mlp, mlp.MLP((256,) * 5, use_bias=False, **fields), rows)


### Hidden traffic


@aot
@on_both_targets
@pytest.mark.parametrize("name", ["mlp", *TRANSFORMERS, pytest.param("resnet", marks=slow)])
def test_every_bucket_is_an_asynchronous_all_reduce_of_its_own_in_the_planned_order(name, target):
    audit = audited(name, target)
    assert (
        audit.carries
        == audit.messages
        == tuple(f"bucket {k}" for k in range(len(audit.plan.buckets)))
    )
    assert all(
        collective.asynchronous and collective.kind == "all-reduce"
        for collective in audit.collectives
    )
    assert not any(collective.loops for collective in audit.collectives)
    sizes = [f.nbytes for f in audit.collectives]
    planned = [b.nbytes for b in audit.plan.buckets]
    assert sizes[1:] == planned[1:]
    # The bits of a buffer travel as two numbers of 16 bits, each in a float.
    module, model, *_ = MODELS[name]
    _, model_state = shapes(module, model, module.batch(model, 8))
    buffers = sum(8 * x.size for x in jax.tree.leaves(model_state))
    # Loss, weight and one metric: three floats.
    assert sizes[0] == planned[0] + 3 * 4 + buffers


@aot
@on_both_targets
def test_products_are_computed_under_each_bucket_of_an_mlp_but_the_last(target):
    audit = audited("mlp", target)
    assert len(audit.collectives) == 8
    assert all(collective.heavy > 0 for collective in audit.collectives[:-1])
    assert audit.problems() == ()


@aot
@on_both_targets
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_products_are_computed_under_the_first_half_of_a_transformers_buckets(name, target):
    collectives = audited(name, target).collectives
    # For A100s XLA's scheduler leaves the messages of BERT's last layers, three fifths of all,
    # without products.
    share = 3 if (name, target) == ("bert", "a100:8") else 2
    assert all(collective.heavy > 0 for collective in collectives[: len(collectives) // share])


@aot
@on_both_targets
def test_products_are_computed_under_scatters_and_parameters_gathered_at_the_end(target):
    module, model, rows, options = MODELS["mlp"]
    audit = look(workload(module, model, rows * 8), target, shard="optimizer", **options)
    count = len(audit.plan.buckets)
    names = ["tail", *(f"bucket {k}" for k in range(count)), *(f"gather {k}" for k in range(count))]
    assert audit.carries == audit.messages == tuple(names)
    kinds = ["all-reduce"] + ["reduce-scatter"] * count + ["all-gather"] * count
    assert [collective.kind for collective in audit.collectives] == kinds
    scatters = audit.collectives[1 : count + 1]
    assert all(collective.asynchronous for collective in scatters)
    assert all(collective.heavy > 0 for collective in scatters[:-1])
    (problem,) = audit.problems()
    assert "no heavy operation overlaps with" in problem and "gather 0, gather 1" in problem


@aot
@pytest.mark.quick("gpt-h100:8")
@pytest.mark.parametrize(
    ("name", "target"), [("gpt", "h100:8"), ("gpt", "a100:8"), ("bert", "h100:8")]
)
def test_parameters_in_shards_are_gathered_under_layers_and_gradients_scattered(name, target):
    """The only whole sum is that of loss and metrics."""
    module, model, rows, options = MODELS[name]
    audit = look(workload(module, model, rows * 8), target, shard="state", **options)
    assert audit.carries == audit.messages and audit.problems() == ()
    kinds = [collective.kind for collective in audit.collectives]
    count = len(audit.plan.buckets)
    assert kinds == ["all-gather"] * count + ["all-reduce"] + ["reduce-scatter"] * count
    gathers = audit.collectives[:count]
    scatters = audit.collectives[count + 1 :]
    assert all(collective.asynchronous for collective in (*gathers, *scatters))
    # No layer precedes the inputs of the first one: three embeddings of BERT, one of the GPT.
    first = 3 if name == "bert" else 1
    assert all(collective.heavy > 0 for collective in gathers[first:])
    # For A100s XLA's scheduler leaves the scatters of the last layers without products.
    hidden = scatters[: count // 2] if target == "a100:8" else scatters[:-first]
    assert all(collective.heavy > 0 for collective in hidden)


@aot
def test_the_operations_of_a_program_are_those_that_a_person_counts():
    audit = audited("mlp", "h100:8")
    # Eight layers forwards, eight gradients of kernels, seven of inputs.
    assert audit.heavy == 23


@aot
def test_several_hosts_are_compiled_for_too():
    audit = look(
        plain_mlp(64 * 16),
        "h100:2x8",
        bucket_cap_mb=0.25,
        first_bucket_mb=0.25,
        last_bucket_mb=0.25,
    )
    assert audit.carries == tuple(f"bucket {k}" for k in range(4))
    assert all(collective.asynchronous for collective in audit.collectives)


@aot
def test_bfloat16_gradients_take_half_the_bytes():
    caps = {"bucket_cap_mb": 0, "first_bucket_mb": 0, "last_bucket_mb": 0}
    wide, narrow = (
        look(plain_mlp(512, param_dtype=dtype), "h100:8", **caps)
        for dtype in (jnp.float32, jnp.bfloat16)
    )
    tail = 3 * 4
    assert sum(f.nbytes for f in wide.collectives) == 4 * 256 * 256 * 4 + tail
    assert sum(f.nbytes for f in narrow.collectives) == 4 * 256 * 256 * 2 + tail
    # Sixteen bits would round the loss: it travels alone.
    assert narrow.carries == ("tail", *(f"bucket {k}" for k in range(4))) and "tail" in str(narrow)


@aot
def test_the_hook_in_bfloat16_halves_the_bytes_of_float32_gradients():
    caps = {"bucket_cap_mb": 0, "first_bucket_mb": 0, "last_bucket_mb": 0}
    audit = look(plain_mlp(512), "h100:8", hook=fddp.hooks.bf16(), **caps)
    assert [(f.nbytes, f.asynchronous) for f in audit.collectives[1:]] == [
        (256 * 256 * 2, True)
    ] * 4
    assert audit.carries == ("tail", *(f"bucket {k}" for k in range(4))) and audit.problems() == ()


### Audits find and name obstacles


@aot
def test_one_bucket_over_everything_has_nothing_to_overlap_with():
    caps = {"bucket_cap_mb": 1000, "first_bucket_mb": 1000, "last_bucket_mb": 1000}
    audit = look(plain_mlp(512), "h100:8", **caps)
    assert [collective.heavy for collective in audit.collectives] == [0]
    (problem,) = audit.problems()
    assert problem.startswith("exposed: no heavy operation overlaps with bucket 0")


class Scanned(nn.Module):
    layers: int = 6
    width: int = 256

    @nn.compact
    def __call__(self, x):
        def layer(dense, x, _):
            return nn.relu(dense(x)), None

        stack = nn.scan(
            layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers
        )
        return stack(nn.Dense(self.width), x, None)[0]


def scanned_layers(rows=512, **fields):
    model = Scanned(**fields)
    x = jnp.ones((rows, model.width))
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    return Workload(lambda p, b: (jnp.mean(jnp.asarray(model.apply(p, b)) ** 2), {}), params, x)


@aot
def test_layers_in_a_scan_deliver_all_gradients_at_once_where_they_fit_into_a_bucket():
    audit = look(scanned_layers(), "h100:8")
    assert len(audit.collectives) == 2 and all(
        collective.heavy == 0 for collective in audit.collectives
    )
    (problem,) = audit.problems()
    assert problem.startswith("exposed")


@aot
@on_both_targets
def test_the_sum_of_a_layer_travels_in_a_loop_under_products_of_the_next(target):
    audit = look(scanned_layers(), target, bucket_cap_mb=0.5)
    (bucket,) = (k for k, candidate in enumerate(audit.plan.buckets) if candidate.rounds > 1)
    carrying = [
        collective
        for collective, name in zip(audit.collectives, audit.carries)
        if name == f"bucket {bucket}"
    ]
    assert (
        sum(collective.rounds for collective in carrying) == audit.plan.buckets[bucket].rounds == 6
    )
    (looped,) = (collective for collective in carrying if collective.loops)
    # XLA takes the first round out of the loop, and the last round's sum.
    assert looped.asynchronous and looped.rounds == 5
    # A layer's backward pass is two products; for Hopper the XLA of JAX 0.11 puts one of them
    # before the sum.
    assert looped.heavy == (1 if newer_xla_for_hopper(target) else 2)
    assert "asynchronous, in 5 rounds of a loop" in str(audit)
    assert audit.problems() == ()


@aot
@pytest.mark.steps
@pytest.mark.parametrize(
    ("target", "hook"),
    [
        (None, None),
        (None, fddp.hooks.quantize()),
        pytest.param("h100:2", fddp.hooks.bf16(), marks=aot),
        pytest.param(None, fddp.hooks.bf16(), marks=slow),
        pytest.param("h100:2", None, marks=[aot, slow]),
        pytest.param("h100:2", fddp.hooks.quantize(), marks=[aot, slow]),
    ],
    ids=repr,
)
def test_what_a_rank_sends_does_not_depend_on_the_leaves_that_its_branch_uses(group, target, hook):
    replicas = group(2) if target is None else target_group(target)
    params = {name: np.ones((64, 64), np.float32) for name in "ab"}
    options = {"group": replicas, "bucket_cap_mb": 0, "hook": hook}

    def collectives_of(uses):
        step = fddp.train_step(lambda p, x: jnp.mean(uses(p, x) ** 2), optax.sgd(0.1), **options)
        return [
            str(collective)
            for collective in fddp.audit(
                step, step.shapes(params), np.ones((8, 64)), target
            ).collectives
        ]

    both = collectives_of(lambda p, x: jnp.tanh(x @ p["a"]) @ p["b"])
    assert len(both) >= 2
    assert both == collectives_of(lambda p, x: x @ p["a"])
    assert both == collectives_of(lambda p, x: x @ p["b"])
    assert both == collectives_of(lambda p, x: x)


def test_on_cpu_all_reduces_are_synchronous_and_the_audit_says_so(group):
    step = fddp.train_step(
        lambda w, x: jnp.mean((x @ w["a"] @ w["b"]) ** 2),
        optax.sgd(0.1),
        group=group(8),
        bucket_cap_mb=0,
    )
    state = step.init({"a": jnp.ones((4, 4)), "b": jnp.ones((4, 4))})
    audit = fddp.audit(step, state, np.ones((8, 4), np.float32))
    assert audit.carries == audit.messages == ("bucket 0", "bucket 1") and audit.where == "cpu"
    (problem,) = audit.problems()
    assert "bucket 0, bucket 1" in problem and "XLA:CPU overlaps nothing" in problem
    assert not any(collective.asynchronous for collective in audit.collectives)


def test_a_collective_in_a_loop_is_named(group):
    def loss_fn(w, x):
        total, _ = jax.lax.scan(
            lambda s, row: (s + jax.lax.psum(jnp.sum(row * w), "replica"), None), 0.0, x
        )
        return total**2

    step = fddp.train_step(loss_fn, optax.sgd(0.1), group=group(2))
    audit = fddp.audit(step, step.init(jnp.ones(3)), jnp.ones((8, 3)))
    assert any("in a loop" in problem for problem in audit.problems())


def test_one_replica_sends_nothing(group):
    step = fddp.train_step(square, optax.sgd(0.1), group=group(1))
    audit = fddp.audit(step, step.init(jnp.ones(())), jnp.ones(4))
    assert audit.collectives == () and "nothing is sent" in audit.problems()[0]


MERGED = """HloModule f, is_scheduled=true
ENTRY %main (x: f32[9], y: f32[9]) -> f32[9] {
  %x = f32[9] parameter(0)
  %y = f32[9] parameter(1)
  %start = (f32[9], f32[9]) all-reduce-start(%x, %y), metadata={op_name="jit(step)/bucket0/psum"}
  %done = (f32[9], f32[9]) all-reduce-done(%start)
}
"""
SWAPPED = """HloModule f, is_scheduled=true
ENTRY %main (x: f32[9], y: f32[9]) -> f32[9] {
  %x = f32[9] parameter(0)
  %one = f32[9] all-reduce(%x), metadata={op_name="jit(step)/bucket1/psum"}
  %two = f32[9] all-reduce(%x), metadata={op_name="jit(step)/bucket0/psum"}
}
"""


def read_buckets(text: str, count: int, size: tuple[int, ...] = (9,)) -> Audit:
    plan = fddp.make_plan([np.zeros(size, np.float32)] * count, bucket_cap_mb=0)
    messages = reductions(plan, None)
    return read(parse(text), [message.name for message in messages], plan, "h100:8")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (MERGED, "merged: XLA made one all-reduce of 2"),
        (SWAPPED, "out of order: messages start in the order bucket 1, bucket 0"),
        (SWAPPED.replace("bucket1", "bucket0"), "not as planned: no collective carries bucket 1"),
    ],
)
def test_merged_and_swapped_buckets_are_named(text, words):
    assert any(words in problem for problem in read_buckets(text, 2).problems())


WAITED = """HloModule f, is_scheduled=true
ENTRY %main (x: f32[9], y: f32[9,9]) -> f32[9] {
  %x = f32[9] parameter(0)
  %y = f32[9,9] parameter(1)
  %begin = f32[9] all-reduce-start(%x), metadata={op_name="jit(step)/bucket0/psum"}
  %dot = f32[9,9] dot(%y, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %end = f32[9] all-reduce-done(%begin)
  %two = f32[9] all-reduce(%x), metadata={op_name="jit(step)/bucket1/psum"}
  %three = f32[9] reduce-scatter(%x), metadata={op_name="jit(step)/bucket2/psum"}
  %four = f32[9] all-reduce(%x), metadata={op_name="jit(step)/bucket2/psum"}
}
"""


def test_messages_that_nothing_heavy_overlaps_are_named_with_their_bytes():
    audit = read_buckets(WAITED, 3)
    assert [collective.heavy for collective in audit.collectives] == [1, 0, 0, 0]
    (problem,) = audit.problems()
    assert problem.startswith("exposed: no heavy operation overlaps with bucket 1, bucket 2, 0.0")


@aot
def test_a_step_too_small_to_hide_anything_is_told_to_take_more_rows():
    audit = look(workload(mlp, mlp.PRESETS["tiny"], 8 * 8), "h100:8", shard="state")
    assert {collective.asynchronous for collective in audit.collectives} == {True, False}
    (problem,) = audit.problems()
    assert problem.startswith("exposed") and "more rows" in problem


### Loops

ROUNDS = """HloModule f, is_scheduled=true
%body (p: (f32[64,64], f32[64,64])) -> (f32[64,64], f32[64,64]) {
  %p = (f32[64,64], f32[64,64]) parameter(0)
  %x = f32[64,64] get-tuple-element(%p), index=0
  %y = f32[64,64] get-tuple-element(%p), index=1
  %start = f32[64,64] all-reduce-start(%y), metadata={op_name="jit(step)/bucket0/psum"}
  %dot = f32[64,64] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %done = f32[64,64] all-reduce-done(%start)
  ROOT %next = (f32[64,64], f32[64,64]) tuple(%dot, %done)
}
ENTRY %main (p: (f32[64,64], f32[64,64])) -> (f32[64,64], f32[64,64]) {
  %p = (f32[64,64], f32[64,64]) parameter(0)
  ROOT %loop = (f32[64,64], f32[64,64]) while(%p), condition=%c, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
}
"""


def test_what_a_loop_sends_counts_once_a_round():
    audit = read_buckets(ROUNDS, 1, (64, 64))
    (collective,) = audit.collectives
    assert (collective.rounds, collective.heavy, audit.heavy) == (3, 1, 3)
    assert "in 3 rounds of a loop" in str(audit)
    assert "3 of 3 collectives asynchronous, 0.047 MiB; 3 heavy operations" in str(audit)


def test_a_sum_in_a_loop_is_a_problem_only_where_nothing_hides_it():
    assert not any(
        "in a loop" in problem for problem in read_buckets(ROUNDS, 1, (64, 64)).problems()
    )
    start, product, done = (
        line for line in ROUNDS.splitlines() if line[2:].startswith(("%start", "%dot", "%done"))
    )
    bare = ROUNDS.replace(f"{start}\n{product}\n{done}", f"{product}\n{start}\n{done}")
    assert bare != ROUNDS
    problem = read_buckets(bare, 1, (64, 64)).problems()[0]
    assert "in a loop" in problem and "in each of 3 rounds" in problem


### Targets


@pytest.mark.parametrize("name", ["h100", "b300:8", "h100:0", "h100:2x", "", 8])
def test_an_unknown_target_is_refused_by_name(name):
    with pytest.raises(ValueError, match="a100, h100, h200"):
        target_group(name)


def test_a_missing_compiler_is_named(monkeypatch):
    def version_of(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("fddp.runtime.packages.version", version_of)
    with pytest.raises(RuntimeError, match=r"jax-cuda13-pjrt, not installed here: pip install"):
        target_group("h100:8")


### Printed audits


@aot
def test_a_table_has_a_line_for_each_collective():
    audit = audited("mlp", "h100:8")
    lines = str(audit).splitlines()
    assert [line.split()[:3] for line in lines[1:9]] == [
        [str(k), "bucket", str(k)] for k in range(8)
    ]
    assert lines[9:11] == [
        "h100:8: 8 of 8 collectives asynchronous, 32.000 MiB; 23 heavy operations",
        "planned: 8 buckets, 32.000 MiB",
    ]
    assert lines[-1] == "no problem found"


def test_the_same_step_on_another_group_trains_alike(group):
    step = fddp.train_step(square, optax.sgd(0.1), group=group(2))
    moved = step.on(group(4))
    rows = jnp.arange(8.0)
    results = [s(s.init(jnp.zeros(())), rows)[0].params for s in (step, moved)]
    assert float(results[0]) == float(results[1])
    assert moved.plan == step.plan


@aot
@pytest.mark.parametrize("registers", [False, True])
def test_sums_in_memory_that_xla_registers_are_named(registers):
    with more_options({"xla_gpu_experimental_enable_nccl_symmetric_buffers": str(registers)}):
        audit = look(plain_mlp(64), "h100:8", bucket_cap_mb=0.5)
    assert {collective.registered for collective in audit.collectives} == {registers}
    assert ("asynchronous, registered" in str(audit)) == registers


### Hooks, and messages of some steps only


@aot
def test_what_is_sent_in_a_branch_is_named():
    audit = look(
        plain_mlp(256), "h100:8", bucket_cap_mb=0, hook=fddp.hooks.powersgd(2, start_step=5)
    )
    inside = [collective for collective in audit.collectives if collective.branches]
    assert inside and not any(collective.loops for collective in inside)
    (problem,) = (problem for problem in audit.problems() if "in a branch" in problem)
    assert all(f"bucket {k}" in problem for k in range(4))
    assert "in a branch" in str(audit)


def test_an_all_to_all_is_no_merged_bucket(group):
    step = fddp.train_step(
        lambda w, x: jnp.mean((x @ w) ** 2), optax.sgd(0.1), group=group(4), hook=fddp.hooks.bf16()
    )
    audit = fddp.audit(step, step.init(jnp.ones((16, 8))), jnp.ones((8, 16)))
    assert {collective.kind for collective in audit.collectives} >= {"all-to-all", "all-gather"}
    assert {"bucket 0", "tail"} == {audit.label(k) for k in range(len(audit.collectives))}
    assert not any("merged" in problem for problem in audit.problems())


@aot
def test_the_memory_of_a_step_is_planned_before_it_runs():
    """AdamW: three numbers for each parameter; eight replicas share two of them, or all."""
    module, model, _, options = MODELS["mlp"]
    task = workload(module, model, 8 * 8)
    numbers = sum(x.size for x in jax.tree.leaves(task.params))
    for shard, shared in {None: 0, "optimizer": 2, "state": 3}.items():
        audit = look(task, "h100:8", shard=shard, **options)
        assert audit.memory is not None and audit.memory.peak > audit.memory.resident
        assert f"memory of a device: {audit.memory}" in str(audit)
        held = 3 - shared + shared / 8
        assert audit.memory.resident == pytest.approx(4 * numbers * held, rel=0.02)


@aot
def test_a_program_is_written_into_jaxs_cache_unless_it_is_for_a_target(group, tmp_path, uncached):
    """JAX warns at each later run of a program that cannot be loaded for its target."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
    try:
        jax.clear_caches()
        look(plain_mlp(64), "h100:2", bucket_cap_mb=1000)
        assert not list(tmp_path.glob("jit_spread*"))
        step = fddp.train_step(square, optax.sgd(0.1), group=group(2))
        state = step.init(jnp.ones(()))
        earlier = set(tmp_path.glob("jit_spread*"))
        fddp.audit(step, state, jnp.ones(4))
        assert len(set(tmp_path.glob("jit_spread*")) - earlier) == 1
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
