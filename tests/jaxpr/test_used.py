"""A loss used the leaves on the path of its program; reporting them changes no value and computes
nothing twice."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.sharding import Mesh, PartitionSpec
from tiers import crossed

from fddp.jaxpr.used import statically_used
from fddp.jaxpr.used_at_run_time import tracked

N = 4
LEAVES: list[Any] = [
    np.linspace(-1 + i, 1 + i, 9, dtype=np.float32).reshape(3, 3) for i in range(N)
]
X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
Loss = Callable[[Sequence[Any], Any], Any]
"""`loss(leaves, t)`, with data t for the branches."""


def layer(w: Any, x: Any) -> Any:
    return jnp.sin(x @ w)


def layer_or(first: Any, second: Any, x: Any, t: Any) -> Any:
    """One of two layers, chosen by the data."""
    return jax.lax.cond(t > 0, lambda x: layer(first, x), lambda x: layer(second, x), x)


def with_vjp(f: Callable[..., Any]) -> Callable[..., Any]:
    wrapped = jax.custom_vjp(f)
    wrapped.defvjp(lambda *args: (f(*args), args), lambda args, g: jax.vjp(f, *args)[1](g))
    return wrapped


def with_jvp(f: Callable[..., Any]) -> Callable[..., Any]:
    wrapped = jax.custom_jvp(f)
    wrapped.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
    return wrapped


def with_aux(loss: Loss, t: Any) -> Callable[[Sequence[Any]], tuple[Any, Any]]:
    def f(leaves: Sequence[Any]) -> tuple[Any, Any]:
        value = loss(leaves, t)
        return value if isinstance(value, tuple) else (value, {"twice": 2 * value})

    return f


def used_by(loss: Loss, t: Any) -> list[bool]:
    return tracked(with_aux(loss, t))(LEAVES)[1][1].tolist()


def equations(jaxpr: Jaxpr, name: str) -> int:
    """The number of equations of a kind in a program, at any depth."""
    count = sum(eqn.primitive.name == name for eqn in jaxpr.eqns)
    return count + sum(
        equations(inner, name) for eqn in jaxpr.eqns for inner in jaxprs_in_params(eqn.params)
    )


### Losses, the data, and the leaves that they use

CASES: dict[str, tuple[Loss, dict[int, set[int]]]] = {}


def case(**uses: set[int]) -> Callable[[Loss], Loss]:
    """`t2={0}`: with the datum t = 2 (`m2`: t = −2) leaf 0 is used."""

    def add(loss: Loss) -> Loss:
        name = getattr(loss, "__name__", "loss")
        CASES[name] = (
            loss,
            {int(key[1:]) * (-1 if key[0] == "m" else 1): use for key, use in uses.items()},
        )
        return loss

    return add


@case(t1={0, 2})
def no_path(p: Any, t: Any) -> Any:
    return jnp.sum(layer(p[2], layer(p[0], X)))


@case(t1={0, 1})
def a_product_with_zero_is_a_path(p: Any, t: Any) -> Any:
    return jnp.sum(layer(p[0], X)) + 0.0 * jnp.sum(p[1])


@case(t1={0})
def stop_gradient_ends_a_path(p: Any, t: Any) -> Any:
    return jnp.sum(layer(p[0], X) @ jax.lax.stop_gradient(p[1]))


@case(t1={0})
def argmax_ends_a_path(p: Any, t: Any) -> Any:
    return jnp.sum(layer(p[0], X)[:, jnp.argmax(p[1][0])])


@case(t1={0})
def integers_end_a_path(p: Any, t: Any) -> Any:
    return (
        jnp.sum(layer(p[0], X)) * jnp.sum(p[1].astype(jnp.int32)).astype(jnp.float32)
        + (p[2] > 0).sum()
    )


@case(t1={0})
def aux_is_no_use(p: Any, t: Any) -> Any:
    return jnp.sum(layer(p[0], X)), {"other": jnp.sum(p[1]), "same": [p[2], jnp.arange(3)]}


@case(t1={0, 2, 3}, m1={1, 2, 3})
def cond(p: Any, t: Any) -> Any:
    return jnp.sum(layer(p[3], layer_or(p[0], p[1], X @ p[2], t)))


@case(t0={0, 3}, t1={1, 3}, t2={3}, t7={3})
def switch(p: Any, t: Any) -> Any:
    branches = [lambda x: layer(p[0], x), lambda x: layer(p[1], x), lambda x: x]
    return jnp.sum(layer(p[3], jax.lax.switch(t, branches, X)))


@case(t1={0, 1, 2}, m1={0, 3})
def branches_with_several_outputs(p: Any, t: Any) -> Any:
    first, two = jax.lax.cond(t > 0, lambda: (p[1], p[2]), lambda: (p[3], jnp.zeros((3, 3))))
    return jnp.sum(layer(first, layer(p[0], X))) + jnp.sum(two)


@case(t1={0, 1}, m1={0})
def a_choice_that_only_one_branch_reads(p: Any, t: Any) -> Any:
    return jnp.sum(jax.lax.cond(t > 0, lambda x: x * p[1], lambda x: x, p[0]))


@case(t1={0}, m1={0})
def a_predicate_is_no_use(p: Any, t: Any) -> Any:
    return jnp.sum(jax.lax.cond(p[1].sum() > 0, lambda x: x, lambda x: -x, layer(p[0], X)))


@case(t1={0, 3}, m1={1, 3})
def cond_in_jit(p: Any, t: Any) -> Any:
    return jnp.sum(jax.jit(jax.jit(layer_or))(p[0], p[1], X @ p[3], t))


@case(t1={0, 3}, m1={1, 3})
def cond_in_remat(p: Any, t: Any) -> Any:
    return jnp.sum(jax.checkpoint(layer_or)(p[0], p[1], X @ p[3], t))


@case(t1={0, 3}, m1={1, 3})
def cond_in_remat_with_a_policy(p: Any, t: Any) -> Any:
    rematerialized = partial(
        jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable, prevent_cse=False
    )
    return jnp.sum(rematerialized(layer_or)(p[0], p[1], X @ p[3], t))


@case(t1={0, 3}, m1={1, 3})
def cond_in_custom_vjp(p: Any, t: Any) -> Any:
    return jnp.sum(with_vjp(layer_or)(p[0], p[1], X @ p[3], t * 1.0))


@case(t1={0, 3}, m1={1, 3})
def cond_in_custom_jvp(p: Any, t: Any) -> Any:
    return jnp.sum(with_jvp(layer_or)(p[0], p[1], X @ p[3], t * 1.0))


@case(t2={0, 1, 3}, t1={0, 2, 3}, m1={3})
def cond_in_cond(p: Any, t: Any) -> Any:
    inner = partial(layer_or, p[1], p[2])
    return jnp.sum(
        jax.lax.cond(t > 0, lambda x: inner(layer(p[0], x), t - 1), lambda x: x, X @ p[3])
    )


@case(t1={0, 1, 3}, m1={0, 3}, t9={1, 3})
def cond_in_scan(p: Any, t: Any) -> Any:
    """The second layer in the rounds below t, the first in the others."""
    return jnp.sum(
        jax.lax.scan(
            lambda x, i: (layer_or(p[0], p[1], x, i - t + 0.5), None), X @ p[3], jnp.arange(4)
        )[0]
    )


@case(t1={1, 2}, m1={2})
def outputs_of_a_scan_are_of_all_rounds(p: Any, t: Any) -> Any:
    def body(count: Any, _: Any) -> Any:
        used = jax.lax.cond(count == t, lambda x: layer(p[1], x), lambda x: x, X)
        return count + 1, (used, p[0])

    _, (ys, _) = jax.lax.scan(body, jnp.int32(0), length=3)
    return jnp.sum(ys) + jnp.sum(p[2])


@case(m1={0, 2}, t1={1, 2}, t2={2})
def a_later_round_passes_a_parameter_on(p: Any, t: Any) -> Any:
    """The head of the queue is replaced, in the rounds below t, by the leaf that has moved up by
    then."""

    def body(queue: Any, i: Any) -> Any:
        first, second, third = queue
        return (jax.lax.cond(i < t, lambda: second, lambda: first), third, third), None

    start = (layer(p[0], X), layer(p[1], X), layer(p[2], X))
    (first, _, third), _ = jax.lax.scan(body, start, jnp.arange(3))
    return jnp.sum(first) + jnp.sum(third)


@case(t1={0, 1})
def carries_that_change_places(p: Any, t: Any) -> Any:
    """After five rounds of three, two, the first holds the third leaf."""
    swapped, _ = jax.lax.scan(lambda c, _: ((c[1], c[2], c[0]), None), (p[2], p[3], p[1]), length=5)
    return jnp.sum(layer(p[0], X)) + jnp.sum(swapped[0])


@case(t1={0, 1, 2})
def a_scan_over_stacked_layers(p: Any, t: Any) -> Any:
    stacked = jnp.stack([p[1], p[2]])
    return jnp.sum(jax.lax.scan(lambda x, w: (layer(w, x), p[3]), layer(p[0], X), stacked)[0])


@case(t1={0})
def no_round_of_a_scan(p: Any, t: Any) -> Any:
    last, ys = jax.lax.scan(lambda x, _: (layer_or(p[1], p[2], x, t), x), layer(p[0], X), length=0)
    return jnp.sum(last) + jnp.sum(ys)


@case(t1={0, 1, 3}, m1={0, 2, 3})
def cond_in_remat_in_scan_in_jit(p: Any, t: Any) -> Any:
    def body(x: Any, w: Any) -> Any:
        return jax.checkpoint(lambda x: layer_or(p[1], p[2], x @ w, t))(x), None

    return jnp.sum(jax.jit(lambda x: jax.lax.scan(body, x, jnp.stack([p[0]] * 2))[0])(X @ p[3]))


@case(t1={0, 1}, m1={0, 1})
def vmap_takes_all_branches(p: Any, t: Any) -> Any:
    return jnp.sum(jax.vmap(partial(layer_or, p[0], p[1]))(X, jnp.array([t, t])))


@case(t1={0, 1}, m1={0, 2})
def what_a_mask_passes_through(p: Any, t: Any) -> Any:
    """The choice reaches the loss through a second choice; both of its branches read it."""
    x = layer_or(p[1], p[2], X, t)
    x = jax.lax.cond(t > 5, lambda x: layer(p[3], x), lambda x: 2 * x, x)
    return jnp.sum(jax.jit(layer)(p[0], x))


CHOICES = [(name, t) for name, (_, uses) in CASES.items() for t in uses]


@pytest.mark.steps
@pytest.mark.parametrize("name,t", CHOICES)
def test_used_is_what_a_path_leads_from(name, t):
    loss, uses = CASES[name]
    expected = [i in uses[t] for i in range(N)]
    assert used_by(loss, t) == expected
    jitted = jax.jit(lambda leaves, t: tracked(with_aux(loss, t))(leaves))
    assert jitted(LEAVES, t)[1][1].tolist() == expected


@pytest.mark.steps
@pytest.mark.parametrize("name,t", CHOICES)
@pytest.mark.parametrize(
    "wrap", [pytest.param(lambda f: f, marks=pytest.mark.slow), jax.jit], ids=["eager", "jit"]
)
def test_values_and_gradients_are_the_plain_functions_own(name, t, wrap):
    f = with_aux(CASES[name][0], t)
    (loss, aux), grads = wrap(jax.value_and_grad(f, has_aux=True))(LEAVES)
    (value, (tracked_aux, used)), tracked_grads = wrap(
        jax.value_and_grad(tracked(f), has_aux=True)
    )(LEAVES)
    jax.tree.map(
        np.testing.assert_array_equal, (value, tracked_aux, tracked_grads), (loss, aux, grads)
    )
    assert used.dtype == bool and used.shape == (N,)
    # Unused leaves have no gradient; the converse does not hold.
    assert all(use or not np.any(grad) for use, grad in zip(used, tracked_grads))


@pytest.mark.parametrize("name", CASES)
def test_the_static_answer_holds_for_every_choice(name):
    loss, uses = CASES[name]
    static = [statically_used(with_aux(loss, t), LEAVES) for t in uses]
    assert len(set(static)) == 1
    ever = set.union(*uses.values())
    assert {i for i in range(N) if static[0][i]} >= ever
    if len(uses) == 1:
        assert {i for i in range(N) if static[0][i]} == ever


# The forward part of a rule of its own is repeated: see below.
@pytest.mark.steps
@pytest.mark.parametrize("name,t", [choice for choice in CHOICES if "custom" not in choice[0]])
@pytest.mark.parametrize(
    "kind",
    [
        "dot_general",
        "remat2",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("sin", "cos")),
    ],
)
def test_no_work_is_done_twice(name, t, kind):
    f = with_aux(CASES[name][0], t)
    plain, telling = (
        jax.make_jaxpr(jax.value_and_grad(g, has_aux=True))(LEAVES).jaxpr for g in (f, tracked(f))
    )
    assert equations(telling, kind) == equations(plain, kind)


### Loops that only run forwards


def count_down(p: Any, t: Any) -> Any:
    """Uses the second layer in round 2, and the first in the other rounds."""
    return jax.lax.while_loop(
        lambda state: state[0] > 0,
        lambda state: (
            state[0] - 1,
            layer_or(p[1], p[0], state[1], jnp.where(state[0] == 2, 1, -1)),
        ),
        (t, X @ p[3]),
    )


@pytest.mark.parametrize("t,expected", [(0, {3}), (1, {0, 3}), (2, {0, 1, 3})])
def test_while_counts_the_rounds_that_were_run(t, expected):
    used = used_by(lambda p, t: jnp.sum(count_down(p, t)[1]), jnp.int32(t))
    assert used == [i in expected for i in range(N)]


@pytest.mark.parametrize("t,expected", [(0, {3}), (1, {0, 3}), (2, {0, 3})])
def test_while_without_a_choice_uses_nothing_in_no_round(t, expected):
    def loss(p: Any, t: Any) -> Any:
        step = lambda state: (state[0] - 1, layer(p[0], state[1]))  # noqa: E731
        return jnp.sum(jax.lax.while_loop(lambda state: state[0] > 0, step, (t, X @ p[3]))[1])

    assert used_by(loss, jnp.int32(t)) == [i in expected for i in range(N)]


@pytest.mark.parametrize("t", [0, 2])
def test_while_keeps_its_forward_derivative(t):
    f = with_aux(lambda p, t: jnp.sum(count_down(p, t)[1]), jnp.int32(t))
    plain = jax.jvp(lambda p: f(p)[0], (LEAVES,), (LEAVES,))
    telling = jax.jvp(lambda p: tracked(f)(p)[0], (LEAVES,), (LEAVES,))
    jax.tree.map(np.testing.assert_array_equal, telling, plain)


### Derivatives of their own


@jax.custom_vjp
def with_custom_gradient(x: Any, scale: Any) -> Any:
    return x


with_custom_gradient.defvjp(lambda x, scale: (x, None), lambda _, g: (g, jnp.ones((3, 3))))


def test_what_only_the_rule_reads_is_used():
    f = with_aux(lambda p, t: jnp.sum(with_custom_gradient(layer(p[0], X), p[1])), 1)
    (_, (_, used)), grads = jax.value_and_grad(tracked(f), has_aux=True)(LEAVES)
    assert used.tolist() == [True, True, False, False] and np.all(grads[1] == 1)


def test_a_derivative_past_an_integer_makes_a_use():
    straight = jax.custom_vjp(lambda x: jnp.round(x).astype(jnp.int32).astype(jnp.float32))
    straight.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))
    assert used_by(lambda p, t: jnp.sum(straight(p[0])), 1) == [True, False, False, False]


def test_what_only_the_rule_reads_is_used_beside_a_choice():
    def either(first: Any, second: Any, third: Any, x: Any, t: Any) -> Any:
        return layer_or(first, second, x, t)

    loss = lambda p, t: jnp.sum(with_vjp(either)(p[0], p[1], p[2], X, t * 1.0))  # noqa: E731
    assert used_by(loss, 1) == [True, False, True, False]
    assert used_by(loss, -1) == [False, True, True, False]


def test_a_rule_may_index_a_constant_of_the_program_by_a_traced_number():
    def value(x: Any, y: Any, scale: Any) -> Any:
        return scale * jax.lax.cond(x[0] > 0, lambda: x, lambda: y)

    def rule(scale: Any, g: Any) -> Any:
        return jax.lax.map(lambda i: g[i] * scale[i], jnp.arange(2)), g, None

    scaled = jax.custom_vjp(value)
    scaled.defvjp(lambda *args: (value(*args), args[-1]), rule)
    f = lambda p: (jnp.sum(jax.jit(scaled)(p[0], p[1], jnp.array([2.0, 3.0]))), None)  # noqa: E731
    leaves = [jnp.ones(2), jnp.ones(2)]
    grads, _ = jax.grad(tracked(f), has_aux=True)(leaves)
    jax.tree.map(np.testing.assert_array_equal, grads, jax.grad(f, has_aux=True)(leaves)[0])


def test_a_rule_stays_one_equation():
    program = jax.make_jaxpr(tracked(with_aux(CASES["cond_in_custom_vjp"][0], 1)))(LEAVES).jaxpr
    assert equations(program, "custom_vjp_call") == 1
    assert equations(program, "cond") == 2  # in the rule, and for the masks


### Under transformations


def test_a_program_without_choices_stays_what_it_was():
    f = with_aux(CASES["a_scan_over_stacked_layers"][0], 1)
    plain, telling = (jax.make_jaxpr(g)(LEAVES).jaxpr for g in (f, tracked(f)))
    assert [eqn.primitive for eqn in telling.eqns] == [eqn.primitive for eqn in plain.eqns]


def test_equal_sets_leave_a_branch_as_it_was():
    def f(p: Any) -> Any:
        return jnp.sum(jax.lax.cond(p[1].sum() > 0, jnp.sin, jnp.cos, p[0])), None

    program = jax.make_jaxpr(tracked(f))(LEAVES)
    (branch,) = (eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "cond")
    assert len(branch.outvars) == 1


def test_inside_a_scan_over_data():
    f = lambda t: tracked(with_aux(CASES["cond"][0], t))  # noqa: E731
    _, used = jax.lax.scan(lambda c, t: (c, f(t)(LEAVES)[1][1]), None, jnp.array([1, -1]))
    assert used.tolist() == [[True, False, True, True], [False, True, True, True]]


def test_inside_vmap_each_row_has_its_own():
    used = jax.vmap(lambda t: tracked(with_aux(CASES["cond_in_scan"][0], t))(LEAVES)[1][1])(
        jnp.array([1, -1])
    )
    assert used.tolist() == [[True, True, False, True], [True, False, False, True]]


SPREAD = ["no_path", "cond", "cond_in_scan", "cond_in_remat_in_scan_in_jit", "cond_in_custom_vjp"]


@pytest.mark.steps
@crossed(name=SPREAD, check_vma=[False, True])
def test_inside_shard_map_each_replica_has_its_own(name, check_vma):
    mesh = Mesh(np.array(jax.devices()[:2]), "replica")
    shared = PartitionSpec()
    loss, uses = CASES[name]

    def member(leaves: Any, t: Any) -> Any:
        if check_vma:
            leaves = jax.lax.pcast(leaves, "replica", to="varying")
        f = tracked(with_aux(loss, t[0]))
        (value, (_, used)), grads = jax.value_and_grad(f, has_aux=True)(leaves)
        return value[None], used[None] | (t[0] > 99), [g[None] for g in grads]

    spread = PartitionSpec("replica")
    run = jax.shard_map(
        member, mesh=mesh, in_specs=(shared, spread), out_specs=spread, check_vma=check_vma
    )
    data = [1, -1] if len(uses) > 1 else [1, 1]
    value, used, grads = jax.jit(run)(LEAVES, jnp.array(data))
    for k, t in enumerate(data):
        assert used[k].tolist() == [i in uses[t] for i in range(N)]
        expected = jax.value_and_grad(lambda p, t=t: with_aux(loss, t)(p)[0])(LEAVES)
        close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
        jax.tree.map(close, (value[k], [g[k] for g in grads]), expected)


def test_leaves_without_a_gradient_are_never_used():
    f = lambda p: (jnp.sum(p[0]) * p[1], None)  # noqa: E731
    assert tracked(f)([jnp.array(X), jnp.int32(2)])[1][1].tolist() == [True, False]
    assert statically_used(f, [X, jax.ShapeDtypeStruct((), jnp.int32)]) == (True, False)


def test_a_loss_may_close_over_what_is_being_traced():
    def outer(leaves: Any, x: Any, t: Any) -> Any:
        return tracked(lambda p: (jnp.sum(layer_or(p[0], p[1], x, t)), x))(leaves)

    (_, (_, used)), grads = jax.jit(jax.value_and_grad(outer, argnums=(0, 1), has_aux=True))(
        LEAVES, X, 1
    )
    assert used.tolist() == [True, False, False, False] and np.any(grads[1])


def test_a_loss_may_draw_random_numbers():
    def f(p: Any) -> Any:
        keys = jax.random.split(jax.random.key(0), 2)
        mask = jax.random.bernoulli(keys[0], 0.5, (2, 3))
        return jnp.sum(jnp.where(mask, layer(p[0], X), jax.random.normal(keys[1], (2, 3)))), keys

    np.testing.assert_array_equal(jax.jit(tracked(f))(LEAVES)[1][1], [True, False, False, False])


def root_of(a: Any, c: Any) -> Any:
    """x with x² + a·x = c, by Newton's method: rows take different numbers of rounds."""

    @jax.custom_vjp
    def solve(a: Any, c: Any) -> Any:
        step = lambda x: x - (x * x + a * x - c) / (2 * x + a)  # noqa: E731
        return jax.lax.while_loop(lambda x: abs(x * x + a * x - c) > 1e-4, step, 0 * c + 1.0)

    def forward(a: Any, c: Any) -> Any:
        x = solve(a, c)
        return x, (a, x)

    solve.defvjp(
        forward,
        lambda saved, g: (-g * saved[1] / (2 * saved[1] + saved[0]), g / (2 * saved[1] + saved[0])),
    )
    return solve(a, c)


def test_a_loop_under_vmap_that_parameters_end_keeps_values_and_gradients():
    rows = jnp.asarray([1.0, 3.0, 40.0])
    loss = lambda w: (jnp.sum(jax.vmap(lambda c: root_of(w[0], c))(rows)) + w[1], 0.0)  # noqa: E731
    (value, (_, used)), grads = jax.value_and_grad(tracked(loss), has_aux=True)([2.0, 1.0, 5.0])
    (expected, _), gradients = jax.value_and_grad(loss, has_aux=True)([2.0, 1.0, 5.0])
    assert used.tolist() == [True, True, False]
    np.testing.assert_array_equal(np.asarray([value, *grads]), np.asarray([expected, *gradients]))


def test_a_row_that_has_ended_keeps_what_it_came_from():
    def loss(w: Any) -> Any:
        def row(
            c: Any,
        ) -> Any:  # replaces its value by w[1] in a second round, which the first row has not
            return jax.lax.while_loop(
                lambda s: s[0] < c * w[2], lambda s: (s[0] + 1, w[1]), (0.0, w[0])
            )[1]

        return jnp.sum(jax.vmap(row)(jnp.asarray([0.0, 1.0]))), 0.0

    value, (_, used) = tracked(loss)([jnp.float32(x) for x in (2, 3, 1)])
    assert float(value) == 5.0 and used.tolist() == [True, True, False]


def by_a_ref(w: Any) -> Any:
    ref = jax.new_ref(jnp.float32(0))
    ref[...] = w[0] * 2
    return ref[...] + w[1]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: f,
        jax.jit,
        lambda f: lambda w: jax.lax.scan(lambda c, _: (f(w), c), 0.0, None, 2)[0],
    ],
)
def test_what_is_written_to_a_ref_is_used(wrap: Callable[..., Any]):
    (value, (_, used)), grads = jax.value_and_grad(
        tracked(lambda w: (wrap(by_a_ref)(w), 0.0)), has_aux=True
    )([3.0, 4.0, 5.0])
    assert (float(value), used.tolist(), list(map(float, grads))) == (
        10.0,
        [True, True, False],
        [2.0, 1.0, 0.0],
    )
    assert statically_used(wrap(by_a_ref), [3.0, 4.0, 5.0]) == (True, True, False)
