"""Claims about cutting a program: `fddp.jaxpr.stages`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback
from jax.extend.core import jaxpr_as_fun

from fddp.jaxpr.equations import collectives, straighten
from fddp.jaxpr.stages import arrivals, cut


def run_stages(stages, closed, args):
    """Runs stages without a schedule: values by number, results in order."""
    values = dict(enumerate(args))
    results = []
    for stage in stages:
        outputs = stage.run(*(values[number] for number in stage.reads))
        values.update(zip(stage.writes, outputs))
        results += outputs[len(stage.writes) :]
    assert len(results) == len(closed.jaxpr.outvars)
    return results


def net(params, x):
    for w in params:
        x = jax.nn.relu(x @ w)
    return jnp.mean(x**2)


def gradient_program(layers=5):
    params = [np.random.default_rng(k).normal(size=(6, 6)) for k in range(layers)]
    x = np.random.default_rng(9).normal(size=(4, 6))
    return jax.make_jaxpr(lambda p, x: jax.grad(net)(p, x)[::-1])(params, x), [*params, x]


@pytest.mark.parametrize("groups", [[5], [1, 4], [2, 2, 1], [1, 1, 1, 1, 1]])
def test_stages_one_after_the_other_give_what_the_program_gives(groups):
    closed, args = gradient_program()
    expected = jaxpr_as_fun(closed)(*args)
    for got, want in zip(run_stages(cut(closed, groups), closed, args), expected):
        np.testing.assert_array_equal(got, want)


def heavy(jaxpr):
    return sum(eqn.primitive.name == "dot_general" for eqn in jaxpr.eqns)


def test_no_product_is_computed_twice_or_before_it_is_needed():
    closed, args = gradient_program()
    stages = cut(closed, [1] * 5)
    counts = []
    values = dict(enumerate(args))
    for stage in stages:
        read = [values[number] for number in stage.reads]
        counts.append(heavy(jax.make_jaxpr(stage.run)(*read).jaxpr))
        values.update(zip(stage.writes, stage.run(*read)))
    # Five products forward and the last layer's gradient; then, per layer, its input's and its
    # weight's.
    assert counts == [6, 2, 2, 2, 2]
    assert sum(counts) == heavy(straighten(closed).jaxpr)


def test_what_waits_for_no_input_that_it_does_not_need_is_done_before():
    closed, args = gradient_program()
    comes = {layer: layer for layer in range(1, 5)}
    stages = cut(closed, [1] * 5, comes)
    # The forward pass of one layer after the other as its weights come; then as without.
    assert [stage.results for stage in stages] == [0, 0, 0, 0, 1, 1, 1, 1, 1]
    for layer, stage in enumerate(stages[:5]):
        assert {number for number in stage.reads if number < 5} <= set(range(layer + 1))
    counts = []
    values = dict(enumerate(args))
    for stage in stages:
        read = [values[number] for number in stage.reads]
        counts.append(heavy(jax.make_jaxpr(stage.run)(*read).jaxpr))
        values.update(zip(stage.writes, stage.run(*read)))
    assert counts == [1, 1, 1, 1, 2, 2, 2, 2, 2]
    for got, want in zip(run_stages(stages, closed, args), jaxpr_as_fun(closed)(*args)):
        np.testing.assert_array_equal(got, want)
    # An input that comes late is waited for by its own result only.
    program = jax.make_jaxpr(lambda x, y: (jnp.sin(x), y))(1.0, 1.0)
    assert [stage.reads for stage in cut(program, [1, 1], {1: 1})] == [(0,), (1,)]


def test_a_mask_is_made_anew_and_not_handed_on():
    closed, _ = gradient_program()
    first, *_ = cut(closed, [1] * 5)
    # Of each layer that is still to come only the product is kept, not relu's output or mask; and
    # the cotangent.
    assert len(first.writes) <= 6


def test_outputs_that_are_inputs_constants_or_shared_are_results_too():
    table = jnp.arange(3.0)
    closed = jax.make_jaxpr(lambda x: (x, 2.0, (y := jnp.sin(x) + table), y, jnp.cos(y)))(
        jnp.ones(3)
    )
    got = run_stages(cut(closed, [1, 1, 1, 1, 1]), closed, [jnp.ones(3)])
    for value, want in zip(got, jaxpr_as_fun(closed)(jnp.ones(3))):
        np.testing.assert_array_equal(value, want)


def test_a_print_happens_once(capfd):
    def program(x):
        jax.debug.print("seen {}", x[0])
        return jnp.sin(x), jnp.cos(x)

    closed = jax.make_jaxpr(program)(jnp.ones(2))
    run_stages(cut(closed, [1, 1]), closed, [jnp.ones(2)])
    jax.effects_barrier()
    assert capfd.readouterr().out.count("seen") == 1


def test_what_acts_in_order_acts_in_the_same_order_in_stages():
    """The second call is needed by the first group, the others by none."""
    calls = []

    def tells(name):
        return lambda x: (calls.append(name), np.asarray(x))[1]

    def f(x):
        form = jax.ShapeDtypeStruct(x.shape, x.dtype)
        io_callback(tells("first"), form, x, ordered=True)
        y = io_callback(tells("second"), form, x, ordered=True)
        io_callback(tells("third"), form, x, ordered=True)
        return y, jnp.sin(x)

    x = jnp.ones(2)
    closed = jax.make_jaxpr(f)(x)
    run_stages(cut(closed, [1, 1]), closed, [x])
    jax.effects_barrier()
    assert calls == ["first", "second", "third"]


def test_what_acts_in_order_waits_for_the_late_input_of_what_acts_before():
    calls = []

    def program(late, early):
        io_callback(lambda x: calls.append("first"), None, late, ordered=True)
        second = lambda x: (calls.append("second"), np.asarray(x))[1]  # noqa: E731
        return late, 2 * io_callback(
            second, jax.ShapeDtypeStruct((), jnp.float32), early, ordered=True
        )

    closed = jax.make_jaxpr(program)(1.0, 2.0)
    assert run_stages(cut(closed, [2], {0: 1}), closed, [1.0, 2.0]) == [1, 4]
    jax.effects_barrier()
    assert calls == ["first", "second"]


def test_groups_must_hold_all_outputs():
    closed, _ = gradient_program()
    with pytest.raises(ValueError, match=r"5 outputs, got \[1, 1\]"):
        cut(closed, [1, 1])


def test_collectives_are_found_at_any_depth():
    def inside(x):
        return jax.lax.scan(
            lambda c, _: (jax.checkpoint(lambda c: jax.lax.pmean(c, "i"))(c), None), x, length=2
        )[0]

    closed = jax.make_jaxpr(jax.jit(inside), axis_env=[("i", 2)])(1.0)
    assert len(collectives(closed)) == 1
    assert not collectives(gradient_program()[0])


### The earliest time of each value


def test_an_output_waits_for_the_last_of_the_inputs_it_needs():
    def update(state, first, second, third):
        return state + 1, jnp.sin(first), first * third, jax.jit(jnp.cos)(second), third

    closed = jax.make_jaxpr(update)(0.0, 1.0, 2.0, 3.0)
    assert arrivals(closed, {1: 0, 2: 1, 3: 2}) == [0, 0, 2, 1, 2]


def test_what_depends_on_all_waits_for_all():
    """Clipping by the global norm: no parameter moves before the last gradient is there."""
    clip = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    params = [jnp.ones(2), jnp.ones(3)]

    def update(*grads):
        return optax.apply_updates(params, clip.update(list(grads), clip.init(params))[0])

    assert arrivals(jax.make_jaxpr(update)(*params), {0: 0, 1: 1}) == [1, 1]
