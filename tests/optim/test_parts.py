"""Updates on parts of the leaves: `fddp.optim.parts`, against optax on whole arrays."""

import re
import runpy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fddp.buckets import ShardLayout
from fddp.comm.communicator import axis_communicator
from fddp.jaxpr import Follows, Ranks, on_parts
from fddp.optim.parts import divided
from fddp.sharding.owners import at_owners

RANKS = 4
STEPS = 7
Make = Callable[[], optax.GradientTransformation]

CUT: dict[str, Make] = {
    "adabelief": lambda: optax.adabelief(0.1),
    "adadelta": lambda: optax.adadelta(0.1),
    "adagrad": lambda: optax.adagrad(0.1),
    "adam": lambda: optax.adam(0.1),
    "adamax": lambda: optax.adamax(0.1),
    "adamw, masked": lambda: optax.adamw(0.1, mask={"b": False, "w": True}),
    "adan": lambda: optax.adan(0.1),
    "amsgrad": lambda: optax.amsgrad(0.1),
    "fromage": lambda: optax.fromage(0.1),
    "lamb": lambda: optax.lamb(0.1),
    "lars": lambda: optax.lars(0.1),
    "lion": lambda: optax.lion(0.1),
    "nadamw": lambda: optax.nadamw(0.1),
    "novograd": lambda: optax.novograd(0.1),
    "optimistic gradient descent": lambda: optax.optimistic_gradient_descent(0.1),
    "polyak_sgd": lambda: optax.polyak_sgd(),
    "radam": lambda: optax.radam(0.1, b2=0.9),
    "rmsprop": lambda: optax.rmsprop(0.1),
    "rprop": lambda: optax.rprop(0.1),
    "sgd with momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "sign_sgd": lambda: optax.sign_sgd(0.1),
    "yogi": lambda: optax.yogi(0.1),
    "clip_by_global_norm": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1)),
    "clip_by_block_rms": lambda: optax.chain(optax.clip_by_block_rms(0.5), optax.sgd(0.1)),
    "apply_if_finite": lambda: optax.apply_if_finite(
        optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1)), 3
    ),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "contrib.cocob": lambda: optax.contrib.cocob(),
    "contrib.dadapt_adamw": lambda: optax.contrib.dadapt_adamw(),
    "contrib.prodigy": lambda: optax.contrib.prodigy(),
    "contrib.schedule_free_adamw": lambda: optax.contrib.schedule_free_adamw(0.1),
}
OWNED: dict[str, tuple[Make, dict[str, str]]] = {
    "adafactor": (lambda: optax.adafactor(0.1, min_dim_size_to_factor=2), {"w": "reduce_sum"}),
    "adaptive_grad_clip": (
        lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
        {"w": "reduce_sum"},
    ),
    "centralize": (lambda: optax.chain(optax.centralize(), optax.sgd(0.1)), {"w": "reduce_sum"}),
    "clip_by_global_norm": (
        lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.contrib.muon(0.1)),
        {"w": "scan"},
    ),
    "clipped afterwards": (
        lambda: optax.chain(optax.contrib.muon(0.1, adaptive=True), optax.clip_by_global_norm(0.1)),
        {"w": "scan"},
    ),
    "contrib.muon": (lambda: optax.contrib.muon(0.1, weight_decay=0.1), {"w": "scan"}),
    "MultiSteps": (
        lambda: optax.MultiSteps(optax.contrib.muon(0.1), 2).gradient_transformation(),
        {"w": "scan"},
    ),
    "noisy_sgd": (lambda: optax.noisy_sgd(0.1, key=0), {"b": "add", "w": "add"}),
}
REFUSED: dict[str, tuple[Make, dict[str, str]]] = {
    "flatten": (
        lambda: optax.flatten(optax.adam(0.1)),
        {"b": "of several leaves", "w": "of several leaves"},
    ),
    "sm3": (lambda: optax.sm3(0.1), {"b": "", "w": ""}),
}


# One of each kind in the default tier: element by element, a norm, one that counts, and one with
# parameters in its state; at owners: a factored one, a matrix, and a norm of all that is computed
# there.
OF_EACH_KIND = {
    "adam",
    "adamw, masked",
    "lamb",
    "clip_by_global_norm",
    "apply_if_finite",
    "MultiSteps",
    "contrib.prodigy",
    "contrib.schedule_free_adamw",
    "adafactor",
    "contrib.muon",
    "noisy_sgd",
}


def problem() -> tuple[Any, list[Any]]:
    """Parameters with sizes that the ranks do not divide, and gradients for some steps."""
    draw = np.random.default_rng(0)
    params = {"b": draw.normal(size=7), "w": draw.normal(size=(3, 5))}
    return params, [jax.tree.map(lambda x: draw.normal(size=x.shape), params) for _ in range(STEPS)]


@pytest.mark.quick(
    "adafactor",
    "adam",
    "contrib.muon",
    "clip_by_global_norm0",
    "adamw, masked",
    "contrib.schedule_free_adamw",
)
@pytest.mark.steps
@pytest.mark.parametrize(
    ("make", "owned"),
    [
        pytest.param(*case, id=name, marks=[] if name in OF_EACH_KIND else [pytest.mark.slow])
        for name, case in [*((name, (make, {})) for name, make in CUT.items()), *OWNED.items()]
    ],
)
def test_an_update_of_parts_is_the_part_of_the_update(make: Make, owned: dict[str, str]):
    with jax.enable_x64(True):
        params, grads = jax.tree.map(jnp.asarray, problem())
        optimizer = make()
        division = divided(optimizer, params, loss=jax.ShapeDtypeStruct((), float))
        assert division.refused == {}
        assert {sorted(params)[leaf]: reason for leaf, reason in division.owned.items()} == owned
        want = plain(optimizer, params, grads)
        got = on_ranks(optimizer, params, grads)
        for name in params:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-12, atol=1e-14)
            assert np.max(np.abs(want[name] - params[name])) > 1e-9  # it has moved


@pytest.mark.parametrize(("make", "refused"), REFUSED.values(), ids=REFUSED)
def test_what_mixes_several_leaves_is_refused(make: Make, refused: dict[str, str]):
    params, _ = problem()
    reasons = {
        sorted(params)[leaf]: reason for leaf, reason in divided(make(), params).refused.items()
    }
    assert set(reasons) == set(refused)
    assert all(refused[name] in reason for name, reason in reasons.items())


def test_a_state_of_no_leaf_that_is_an_array_is_not_taken_for_one_number():
    """A rate for each element: a part of the leaf would need a part of the rates."""
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=jnp.linspace(0.1, 1, 7))
    assert set(divided(optimizer, {"b": jnp.ones(7), "c": jnp.ones(7)}).owned) == {0, 1}


def test_a_norm_that_is_hidden_is_not_believed_to_be_element_by_element():
    """A mutant of Adam which divides each row by its norm, and looks like Adam from outside."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(
            lambda g: g / jnp.linalg.norm(g, axis=-1, keepdims=True), updates
        ), state

    mutant = optax.chain(
        optax.adam(0.1), optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    )
    params, _ = problem()
    # Of a vector that is one sum; of a matrix it is not.
    assert list(divided(mutant, params).owned) == [1]


def plain(optimizer: optax.GradientTransformation, params: Any, grads: Sequence[Any]) -> Any:
    state = optimizer.init(params)
    update = optax.with_extra_args_support(optimizer).update
    for k, grad in enumerate(grads):
        updates, state = update(grad, state, params, value=jnp.asarray(k + 1.0), grad=grad)
        params = optax.apply_updates(params, updates)
    return params


def on_ranks(optimizer: optax.GradientTransformation, params: Any, grads: Sequence[Any]) -> Any:
    """The same on ranks with a part of each leaf and of the state."""
    division = divided(optimizer, params, loss=jax.ShapeDtypeStruct((), float))
    forms = jax.tree.leaves(params)
    count = len(forms)
    comm = axis_communicator("ranks", RANKS, "cpu")
    state = jax.tree.leaves(optimizer.init(params))
    kinds = division.inputs[count:-1]

    def part(size: int) -> int:
        return -(-size // RANKS)

    def put_together(op: str, numbers: Sequence[Any]) -> Sequence[Any]:
        collective = {"sum": jax.lax.psum, "max": jax.lax.pmax, "min": jax.lax.pmin}[op]
        return [collective(x, "ranks") for x in numbers]

    def is_element(leaf: int, size: int) -> Any:
        del leaf
        return jax.lax.axis_index("ranks") * part(size) + jnp.arange(part(size)) < size

    def in_parts(x: Any, kind: Any) -> Any:
        if not isinstance(kind, Follows):
            return jnp.broadcast_to(x, (RANKS, *jnp.shape(x)))
        return jnp.pad(x.ravel(), (0, RANKS * part(x.size) - x.size)).reshape(RANKS, part(x.size))

    work = partial(at_owners, comm, [ShardLayout((), RANKS)] * count)
    ranks = Ranks(is_element, put_together, work)
    run = jax.vmap(on_parts(division.program, division.inputs, ranks), axis_name="ranks")
    local_state = [in_parts(x, kind) for x, kind in zip([*state, *forms], kinds)]
    for k, grad in enumerate(grads):
        local_grads = [in_parts(x, kind) for x, kind in zip(jax.tree.leaves(grad), division.inputs)]
        outputs = run(*local_grads, *local_state, jnp.full(RANKS, k + 1.0))
        outputs = [
            jnp.broadcast_to(jnp.ravel(x)[0], old.shape) if x.shape != old.shape else x
            for x, old in zip(outputs, [*local_state[len(state) :], *local_state[: len(state)]])
        ]
        local_state = [
            *outputs[count:],
            *(p + u for p, u in zip(local_state[len(state) :], outputs)),
        ]
    gathered = [
        x.ravel()[: form.size].reshape(form.shape)
        for x, form in zip(local_state[len(state) :], forms)
    ]
    return jax.tree.unflatten(jax.tree.structure(params), gathered)


### The documentation

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.steps
@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_the_page_of_optimizers_is_generated_and_holds_for_the_installed_optax():
    """The whole page for the optax that it names; for others the answers of optimizers in both."""
    script = runpy.run_path(str(DOCS / "optimizers.py"))
    text, page = script["PAGE"].read_text(), script["page"]()
    if f"optax {optax.__version__}," in text:
        assert text == page, "run docs/optimizers.py"
    documented, generated = map(_answers, (text, page))
    common = documented.keys() & generated
    assert len(common) > 30
    assert {name: documented[name] for name in common} == {name: generated[name] for name in common}


def _answers(page: str) -> dict[str, int]:
    """Optimizer → the number of the section that names it."""
    sections = page.split("\n**")[1:]
    return {
        name: number
        for number, section in enumerate(sections)
        for name in re.findall(r"`optax\.([\w.]+)`", section)
    }


def test_an_update_that_refuses_the_loss_is_divided_as_others():
    def update(grads: Any, state: Any, params: Any = None, *, grad: Any) -> Any:
        del params, grad
        return jax.tree.map(lambda g: -0.1 * g, grads), state

    strict: Any = optax.GradientTransformationExtraArgs(optax.sgd(0.1).init, update)  # pyright: ignore[reportArgumentType]
    assert not divided(strict, {"w": np.zeros((3, 2), np.float32)}).refused
