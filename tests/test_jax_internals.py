"""The installed JAX has the internals that fddp reads: a failure's name ends with its version."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Jaxpr, JaxprEqn, jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from processes import STRICT, free_port

from fddp import jax_internals as internals

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True, params=[jax.__version__], ids="jax-{}".format)
def on_this_jax() -> None:
    """Puts the version into each test's name."""


def names(jaxpr: Jaxpr) -> set[str]:
    """Primitives of a program, at any depth."""
    inside = (names(inner) for eqn in jaxpr.eqns for inner in internals.inner_programs(eqn))
    return {eqn.primitive.name for eqn in jaxpr.eqns}.union(*inside)


def equation(name: str, f: Callable[..., Any], *args: Any) -> JaxprEqn:
    """The one equation of that name in a function's program."""
    (match,) = (eqn for eqn in jax.make_jaxpr(f)(*args).jaxpr.eqns if eqn.primitive.name == name)
    return match


def shapes(values: Sequence[Any]) -> list[tuple[int, ...]]:
    """The shapes of variables and literals."""
    return [value.aval.shape for value in values]


### Arrays


@pytest.mark.parametrize(
    "make", [lambda: np.arange(16.0), lambda: jax.random.key(0)], ids=["numbers", "a key"]
)
@pytest.mark.parametrize("devices", [1, 4])
def test_the_parts_of_an_array_are_those_of_its_devices(make, devices):
    mesh = Mesh(np.array(jax.devices()[:devices]), "replica")
    x = jax.device_put(make(), NamedSharding(mesh, PartitionSpec()))
    assert [part.devices() for part in internals.parts_here(x)] == [
        {device} for device in mesh.devices
    ]


def test_an_array_is_given_away_when_a_part_of_it_is():
    mesh = Mesh(np.array(jax.devices()[:4]), "replica")
    x, y = (jax.device_put(np.arange(16.0), NamedSharding(mesh, PartitionSpec())) for _ in range(2))
    assert not internals.given_away(x)
    view = np.asarray(x)  # a look at the first device's
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    assert internals.given_away(x) and view[1] == 1 and not internals.given_away(y)


### Programs


def test_a_program_made_of_equations_runs_them_on_its_inputs_and_constants():
    table = np.arange(3.0)
    closed = jax.make_jaxpr(lambda x, y: (jnp.sin(x) * table, y))(jnp.ones(3), 2.0)
    jaxpr = closed.jaxpr
    consts = dict(zip(jaxpr.constvars, closed.consts))
    x, y = jaxpr.invars
    program = internals.make_program(closed, jaxpr.eqns, [y, x], [y, jaxpr.outvars[0]], consts)
    assert (len(program.jaxpr.invars), len(program.jaxpr.eqns)) == (2, len(jaxpr.eqns))
    unchanged, product = jaxpr_as_fun(program)(5.0, jnp.ones(3))
    assert unchanged == 5
    np.testing.assert_allclose(product, np.sin(1) * table, rtol=1e-6)
    identity = internals.make_program(closed, [], [x], [x])
    assert jaxpr_as_fun(identity)(jnp.ones(3))[0].tolist() == [1, 1, 1]


def test_what_a_program_of_equations_does_it_still_does():
    values = []
    closed = jax.make_jaxpr(lambda x: jax.debug.callback(lambda x: values.append(float(x)), x))(1.0)
    program = internals.make_program(closed, closed.jaxpr.eqns, closed.jaxpr.invars, [])
    jax.jit(jaxpr_as_fun(program))(3.0)
    jax.effects_barrier()
    assert values == [3]


def test_a_new_variable_has_the_form_of_the_old_one_and_is_another():
    old = jax.make_jaxpr(jnp.sin)(jnp.ones((2, 3))).jaxpr.invars[0]
    new = internals.new_variable(old)
    assert new is not old and new != old
    assert new.aval == old.aval


@pytest.mark.steps
def test_arrays_without_elements_go_into_functions_over_axes_with_others():
    # A compiler that cannot take them crashes: not this process.
    run_python("""
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import Mesh, PartitionSpec as P
        from fddp.jax_internals import over_axes

        jax.config.update("jax_num_cpu_devices", 4)
        mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("replica", "model"))

        def inner(tree, x):
            shapes = {"none": (3, 0), "rows": (0, 2), "key": (0,)}
            assert jax.tree.map(jnp.shape, tree) == shapes, tree
            return tree, x + 1

        def outer(tree, x):
            shapes = {"none": (3, 0), "rows": (0, 4), "key": (0,)}
            assert jax.tree.map(jnp.shape, (tree, x)) == (shapes, (2, 4))
            where = {"none": P(), "rows": P(None, "model"), "key": P()}, P(None, "model")
            f = over_axes(inner, in_specs=where, out_specs=where, axis_names={"model"})
            tree, x = f(tree, x)
            return tree, jax.lax.psum(x, "replica")

        specs = {"in_specs": (P(), P("replica")), "out_specs": (P(), P())}
        f = over_axes(outer, mesh=mesh, **specs, axis_names={"replica"})
        none, rows = jnp.zeros((3, 0), jnp.bfloat16), jnp.zeros((0, 4), jnp.int32)
        tree = {"none": none, "rows": rows, "key": jax.random.split(jax.random.key(0), 0)}
        tree, x = jax.jit(f)(tree, jnp.ones((4, 4)))
        assert jax.tree.map(jnp.shape, tree) == {"none": (3, 0), "rows": (0, 4), "key": (0,)}, tree
        assert (tree["none"].dtype, tree["rows"].dtype) == (jnp.bfloat16, jnp.int32)
        np.testing.assert_array_equal(x, np.full((2, 4), 4))
    """)


### Equations


def test_effects_may_be_a_dict_as_mpi4jax_has_them():
    eqn: Any = SimpleNamespace(effects={"token": None})
    assert internals.acts_alike(eqn, eqn)


def test_a_print_acts_and_a_product_does_not():
    assert internals.acts(equation("debug_print", lambda x: jax.debug.print("{}", x), 1.0))
    assert not internals.acts(equation("mul", lambda x: 2 * x, 1.0))


@jax.custom_jvp
def slope_five(x: Any) -> Any:
    return 3 * x


slope_five.defjvps(lambda tangent, out, x: 5 * tangent)


@jax.custom_vjp
def slope_seven(x: Any) -> Any:
    return 3 * x


slope_seven.defvjp(lambda x: (3 * x, None), lambda _, g: (7 * g,))

CALLS = {
    "jit": (jax.jit(lambda x: 3 * x), internals.WRAPPERS),
    "checkpoint": (jax.checkpoint(lambda x: 3 * x), internals.REMATERIALISED),
    "custom_jvp": (slope_five, internals.OWN_DERIVATIVE),
    "custom_vjp": (slope_seven, internals.OWN_DERIVATIVE),
}


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_is_known_by_its_name_and_holds_its_program(kind):
    f, kinds = CALLS[kind]
    (eqn,) = jax.make_jaxpr(lambda x: f(x))(1.0).jaxpr.eqns
    assert eqn.primitive.name in kinds & internals.CALLS
    assert jaxpr_as_fun(internals.called_program(eqn))(2.0) == [6]
    assert names(internals.called_program(eqn).jaxpr) == {"mul"}
    assert [names(inner) for inner in internals.inner_programs(eqn)] == [{"mul"}]


def test_the_calls_in_the_gradient_of_a_rematerialised_function_are_known():
    loop = jax.checkpoint(lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, 2)[0])
    closed = jax.make_jaxpr(jax.value_and_grad(loop))(1.0)
    called = {eqn.primitive.name for eqn in closed.jaxpr.eqns if internals.inner_programs(eqn)}
    assert called & internals.REMATERIALISED
    assert called <= internals.CALLS


@pytest.mark.parametrize(("kind", "slope"), [("custom_jvp", 5), ("custom_vjp", 7), ("jit", 3)])
def test_an_equation_that_is_run_again_keeps_its_own_derivative(kind, slope):
    (eqn,) = jax.make_jaxpr(lambda x: CALLS[kind][0](x))(1.0).jaxpr.eqns
    value, gradient = jax.value_and_grad(lambda x: internals.run_again(eqn, [x])[0])(2.0)
    assert (value, gradient) == (6, slope)


def test_an_equation_that_runs_again_keeps_its_context_and_its_name():
    def marked(x):
        with set_xla_metadata(place="first"), jax.named_scope("one"):
            return jnp.sin(x)

    (eqn,) = jax.make_jaxpr(marked)(1.0).jaxpr.eqns
    text = jax.jit(lambda x: internals.run_again(eqn, [x])).lower(1.0).as_text(debug_info=True)
    assert 'place = "first"' in text
    assert "/one/sin" in text


def test_what_is_rematerialised_like_an_equation_has_its_policy():
    policy = jax.checkpoint_policies.everything_saveable
    (eqn,) = jax.make_jaxpr(jax.checkpoint(jnp.sin, policy=policy, prevent_cse=False))(
        1.0
    ).jaxpr.eqns
    (remat,) = jax.make_jaxpr(internals.rematerialised(jnp.cos, eqn))(1.0).jaxpr.eqns
    assert remat.primitive == eqn.primitive
    assert {key: remat.params[key] for key in ("policy", "prevent_cse")} == {
        "policy": policy,
        "prevent_cse": False,
    }


def test_an_equation_is_named_as_another_one_behind_the_name_here():
    def scoped(x: Any) -> Any:
        with jax.named_scope("one"):
            return jnp.sin(x)

    (eqn,) = jax.make_jaxpr(scoped)(1.0).jaxpr.eqns

    def named(x: Any) -> Any:
        with jax.named_scope("outer"), internals.named_as(eqn):
            return jnp.cos(x)

    (repeated,) = jax.make_jaxpr(named)(1.0).jaxpr.eqns
    assert internals.scope_of(repeated) == "outer/one"


def test_branches_are_in_the_order_of_their_numbers_and_come_before_their_inputs():
    def chosen(i: Any, x: Any) -> Any:
        return jax.lax.switch(i, [lambda x: x + 10, lambda x: x + 20, lambda x: x + 30], x)

    eqn = equation("cond", chosen, 1, 2.0)
    assert len(eqn.invars) == 2
    assert [jaxpr_as_fun(branch)(2.0) for branch in internals.branches(eqn)] == [[12], [22], [32]]


def test_branches_for_platforms_are_told_from_branches_for_data():
    def by_platform(x: Any) -> Any:
        return jax.lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)

    assert internals.is_for_platforms(equation("cond", by_platform, 1.0))
    assert not internals.is_for_platforms(
        equation("cond", lambda x: jax.lax.cond(x > 0, jnp.sin, jnp.cos, x), 1.0)
    )


def scanned(a: Any, rows: Any) -> Any:
    """A scan with one constant, a carry of two and rows of one; its rounds make three."""

    def body(carry: Any, row: Any) -> Any:
        total, count = carry
        return (total * a + row, count + 1), (total, 2 * row, count)

    return jax.lax.scan(body, (jnp.ones(2), 0), rows, reverse=True, unroll=2)


ROWS = jnp.arange(10.0).reshape(5, 2)


def test_the_inputs_of_a_scan_are_constants_carry_and_rows():
    eqn = equation("scan", scanned, 2.0, ROWS)
    assert internals.loop_parts(eqn, shapes(eqn.invars)) == ([()], [(2,), ()], [(5, 2)])


def test_the_inputs_of_a_while_are_constants_of_test_and_body_and_its_carry():
    def looped(last: Any, x: Any, y: Any) -> Any:
        return jax.lax.while_loop(
            lambda s: s[1] < last, lambda s: (s[0] * x + y, s[1] + 1), (jnp.ones(2), 0)
        )

    eqn = equation("while", looped, 3, 2.0, jnp.ones(2))
    of_test, of_body, carry = internals.loop_parts(eqn, shapes(eqn.invars))
    assert (of_test, sorted(of_body), carry) == ([()], [(), (2,)], [(2,), ()])
    test, body = internals.while_programs(eqn)
    assert jaxpr_as_fun(test)(3, jnp.ones(2), 2) == [True]
    assert jaxpr_as_fun(test)(3, jnp.ones(2), 3) == [False]
    assert len(jaxpr_as_fun(body)(*map(jnp.ones, of_body), jnp.ones(2), 2)) == 2


def scans(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """The scans of a program, at any depth."""
    inside = (
        eqn
        for outer in jaxpr.eqns
        for inner in internals.inner_programs(outer)
        for eqn in scans(inner)
    )
    return [*(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"), *inside]


def summed(a: Any) -> Any:
    (total, _), (row_outputs, *_) = scanned(a, ROWS)
    return jnp.sum(total) + jnp.sum(row_outputs)


CHANGED = {
    "grad": jax.grad(summed),
    "vmap": lambda a: jax.vmap(jax.grad(summed))(jnp.stack([a, a])),
    "checkpoint": jax.grad(jax.checkpoint(summed)),
    "jvp": lambda a: jax.jvp(summed, (a,), (a,)),
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_scan_that_jax_has_changed_still_tells_what_its_inputs_are(change):
    loops = scans(jax.make_jaxpr(CHANGED[change])(2.0).jaxpr)
    assert loops
    for eqn in loops:
        consts, carry, rows = internals.loop_parts(eqn, shapes(eqn.invars))
        body, options = internals.scan_body(eqn)
        inputs, outputs = map(shapes, (body.jaxpr.invars, body.jaxpr.outvars))
        # A body receives a row of the rows, and returns its carry unchanged.
        assert [*consts, *carry, *(shape[1:] for shape in rows)] == inputs
        assert {shape[0] for shape in rows} <= {options["length"]}
        assert carry == outputs[: len(carry)]


def test_a_scan_is_made_again_from_its_body_and_its_options():
    eqn = equation("scan", scanned, 2.0, ROWS)
    consts, carry, rows = internals.loop_parts(eqn, [2.0, jnp.ones(2), 0, ROWS])
    body, options = internals.scan_body(eqn)
    assert options == {"length": 5, "reverse": True, "unroll": 2}

    def round_of_body(state: Any, row: Any) -> Any:
        outputs = jaxpr_as_fun(body)(*consts, *state, *row)
        return outputs[: len(carry)], outputs[len(carry) :]

    final_carry, outputs = jax.lax.scan(round_of_body, carry, rows, **options)
    for got, want in zip(
        [*final_carry, *outputs], jax.tree.leaves(scanned(2.0, ROWS)), strict=True
    ):
        np.testing.assert_array_equal(got, want)


COLLECTIVES = {
    "psum": lambda x: jax.lax.psum(x, "replica"),
    "pmean": lambda x: jax.lax.pmean(x, "replica"),
    "pmax": lambda x: jax.lax.pmax(x, "replica"),
    "pmin": lambda x: jax.lax.pmin(x, "replica"),
    "ppermute": lambda x: jax.lax.ppermute(x, "replica", [(0, 1), (1, 0)]),
    "all_gather": lambda x: jax.lax.all_gather(x, "replica"),
    "all_to_all": lambda x: jax.lax.all_to_all(x, "replica", 0, 0),
    "psum_scatter": lambda x: jax.lax.psum_scatter(x, "replica"),
}


def over_replicas(f: Callable[[Any], Any], check_vma: bool) -> set[str]:
    """Primitives of a function of one of two replicas."""
    mesh = jax.sharding.Mesh(jax.devices()[:2], "replica")
    spec = PartitionSpec("replica")
    spread = jax.shard_map(
        lambda x: x + jnp.sum(f(x)), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
    )
    return names(jax.make_jaxpr(spread)(jnp.ones(4)).jaxpr)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_a_collective_is_known_by_its_name(kind, check_vma):
    assert over_replicas(COLLECTIVES[kind], check_vma) & internals.COLLECTIVES
    assert not over_replicas(jnp.sin, check_vma) & internals.COLLECTIVES


def test_the_sum_that_jax_itself_makes_of_gradients_is_a_collective():
    def gradient(x: Any) -> Any:
        return jax.grad(lambda w: jnp.sum(w * x))(1.0)

    assert over_replicas(gradient, check_vma=True) & internals.COLLECTIVES
    assert not over_replicas(gradient, check_vma=False) & internals.COLLECTIVES


### Configuration that holds in one thread


def error_of(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except Exception as error:
        return type(error).__name__


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:2]), ("some",), axis_types=(AxisType.Explicit,))


### Meshes


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_function_without_the_mesh_that_is_set_keeps_it_while_jax_traces(kind: AxisType):
    around = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(kind,))
    x = jax.device_put(np.ones(2), NamedSharding(mesh(), PartitionSpec()))
    names = internals.without_context_mesh(lambda: jax.sharding.get_abstract_mesh().axis_names)
    assert internals.context_mesh().empty
    with jax.set_mesh(around):
        assert internals.context_mesh() == around
        assert names() == () and internals.without_context_mesh(jnp.add)(x, x).tolist() == [2, 2]
        assert jax.jit(lambda: len(names()))() == 1
        assert internals.context_mesh() == around


def test_an_array_is_laid_along_other_axes_or_put_on_another_mesh():
    auto, explicit = (
        Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(kind,))
        for kind in (AxisType.Auto, AxisType.Explicit)
    )
    x = jax.device_put(np.arange(4), NamedSharding(explicit, PartitionSpec("data")))
    moved = internals.on_mesh(x, auto)
    assert moved.sharding == NamedSharding(auto, PartitionSpec("data")) and moved.tolist() == [
        0,
        1,
        2,
        3,
    ]
    gather = jax.jit(lambda x: internals.resharded(x, PartitionSpec()))
    assert (
        gather(x).is_fully_replicated
        and gather(x).sharding.mesh == explicit
        and gather(x).tolist() == [0, 1, 2, 3]
    )
    assert jax.make_jaxpr(gather)(moved).jaxpr.eqns[0].params["jaxpr"].eqns == []


### Transfers


def test_a_transfer_that_is_asked_for_passes_the_guard():
    def transfer() -> jax.Array:
        return jnp.ones(3) + np.ones(3, np.float32)

    with jax.transfer_guard("disallow"):
        with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device"):
            transfer()
        with internals.asked_for():
            assert transfer().tolist() == [2.0] * 3


### Options of XLA


def test_xla_knows_the_options_that_it_is_given():
    for options in (internals.OVERLAP_OPTIONS, internals.PIPELINED_ROUNDS):
        assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2


### Processes


@pytest.mark.steps
def test_the_client_of_a_coordination_service_keeps_what_it_is_told():
    run_python(f"""
        import jax
        from fddp.jax_internals import coordination_client

        assert coordination_client() is None
        jax.distributed.initialize("127.0.0.1:{free_port()}", 1, 0)
        client = coordination_client()
        client.key_value_set("fddp/told/0", "first", allow_overwrite=True)
        client.key_value_set("fddp/told/0", "second", allow_overwrite=True)
        ((_, message),) = client.key_value_dir_get("fddp/told/")
        assert message == "second", message
        jax.distributed.shutdown()
    """)


@pytest.mark.steps
def test_gloo_listens_at_the_address_that_it_is_given():
    run_python(f"""
        import jax
        from fddp.jax_internals import bind_gloo

        bind_gloo("198.51.100.9")  # of no host: RFC 5737
        jax.distributed.initialize("127.0.0.1:{free_port()}", 1, 0)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        try:
            jax.devices()
        except RuntimeError as error:
            assert "bind(2) for [198.51.100.9] failed" in str(error), error
        else:
            raise AssertionError("Gloo listens elsewhere")
        jax.distributed.shutdown()
    """)


### Profiles


@pytest.mark.steps
def test_a_profile_is_read_where_warnings_are_errors():
    run_python("""
        import jax, jax.numpy as jnp
        from fddp.analysis.measure import profiled

        f = jax.jit(lambda x: jnp.sum(x @ x))
        run = lambda x: jax.block_until_ready(f(x))
        (step,) = profiled(run, [jnp.ones((64, 64))])
        assert step.seconds > 0
        starts = [x.start for x in step.timeline.spans]
        assert starts and max(starts) - min(starts) < step.seconds
    """)


def run_python(script: str) -> None:
    """Runs a script in a process of its own, for which warnings are errors."""
    command = [sys.executable, *STRICT, "-c", textwrap.dedent(script)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    completed = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert completed.returncode == 0, f"{completed.returncode}: {completed.stderr[-2000:]}"


@pytest.mark.parametrize(
    ("folder", "limit", "holds"), [("here", 1.0, 0.1), ("here", 5.0, 5.0), (None, 1.0, 1.0)]
)
def test_a_compilation_cache_takes_small_programs_unless_the_user_has_a_limit(
    monkeypatch, folder, limit, holds
):
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = [jax.config.values[name] for name in names]
    try:
        for name, value in zip(names, (folder, limit)):
            jax.config.update(name, value)
        assert internals.cache_small_programs() == jax.config.values[names[1]] == holds
    finally:
        for name, value in zip(names, before):
            jax.config.update(name, value)
