"""A faulty argument is reported at once, by its name and value."""

import ast
import dataclasses
import math
import re
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from problems import square

import fddp
from fddp.step import checks

W = np.zeros((), np.float32)
X = np.ones(8, np.float32)


def buffered(w: Any, x: Any, *, model_state: Any) -> Any:
    return square(w, x), (model_state, None)


@pytest.fixture
def make(group) -> Callable[..., fddp.TrainStep]:
    """`make(loss, **options)`: a step on four replicas."""
    return lambda loss=square, **options: fddp.train_step(
        loss, optax.sgd(0.1), group=group(4), **options
    )


def refused(kind: type[Exception], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=message):
        call()


### Batches


class ForeignTensor:
    """Rows of another library."""

    dtype = "torch.float32"
    shape = (8, 3)


class Sparse(ForeignTensor):
    """Rows with the shape and dtype of `X`."""

    dtype = X.dtype
    shape = X.shape


BATCHES = [
    (np.ones(6), r"6 rows cannot be divided into 4 equal parts: .* 4 replicas × 1 micro-batches"),
    (np.ones(0), r"0 rows.*fddp\.join.*fddp\.Weighted\(mean, weight\)"),
    (
        {"x": np.ones(8), "y": np.ones((4, 2))},
        r"equally many rows, got x float64\[8\], y float64\[4, 2\]",
    ),
    ({"x": np.ones(8), "y": np.ones(())}, r"equally many rows, got x float64\[8\], y float64\[\]"),
    (3.0, "equally many rows, got float"),
    ([1.0] * 8, r"Python lists of numbers, at its top: make arrays, with np.asarray\.$"),
    (
        {"x": [[1, 2]] * 8, "y": ([0] * 8, [1] * 8), "z": X},
        r"numbers, x, y/0, y/1: make arrays, with np.asarray\.$",
    ),
    ((np.ones(8), 0.5), r"equally many rows, got 0 float64\[8\], 1 float"),
    (
        [np.ones(k) for k in range(40)],
        r"got 0 float64\[0\], .*, 5 float64\[5\], and 34 more: this process has 4 replicas × 1 "
        r"micro-batches; give",
    ),
    (np.array(["a"] * 8), r"leaves that are not numeric, array\(\['a', .*: give numbers"),
    ({"x": X, "name": "train"}, "not numeric, name 'train': give numbers"),
    ({"x": X.astype(">f4")}, r"not numeric, x array\(.* >f4: give numbers, such as np.asarray"),
    ({"x": X.astype(np.longdouble)}, r"not numeric, x array\(.*float128: give numbers"),
    ({"x": np.zeros(8, "f4,i4")}, r"not numeric, x array\(.*: give numbers"),
    ({"x": ForeignTensor()}, "not numeric, x .*ForeignTensor.* torch.float32: give numbers"),
    (Sparse(), r"not numeric, .*Sparse.* float32: give numbers"),
    ({"x": X, "y": np.array([None] * 8)}, r"not numeric, y array\(\[None, "),
    ({"x": X, "day": np.full(8, "2026-01-01", "M8[D]")}, r"not numeric, day array\(\['2026"),
    (None, "the batch is empty: got None"),
    ({}, "the batch is empty: got {}"),
    ({"x": None}, "the batch is empty: got {'x': None}"),
]


def test_a_batch_that_cannot_be_shared_out_is_refused_and_spoils_nothing(make):
    step = make()
    state = step.init(W)
    for _ in range(2):  # before and after the program exists
        for batch, message in BATCHES:
            kind = TypeError if "not numeric" in message else ValueError
            refused(kind, message, partial(step, state, batch))
            refused(kind, message, partial(step.no_sync, state, batch))
        state, info = step(state, X)
        assert info.loss > 0


def test_micro_batches_count_in_the_division(make):
    step = make(accumulation_steps=3)
    refused(
        ValueError,
        "16 rows .* 12 equal parts: .* 4 replicas × 3 micro-batches",
        lambda: step(step.init(W), X[:1].repeat(16)),
    )


### Parameters


@pytest.mark.parametrize("params", [{}, None, (), {"a": None}], ids=str)
def test_params_without_arrays_are_refused(make, params):
    refused(
        ValueError,
        f"params holds no arrays: got {re.escape(repr(params))}",
        lambda: make().init(params),
    )


def test_params_without_floats_are_refused_by_what_they_hold(make):
    params = {"count": np.int32(1), "mask": np.zeros(2, bool)}
    message = r"no float arrays, so there is nothing to train: got count int32\[\]; mask bool\[2\]"
    refused(ValueError, message, lambda: make().init(params))


def test_params_that_are_no_arrays_are_refused(make):
    refused(TypeError, "str", lambda: make().init({"a": "weights"}))


def test_a_random_key_among_the_params_is_refused_by_its_name(make):
    params = {"w": np.ones(2), "key": jax.random.key(0)}
    refused(TypeError, r"params\['key'\] is a random key.*rng=", lambda: make().init(params))


def test_params_of_another_model_are_refused_by_their_leaves(make, group):
    total = lambda p, x: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p)) + jnp.mean(x)  # noqa: E731
    step = make(total)
    state = step.init({"w": np.ones(3)})
    other_state = step.init({"y": np.ones(3), "z": np.ones(2)})
    message = r"they have y float32\[3\]; z float32\[2\], and lack w float32\[3\]"
    state, _ = step(state, X)
    refused(ValueError, message, lambda: step(other_state, X))
    refused(ValueError, message, lambda: step.no_sync(other_state, X))
    f = fddp.value_and_grad(total, group=group(4))
    f({"w": np.ones(3)}, X)
    refused(ValueError, r"they have 0 float32\[3\], and lack w", lambda: f([np.ones(3)], X))


def test_what_is_no_group_is_refused(group):
    two: Any = 2
    all_of_them: Any = "all"
    message = r"group must be a fddp.Group, .* got int 2"
    refused(TypeError, message, lambda: fddp.train_step(square, optax.sgd(0.1), group=two))
    refused(
        TypeError,
        r"group must be a fddp.Group, .* got str 'all'",
        lambda: fddp.value_and_grad(square, group=all_of_them),
    )
    refused(TypeError, r"group must be a fddp.Group", lambda: fddp.join([X], all_of_them))


### States


def calls_with(step: fddp.TrainStep, state: Any) -> list[Callable[[], Any]]:
    """Calls that take a state."""
    calls = [step, step.no_sync, step.lower]
    return [
        partial(step.finish, state),
        *(partial(call, state, X) for call in calls),
        partial(fddp.measure, step, state, [X]),
        partial(fddp.audit, step, state, X),
        partial(fddp.tune, step, state, X),
    ]


@pytest.mark.steps
def test_what_is_not_a_state_is_refused_by_every_call_that_takes_one(make):
    step = make()
    state = step.init(W)
    info = fddp.StepInfo(jnp.zeros(()))
    for _ in range(2):  # before and after the program exists
        for wrong in ((state, info), info, W, {"w": W}, None):
            kind = type(wrong).__name__
            message = f"state must be a fddp.TrainState, got {kind}: .* a step returns .state, info"
            for call in calls_with(step, wrong):
                refused(TypeError, message, call)
        state, _ = step(state, X)


def test_a_state_among_the_parameters_is_refused(make, group):
    step = make()
    pair = step(step.init(W), X)
    mean: Any = lambda w, x: jnp.mean(w * x)  # noqa: E731
    for wrong, kind in ((pair, "TrainState"), (pair[0], "TrainState"), (pair[1], "StepInfo")):
        message = f"params must be a tree of arrays, and holds a fddp.{kind}: a step returns"
        refused(TypeError, message, partial(step.init, wrong))
    for wrong in pair[1], pair:
        message = "state must be a tree of arrays, and holds a fddp"
        refused(TypeError, message, partial(fddp.evaluate, mean, wrong, [X], group=group(4)))


BOTH = {"w": np.ones(3, np.float32), "b": np.ones((), np.float32)}


def line(params: Any, x: Any) -> jax.Array:
    return jnp.mean((params["w"][0] * x + params["b"]) ** 2)


OTHER_STATES: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "Adam's for SGD": (
        optax.adam(0.1),
        optax.sgd(0.1),
        {},
        r"has 0/count int32\[\]; 0/mu/b .*this step's nothing else",
    ),
    "SGD's for Adam": (
        optax.sgd(0.1),
        optax.adam(0.1),
        {},
        r"has nothing else, and this step's 0/count int32\[\]; 0/mu",
    ),
    "an order of a chain": (
        optax.chain(optax.clip(1.0), optax.trace(0.9)),
        optax.chain(optax.trace(0.9), optax.clip(1.0)),
        {},
        r"has 1/trace/b float32\[\]; 1/trace/w .*this step's 0/trace/b float32\[\]; 0/trace/w",
    ),
    "in shards": (
        optax.adam(0.1),
        optax.sgd(0.1, momentum=0.9),
        {"shard": "optimizer"},
        "has 0/count .*, and this step's 0/trace/b",
    ),
    "other nodes": (
        optax.sgd(0.1),
        optax.chain(optax.identity(), optax.identity(), optax.sgd(0.1)),
        {},
        r"has PyTreeDef\(.*, and this step's PyTreeDef\(",
    ),
    "local steps": (
        fddp.local_steps(optax.adam(0.1)),
        fddp.local_steps(optax.sgd(0.1)),
        {},
        "has inner/0/count .*, and this step's nothing else",
    ),
}


@pytest.mark.steps
@pytest.mark.parametrize("name", OTHER_STATES)
def test_a_state_of_another_optimizer_is_refused_by_what_differs(group, name):
    other_optimizer, optimizer, options, message = OTHER_STATES[name]
    step = fddp.train_step(line, optimizer, group=group(4), **options)
    wrong = fddp.train_step(line, other_optimizer, group=group(4), **options).init(BOTH)
    for _ in range(2):  # before and after the program exists
        refused(ValueError, f"to another optimizer, .*opt_state {message}", lambda: step(wrong, X))
        step(step(step.init(BOTH), X)[0], X)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "dtype": (lambda w: w.astype(jnp.bfloat16), r"w bfloat16\[3\], and lack w float32\[3\]"),
    "shape": (lambda w: jnp.concatenate([w, w]), r"w float32\[6\], and lack w float32\[3\]"),
}


@pytest.mark.quick(
    "{'shard': 'state'}-dtype",
    "{'shard': 'optimizer'}-shape",
    "{}-dtype",
)
@pytest.mark.steps
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize(
    "options",
    [{}, {"shard": "optimizer"}, {"shard": "state"}],
    ids=str,
)
def test_parameters_that_change_their_form_are_refused_by_leaf(group, name, options):
    change, message = CHANGES[name]
    step = fddp.train_step(line, optax.adam(0.1), group=group(4), donate=False, **options)
    state, _ = step(step.init(BOTH), X)

    def changed(tree: Any) -> Any:
        if options.get("shard") == "state" and name == "dtype":
            part = tree["w"]
            return tree | {"w": dataclasses.replace(part, parts=change(part.parts))}
        return tree | {"w": change(fddp.whole(tree)["w"])}

    wrong = state._replace(params=changed(state.params))
    for call in (step, step.no_sync):
        refused(
            ValueError, f"not those of the model .*they have {message}", partial(call, wrong, X)
        )
    step(state, X)


def test_a_first_state_without_parameters_is_refused(make):
    step = make()
    refused(ValueError, "params holds no", lambda: step(step.init(W)._replace(params=None), X))


def test_numpy_parameters_of_64_bits_are_accepted_as_the_same(make):
    step = make(donate=False)
    state, _ = step(step.init(W), X)
    same, _ = step(state._replace(params=np.asarray(state.params, np.float64)), X)
    assert same.params == step(state, X)[0].params


@pytest.mark.parametrize("options", [{}, {"shard": "state"}], ids=str)
def test_parameters_of_a_dtype_that_jax_lacks_are_refused_by_leaf(group, options):
    step = fddp.train_step(line, optax.adam(0.1), group=group(4), donate=False, **options)
    state, _ = step(step.init(BOTH), X)
    w = np.asarray(fddp.whole(state.params)["w"]).astype(">f4")
    wrong = state._replace(params=state.params | {"w": w})
    refused(TypeError, "the state holds params/w .* >f4: give numbers", partial(step, wrong, X))
    step(state, X)


### Losses


def test_effects_in_an_order_are_refused_on_several_devices(make, group):
    """mpi4jax's calls have them, too. JAX runs them on one device only."""

    def loss(w: Any, x: Any) -> Any:
        jax.debug.print("{}", jnp.sum(x), ordered=True)
        return square(w, x)

    message = r"effects in an order \(OrderedDebugEffect\).* use jax.lax.psum"
    refused(ValueError, message, lambda: make(loss)(make().init(W), X))
    for replicas, virtual in ((1, None), (2, 2)):  # programs of one device
        alone = group(replicas)
        step = fddp.train_step(loss, optax.sgd(0.1), group=alone, virtual_replicas=virtual)
        assert step(step.init(W), X)[1].loss == square(W, X)


@pytest.mark.steps
@pytest.mark.parametrize(
    ("loss", "has_aux", "kind", "message"),
    [
        (
            lambda w, x: (x - w) ** 2,
            False,
            ValueError,
            r"loss must be a scalar, got float32\[2\]; take its mean",
        ),
        (lambda w, x: jnp.int32(w), False, TypeError, r"loss must be a float, got int32\[\]"),
        (lambda w, x: w * 1j, False, TypeError, r"loss must be a float, got complex64\[\]"),
        (
            lambda w, x: None,
            False,
            TypeError,
            "loss must be an array computed from params, got NoneType",
        ),
        (
            lambda w, x: (w, {}),
            False,
            TypeError,
            r"one number, got a tuple .*; metrics need has_aux=True",
        ),
        (lambda w, x: w, True, TypeError, r"must return \(loss, aux\), got float32\[\]"),
        (
            lambda w, x: (w, 1.0, 2.0),
            True,
            TypeError,
            r"must return \(loss, aux\), got \(float32\[\], float, float\)",
        ),
        (
            lambda w, x: (w, {"hits": jnp.int32(3)}),
            True,
            TypeError,
            r"aux\['hits'\] must be a float .* got int32\[\]",
        ),
        (
            lambda w, x: (w, {"hit": jnp.bool_(1)}),
            True,
            TypeError,
            r"aux\['hit'\] must be a float .* got bool\[\]",
        ),
        (
            lambda w, x: (w, {"name": "mlp"}),
            True,
            TypeError,
            r"aux\['name'\] must be a float .* got str",
        ),
        (
            lambda w, x: fddp.Weighted(w, None),
            False,
            TypeError,
            "weight of a loss must be one number, .* got NoneType",
        ),
        (
            lambda w, x: fddp.Weighted(w, "8"),
            False,
            TypeError,
            "weight of a loss must be one number, .* got str",
        ),
    ],
)
def test_a_loss_that_returns_something_else_is_refused(make, group, loss, has_aux, kind, message):
    step = make(loss, has_aux=has_aux)
    refused(kind, message, lambda: step(step.init(W), X))
    refused(kind, message, lambda: step.no_sync(step.init(W), X))
    refused(kind, message, lambda: fddp.value_and_grad(loss, group=group(4), has_aux=has_aux)(W, X))


@pytest.mark.parametrize(
    ("loss", "kind", "message"),
    [
        (
            lambda w, x, *, model_state: w,
            TypeError,
            r"must return \(loss, \(model_state, aux\)\), got float32",
        ),
        (
            lambda w, x, *, model_state: (w, model_state),
            TypeError,
            r"must return \(loss, \(model_state, aux\)\)",
        ),
        (
            lambda w, x, *, model_state: (w, ({}, None)),
            ValueError,
            "model_state of the structure it was given",
        ),
        (
            lambda w, x, *, model_state: (w, (None, None)),
            ValueError,
            "model_state of the structure it was given",
        ),
    ],
)
def test_a_loss_that_loses_the_model_state_is_refused(make, loss, kind, message):
    step = make(loss)
    refused(kind, message, lambda: step(step.init(W, model_state={"mean": W}), X))


@pytest.mark.parametrize(
    ("loss", "form", "problem"),
    [
        (square, "rng=…", "got an unexpected keyword argument 'rng'"),
        (square, "model_state=…", "got an unexpected keyword argument 'model_state'"),
        (lambda w, x, *, rng: square(w, x), "", "missing a required .*argument: 'rng'"),
        (lambda w: w, "", "too many positional arguments"),
    ],
)
def test_a_loss_that_takes_other_arguments_is_refused(make, loss, form, problem):
    given = {"rng=…": {"rng": jax.random.key(0)}, "model_state=…": {"model_state": W}, "": {}}
    step = make(loss)
    form = ", ".join(filter(None, ["params, batch", form]))
    message = rf"the loss must take \({form}\): {problem}.*exactly if step.init"
    refused(TypeError, message, lambda: step(step.init(W, **given[form[15:]]), X))


@pytest.mark.parametrize("new", [np.zeros(3, np.float32), np.int32(0)], ids=["shape", "dtype"])
def test_a_buffer_that_changes_its_form_is_refused_by_name(make, new):
    step = make(lambda w, x, *, model_state: (w, ({"mean": jnp.asarray(new)}, None)))
    refused(ValueError, "mean", lambda: step(step.init(W, model_state={"mean": W}), X))


def test_a_collective_over_an_unbound_axis_is_refused_by_name(make):
    step = make(lambda w, x: square(w, x - jax.lax.pmean(x, "batch")))
    refused(
        ValueError,
        "collective over the axis 'batch'.* 'local' has the axis 'replica'",
        lambda: step(step.init(W), X),
    )


def test_an_error_of_the_loss_itself_comes_through(make):
    def loss(w: Any, x: Any) -> Any:
        raise KeyError("targets")

    step = make(loss)
    refused(KeyError, "targets", lambda: step(step.init(W), X))


### Options


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"bucket_cap_mb": -1}, ValueError, "bucket_cap_mb must be 0 or more MiB, got -1"),
        (
            {"bucket_cap_mb": [1, -1]},
            ValueError,
            r"bucket_cap_mb must be one cap or more, .* got \[1, -1\]",
        ),
        ({"bucket_cap_mb": math.nan}, ValueError, "bucket_cap_mb must be 0 or more MiB, got nan"),
        ({"first_bucket_mb": "1"}, ValueError, "first_bucket_mb must be 0 or more MiB, got '1'"),
        ({"last_bucket_mb": None}, ValueError, "last_bucket_mb must be 0 or more MiB, got None"),
        (
            {"accumulation_steps": 0},
            ValueError,
            "accumulation_steps must be a whole number of 1 or more, got 0",
        ),
        ({"accumulation_steps": 1.5}, ValueError, "accumulation_steps must be .*, got 1.5"),
        ({"accumulation_steps": True}, ValueError, "accumulation_steps must be .*, got True"),
        ({"order": "forward"}, ValueError, "order must be 'ready' or 'reverse', got 'forward'"),
        (
            {"schedule": "later"},
            ValueError,
            "schedule must be 'auto', 'overlap', 'after' or 'eager', got 'later'",
        ),
        ({"donate": 1}, ValueError, "donate must be True or False, got 1"),
        (
            {"broadcast_buffers": 1},
            ValueError,
            "broadcast_buffers must be True, False or 'mean', got 1",
        ),
        (
            {"broadcast_buffers": "yes"},
            ValueError,
            "broadcast_buffers must be True, False or 'mean', got 'yes'",
        ),
        ({"cap": 5}, TypeError, "has no option 'cap'; it has bucket_cap_mb, "),
        ({"bucket_cap": 5}, TypeError, r"'bucket_cap'; bucket_cap: did you mean bucket_cap_mb\?$"),
        ({"find_unused_parameter": 1}, TypeError, r"did you mean find_unused_parameters\?$"),
        ({"gradient_accumulation_steps": 2}, TypeError, r": give accumulation_steps=\.$"),
        ({"accumulate_grad_batch": 2}, TypeError, r"_batches \(give accumulation_steps=\)\?$"),
        ({"max_grad_norm": 1.0}, TypeError, "put optax.clip_by_global_norm into the optimizer"),
        ({"sharding_strategy": "FULL_SHARD"}, TypeError, r"shard='state' \(FSDP\)\.$"),
        (
            {"static_graph": True},
            TypeError,
            "'static_graph'; static_graph: leave it out, the program is known",
        ),
        (
            {"device_ids": [0]},
            TypeError,
            r"'device_ids'; device_ids: leave it out, the devices are the group's\.$",
        ),
        (
            {"process_group": None, "cap": 1},
            TypeError,
            "process_group: give group=.*; it has bucket_cap_mb, ",
        ),
    ],
    ids=str,
)
def test_an_option_is_checked_where_it_is_given(make, group, options, kind, message):
    refused(kind, message, lambda: make(**options))
    if "donate" not in options:
        refused(kind, message, lambda: fddp.value_and_grad(square, group=group(1), **options))


def test_a_loss_and_an_optimizer_are_what_they_should_be(make, group):
    refused(TypeError, "fddp.train_step: loss_fn must be a function, got float", lambda: make(1.0))
    refused(
        TypeError,
        "fddp.value_and_grad: loss_fn must be a function, got dict",
        lambda: fddp.value_and_grad({}),  # pyright: ignore[reportArgumentType]
    )
    bad: Any = lambda params: params  # noqa: E731
    refused(
        TypeError,
        "optimizer must be one of optax's, got function",
        lambda: fddp.train_step(square, bad, group=group(1)),
    )


def test_every_argument_of_ddp_is_an_option_or_answered(group):
    """The arguments of DDP in PyTorch 2.15, and in the installed version, if any."""
    ddp = (
        "device_ids output_device dim broadcast_buffers init_sync process_group bucket_cap_mb "
        "find_unused_parameters "
        "check_reduction gradient_as_bucket_view static_graph delay_all_reduce_named_params "
        "param_to_hook_all_reduce "
        "mixed_precision device_mesh skip_all_reduce_unused_params bucket_cap_mb_list "
        "batched_grad_copy "
        "forward_sync_buffers lazy_bucket_allocation require_manual_backward_finalization"
    )
    options = {field.name for field in dataclasses.fields(fddp.Options)}
    for name in {*ddp.split(), *arguments_of_installed_ddp()}:
        if name not in options:
            refused(
                TypeError,
                f"; {name}: [^;]*$",
                partial(fddp.train_step, square, optax.sgd(0.1), **{name: None}),
            )


def arguments_of_installed_ddp() -> list[str]:
    """Reads the arguments in the source: importing PyTorch takes seconds."""
    torch = find_spec("torch")
    if torch is None or not torch.submodule_search_locations:
        return []
    source = Path(
        torch.submodule_search_locations[0], "nn", "parallel", "distributed.py"
    ).read_text()
    (ddp,) = (
        x
        for x in ast.parse(source).body
        if isinstance(x, ast.ClassDef) and x.name == "DistributedDataParallel"
    )
    (init,) = (x for x in ddp.body if isinstance(x, ast.FunctionDef) and x.name == "__init__")
    names = [argument.arg for argument in (*init.args.args, *init.args.kwonlyargs)]
    return [name for name in names if name not in ("self", "module")]


@pytest.mark.parametrize(
    ("module", "adapter"),
    [
        (linen.Dense(1), "from_linen"),
        (linen.Dense, "from_linen"),
        (nnx.Linear(1, 1, rngs=nnx.Rngs(0)), "from_nnx"),
        (nnx.Linear, "from_nnx"),
    ],
    ids=["linen", "linen class", "nnx", "nnx class"],
)
def test_a_module_in_the_place_of_the_loss_is_told_what_makes_one_of_it(group, module, adapter):
    """DDP takes a module, and Flax's can be called."""
    message = (
        rf"loss_fn must be a loss, .* got the module (Dense|Linear); fddp\.{adapter}\(module, "
        rf"loss\)"
    )
    refused(TypeError, message, lambda: fddp.train_step(module, optax.sgd(0.1), group=group(1)))
    refused(TypeError, message, lambda: fddp.value_and_grad(module, group=group(1)))


def test_what_nnx_compiled_is_a_function(group):
    step = fddp.train_step(nnx.jit(square), optax.sgd(0.1), group=group(1))
    assert step(step.init(W), X)[1].loss == 1


def test_flaxs_optimizers_are_told_to_give_what_they_hold(group):
    bad: Any = nnx.Optimizer(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param)
    refused(
        TypeError,
        "got Optimizer; pass its .tx",
        lambda: fddp.train_step(square, bad, group=group(1)),
    )


def test_a_plan_before_a_state_is_refused(make):
    refused(ValueError, "call step.init", lambda: make().plan)


NOT_A_STEP = "step must be a step, from fddp.train_step, got function"
NOT_A_PLAN = r"plan must be a fddp.BucketPlan, from fddp.make_plan, got dict {}"
untyped: Any = partial  # of values that no type allows
OF_ANOTHER_KIND: list[tuple[Any, Any, str]] = [
    (fddp.measure, (square, None, [X]), NOT_A_STEP),
    (fddp.audit, (square, None, X), NOT_A_STEP),
    (fddp.mesh_group, ([1],), r"mesh must be a jax.sharding.Mesh, got list \[1\]"),
    (fddp.round_robin, (["a"],), "each of groups must be a fddp.Group, got str 'a'"),
    (fddp.pack, ({}, W), NOT_A_PLAN),
    (fddp.unpack, ({}, [W]), NOT_A_PLAN),
    (untyped(fddp.all_reduce, axis_name="x"), (W, {}), NOT_A_PLAN),
    (
        untyped(fddp.all_reduce, axis_name="x", hook="bf16"),
        (W, fddp.make_plan(W)),
        "hook must be a fddp.Hook",
    ),
    (fddp.hooks.bf16, (8,), "bf16: hook must be a fddp.Hook, one of fddp.hooks, got int 8"),
    (fddp.hooks.fp16, (8,), "fp16: hook must be a fddp.Hook"),
    (
        untyped(fddp.hooks.topk, error_feedback="no"),
        (),
        "error_feedback must be True or False, got 'no'",
    ),
    (
        untyped(fddp.hooks.quantize, error_feedback=1),
        (),
        "error_feedback must be True or False, got 1",
    ),
    (fddp.dynamic_scale, ("adam",), "optimizer must be an optax transformation, got str 'adam'"),
    (
        untyped(fddp.train_step, has_aux="metrics"),
        (square, optax.sgd(0.1)),
        "has_aux must be True or False",
    ),
    (untyped(fddp.whole, group="g"), (W,), "group must be a fddp.Group"),
    (fddp.tune, (square, W, X), "fddp.tune: step must be a step, from fddp.train_step, got func"),
    (untyped(fddp.hooks.topk, "half"), (), "ratio must be a number, got 'half'"),
    (untyped(fddp.hooks.fp16, predivide="x"), (), "predivide must be a number, got 'x'"),
    (
        untyped(fddp.dynamic_scale, initial="x"),
        (optax.sgd(0.1),),
        "initial must be a number, got 'x'",
    ),
    (untyped(fddp.make_plan, order="ready"), (W,), "order must be the numbers of leaves"),
    (
        untyped(fddp.join, throw_on_early_termination="no"),
        ([X],),
        "throw_on_early_termination must be True or False",
    ),
    (fddp.grad_order, ("square", W), "loss_fn must be a function, got str 'square'"),
    (fddp.check, (square, "x", X), "params must be an array, got str 'x'"),
    (fddp.value_and_grad(square), ("x", X), "params must be an array, got str 'x'"),
    (fddp.from_linen, (None, square), "module must be a flax.linen.Module, got NoneType"),
    (fddp.from_linen, (linen.Dense(1), None), "loss must be a function, got NoneType"),
    (
        untyped(fddp.from_linen, rngs=5),
        (linen.Dense(1), square),
        "rngs must be a sequence of names, got 5",
    ),
    (fddp.from_nnx, (linen.Dense(1), square), "module must be a flax.nnx.Module, got"),
    (
        fddp.train_step(square, optax.sgd(0.1)).init,
        (lambda: W,),
        r"params must be an array, got function .*step\.init\(jax\.jit\(make\)\(\)\)",
    ),
    (fddp.from_nnx, (lambda: None, 3), "loss must be a function, got int"),
]


@pytest.mark.parametrize("case", range(len(OF_ANOTHER_KIND)))
def test_a_value_of_another_kind_is_refused_by_name(case: int):
    call, arguments, message = OF_ANOTHER_KIND[case]
    refused(TypeError, message, lambda: call(*arguments))


def test_text_among_buffers_or_keys_and_a_group_that_is_none_are_refused(make):
    refused(
        TypeError,
        "model_state must be .* and holds m 'x'",
        lambda: make().init(W, model_state={"m": "x"}),
    )
    refused(
        TypeError,
        "rng must be .* holds a fddp.TrainState",
        lambda: make().init(W, rng=make().init(W)),
    )
    refused(
        TypeError,
        r"rng must be a tree of arrays, and holds 'seed'",
        lambda: make().init(W, rng="seed"),
    )
    refused(
        TypeError,
        r"rng must be a tree of keys, of jax.random.key, got 3",
        lambda: make().init(W, rng=3),
    )
    form = jax.ShapeDtypeStruct((2,), np.float32)
    refused(TypeError, "init takes arrays, got ShapeDtype.*step.shapes", lambda: make().init(form))
    refused(TypeError, "fddp.on: group must be a fddp.Group", lambda: make().on("gpu"))


def test_refs_are_refused_wherever_arrays_are_taken(make, group):
    step, ref = make(), jax.new_ref(jnp.asarray(W))
    message = r"params is a Ref \(jax.new_ref\), and a step returns new parameters: give its value"
    refused(TypeError, message, lambda: step.init(ref))
    refused(TypeError, message, lambda: fddp.value_and_grad(square, group=group(4))(ref, X))
    message = "model_state must be a tree of arrays, and holds n Ref"
    refused(TypeError, message, lambda: step.init(W, model_state={"n": ref}))
    message = "the batch holds leaves that are not numeric, Ref"
    refused(TypeError, message, lambda: step(step.init(W), jax.new_ref(jnp.asarray(X))))


### Calls under a transformation


def test_a_step_under_jit_is_refused(make):
    step = make()
    state = step.init(W)
    message = "cannot be called under jax.jit, grad or vmap"
    refused(TypeError, message, lambda: jax.jit(lambda state, x: step(state, x)[1].loss)(state, X))
    refused(TypeError, message, lambda: jax.jit(lambda x: step(state, x)[1].loss)(X))
    refused(TypeError, message, lambda: jax.jit(lambda x: step.no_sync(state, x)[1].loss)(X))


@pytest.mark.parametrize("transform", [jax.jit, jax.grad], ids=["jit", "grad"])
def test_value_and_grad_under_a_transformation_is_refused(group, transform):
    f = fddp.value_and_grad(square, group=group(4))
    message = "cannot be called under jax.jit, grad or vmap"
    refused(TypeError, message, lambda: transform(lambda w: f(w, X)[0])(W))
    refused(TypeError, message, lambda: transform(lambda x: f(W, x)[0])(X))


@pytest.mark.parametrize("scope", ["bucket3", "tail", "gather1", "micro-batch0bucket1"])
def test_a_collective_is_named_after_its_message(scope: str):
    assert checks._message(f"jit(step)/{scope}/psum") == f" ({scope})"
