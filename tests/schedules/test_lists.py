"""Lists of tasks: their contents, without running anything; and any launcher runs any list."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from truth import by_plain_jax

import fddp
from fddp.comm.placement import REPLICATED
from fddp.schedules import (
    SCHEDULES,
    Schedule,
    in_one_piece,
    in_one_program,
    in_order,
    in_stages,
    on_threads,
)
from fddp.schedules.ahead_of_time import compiled
from fddp.schedules.pieces import Pieces
from fddp.schedules.queues import HERE, routed
from fddp.schedules.stage_tasks import stages_of
from fddp.schedules.tasks import TaskList
from fddp.schedules.values import Value


def net(params: Any, batch: Any) -> jax.Array:
    for w in params["layers"]:
        batch = jnp.tanh(batch @ w)
    return jnp.mean((batch - params["target"]) ** 2)


PARAMS = {
    "layers": [np.random.default_rng(k).normal(size=(3, 3)).astype(np.float32) for k in range(4)],
    "target": np.ones(3, np.float32),
}
ROWS = np.random.default_rng(9).normal(size=(8, 3)).astype(np.float32)


def listed(group: fddp.Group, schedule: Any, **options: Any) -> TaskList:
    """The list of a step; only shapes are given."""
    step = fddp.train_step(
        net, optax.adam(0.1), group=group, schedule=schedule, bucket_cap_mb=0, **options
    )
    return step.tasks(step.shapes(PARAMS), jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype))


### Contents of a list


def test_a_whole_list_is_the_backward_pass_then_all_messages_then_the_update(group):
    tasks = listed(group(2), "after").tasks
    assert [task.name for task in tasks] == [
        "backward",
        *(f"bucket {k}" for k in range(5)),
        "update",
    ]
    assert tasks[0].writes == (*(f"message {k}" for k in range(5)), "kept by backward")
    assert [task.reads for task in tasks[1:-1]] == [(f"message {k}",) for k in range(5)]
    assert listed(group(2), "fused").tasks[1].reads == ("message 0",)


def test_a_list_for_numpy_s_rows_of_64_bits_is_that_of_the_rows_as_jax_takes_them(group):
    """No forms are built that JAX would have to shorten with a warning."""
    step = fddp.train_step(net, optax.adam(0.1), group=group(2), schedule="staged", bucket_cap_mb=0)
    state = step.init(PARAMS)
    wide = step.tasks(
        jax.tree.map(lambda x: np.asarray(x, np.result_type(x.dtype, np.int64)), state),
        ROWS.astype(float),
    )
    assert str(wide) == str(step.tasks(state, ROWS))


def test_a_cut_list_sends_each_message_behind_the_stage_that_makes_it(group):
    tasks = listed(group(2), "staged").tasks
    stages, updates = [[f"{kind} {k}" for k in range(5)] for kind in ("stage", "update")]
    sends = [f"bucket {k}" for k in range(5)]
    assert [task.name for task in tasks] == [
        *(name for pair in zip(stages, sends) for name in pair),
        *updates,
    ]
    by_name = {task.name: task for task in tasks}
    for k in range(5):
        assert f"message {k}" in by_name[f"stage {k}"].writes
        assert (by_name[f"bucket {k}"].reads, by_name[f"bucket {k}"].writes[0]) == (
            (f"message {k}",),
            f"sum {k}",
        )
    # The target's gradient is ready first, and the last layer's next: the first stage reads the
    # whole forward pass.
    assert "state/params/target" in by_name["stage 0"].reads and "rows" in by_name["stage 0"].reads


@pytest.mark.parametrize("schedule", ["staged", "after"])
def test_a_task_reads_what_was_there_or_was_written_before(group, schedule):
    tasks = listed(group(2), schedule, find_unused_parameters=True)
    written = set[str]()
    everything = {name for task in tasks.tasks for name in task.writes}
    for task in tasks.tasks:
        assert everything & set(task.reads) <= written, task.name
        assert not written & set(task.writes), "a value is written once"
        written |= set(task.writes)
    assert "bytes" in tasks.messages[-1].writes


def test_a_cut_list_has_a_stage_a_message_and_an_update_for_each_bucket_in_turn(group):
    tasks = listed(group(2), "staged").tasks
    stages = [f"{name} {k}" for k in range(5) for name in ("stage", "bucket")]
    assert [task.name for task in tasks] == [*stages, *(f"update {k}" for k in range(5))]
    for task in tasks[len(stages) :]:
        # An update may need less than all that is back, and never more.
        sums = [name for name in task.reads if name.startswith("sum")]
        assert all(int(name.split()[1]) <= int(task.name.split()[1]) for name in sums)


def test_a_list_is_printed_with_what_each_task_reads_and_writes(group):
    text = str(listed(group(2), "staged"))
    assert "communication  bucket 0  message 0" in text and "state/params/layers/0" in text


def test_names_of_paths_that_read_alike_differ(group):
    params = {"a": {"b": np.ones(2, np.float32)}, "a/b": np.full(2, 3, np.float32)}
    loss = lambda p, x: jnp.mean((x * p["a"]["b"] - p["a/b"]) ** 2)  # noqa: E731
    results = []
    for schedule in ("staged", "fused"):
        step = fddp.train_step(
            loss, optax.sgd(0.1), group=group(2), schedule=schedule, bucket_cap_mb=0
        )
        results.append(step(step.init(params), np.ones((4, 2), np.float32))[0].params)
    jax.tree.map(np.testing.assert_array_equal, *results)


### Any launcher runs any list

SGD = optax.sgd(0.5)
LISTS = {"whole": in_one_piece, "cut": in_stages}
LAUNCHERS: dict[str, Callable[..., Any]] = {
    "one program": in_one_program,
    "in order": in_order,
    "in order, compiled": partial(in_order, programs=compiled),
    "on threads": on_threads,
}


@pytest.mark.steps
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("n", [1, 2])
def test_every_launcher_gives_what_plain_jax_gives_for_every_list(
    group, n, name, launcher, monkeypatch
):
    def schedule(group: fddp.Group, pieces: Pieces, donate: bool) -> Any:
        return LAUNCHERS[launcher](group, partial(LISTS[name], group.placement, pieces), donate)

    monkeypatch.setitem(SCHEDULES, "fused", Schedule("fused", schedule))
    step = fddp.train_step(
        net, SGD, group=group(n), schedule="fused", bucket_cap_mb=0, donate=False
    )
    expected, _, losses, _ = by_plain_jax(net, SGD, PARAMS, [ROWS] * 2)
    state = step.init(PARAMS)
    for value in losses:
        state, info = step(state, ROWS)
        np.testing.assert_allclose(info.loss, value, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), state.params, expected
    )


### Compiled stages


def list_of_program(
    group: Callable[[int], fddp.Group],
    f: Any,
    args: Sequence[Any],
    groups: Sequence[Sequence[int]],
    donate: bool = False,
) -> tuple[list[jax.Array], dict[str, Any], list[jax.Array]]:
    """The outputs of a program that is run in stages, the programs, and its inputs."""
    placement = group(1).placement
    leaves = [placement.place(np.asarray(x, np.float32), REPLICATED) for x in args]
    closed = jax.make_jaxpr(f)(*leaves)
    names = [Value("state", path=str(k)) for k in range(len(leaves))]
    results = [Value("result", path=str(k)) for k in range(len(closed.out_avals))]
    tasks = stages_of("stage", "compute", closed, names, results, groups)
    values = dict(zip(names, leaves))
    listed = TaskList(tuple(tasks), lambda *_: values, lambda values: (values, ()))
    gives = routed(tasks, lambda task: HERE, results).freed if donate else {}
    programs = compiled(placement, listed, values, gives, lambda what: nullcontext())
    for task in tasks:
        values.update(zip(task.writes, programs[task.name](*(values[name] for name in task.reads))))
    return [values[name] for name in results], programs, leaves


def chain(x, *weights):
    for w in weights:
        x = jnp.sin(x @ w)
        yield x


WEIGHTS = [np.random.default_rng(k).normal(size=(3, 3)) for k in range(4)]


@pytest.mark.parametrize("groups", [[[0, 1, 2, 3]], [[0], [1], [2], [3]], [[2], [0, 3], [1]]])
def test_outputs_are_those_of_the_program_in_any_order(group, groups):
    outputs, _, _ = list_of_program(
        group, lambda *a: list(chain(*a)), [np.ones((2, 3)), *WEIGHTS], groups
    )
    for got, want in zip(
        outputs, chain(jnp.ones((2, 3)), *(jnp.asarray(w, jnp.float32) for w in WEIGHTS))
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_equal_stages_are_compiled_once(group):
    """Layers of equal shape: a network ten times as deep compiles no longer."""
    _, programs, _ = list_of_program(
        group, lambda *a: list(chain(*a)), [np.ones((2, 3)), *WEIGHTS], [[0], [1], [2], [3]]
    )
    first, *middle, last = programs.values()
    assert len(set(map(id, middle))) == 1
    # The first reads an input, the last hands nothing on.
    assert len({id(first), id(middle[0]), id(last)}) == 3


def test_stages_that_differ_in_a_constant_are_different_programs(group):
    def f(x):
        return [jnp.sin(x) + np.arange(3.0), jnp.sin(x) + np.array([0.0, 1.0, 5.0])]

    (a, b), _, _ = list_of_program(group, f, [np.zeros(3)], [[0], [1]])
    assert (a.tolist(), b.tolist()) == ([0, 1, 2], [0, 1, 5])


def test_a_donated_input_lives_until_the_last_stage_that_reads_it(group):
    outputs, _, (a, b) = list_of_program(
        group,
        lambda a, b: [jnp.sin(a), jnp.sin(a * b)],
        [np.ones(3), np.ones(3)],
        [[0], [1]],
        donate=True,
    )
    assert a.is_deleted() and not b.is_deleted()
    np.testing.assert_allclose(outputs[1], np.sin(np.ones(3)), rtol=1e-6)


def test_an_input_is_donated_only_where_an_output_can_have_its_memory(group):
    """A warning of JAX's ends a test: no donation may be in vain."""
    f = lambda n, x: [n + 1, x * n]  # noqa: E731
    _, _, (n, x) = list_of_program(group, f, [np.zeros(()), np.ones(3)], [[0], [1]], donate=True)
    assert x.is_deleted() and not n.is_deleted()
    _, _, (a, b) = list_of_program(
        group, lambda a, b: [a + b], [np.ones(3), np.ones(3)], [[0]], donate=True
    )
    assert [a.is_deleted(), b.is_deleted()] == [True, False]


def test_a_stage_for_which_there_is_nothing_to_do_does_nothing(group):
    outputs, programs, _ = list_of_program(group, lambda a: [a + 1], [np.ones(3)], [[], [0], []])
    assert outputs[0].tolist() == [2, 2, 2]
    assert programs["stage 0"]() == programs["stage 2"]() == ()


def test_stages_that_call_different_functions_of_the_host_are_different_programs(group):
    form = jax.ShapeDtypeStruct((3,), np.float32)

    def on_host(number):
        return lambda x: jax.pure_callback(lambda x: np.asarray(x + np.float32(number)), form, x)

    (a, b), _, _ = list_of_program(
        group, lambda x: [on_host(1)(x), on_host(2)(x)], [np.zeros(3)], [[0], [1]]
    )
    assert (a.tolist(), b.tolist()) == ([1] * 3, [2] * 3)
