"""If ranks differ, or one fails, all raise the same error: it names the difference and each rank's
value."""

import contextlib
import io
from collections import OrderedDict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.claims import claim, error_of

import fddp


def loss(params: Any, x: Any) -> jax.Array:
    return jnp.sum(jnp.stack([jnp.mean((p - x) ** 2) for p in jax.tree.leaves(params)]))


def odd(group: fddp.Group) -> bool:
    """True on the one rank that differs: the last."""
    return group.rank == group.size - 1


def init_error(group: fddp.Group, params: Any, optimizer: Any = None, **options: Any) -> str:
    """The error of a step's init, the same on all ranks."""
    step = fddp.train_step(loss, optimizer or optax.sgd(0.1), group=group, **options)
    return the_same(group, error_of(lambda: step.init(params)))


def the_same(group: fddp.Group, message: str) -> str:
    data = np.frombuffer(message.encode()[:4096].ljust(4096), np.uint8)
    rows = group.all_gather(data)
    assert np.all(rows == rows[0]), (
        f"ranks have different messages: {[bytes(row).rstrip() for row in rows]}"
    )
    return message


def assert_each_rank(group: fddp.Group, message: str, most: str, odd: str) -> None:
    """Each rank has a line of its own, with its value: `most`, or `odd` for the last."""
    for rank in range(group.size):
        (line,) = [line for line in message.splitlines() if line.startswith(f"rank {rank}:")]
        assert (odd if rank == group.size - 1 else most) in line, message


### The start


@claim()
def another_shape_is_named_with_each_ranks(group: fddp.Group):
    params = {"a": jnp.zeros(2), "b": jnp.zeros(4 if odd(group) else 3)}
    message = init_error(group, params)
    assert_each_rank(group, message, "b float32[3]", "b float32[4]")
    assert " a " not in message, "what is equal is not named"


@claim()
def another_dtype_is_named_with_each_ranks(group: fddp.Group):
    message = init_error(group, {"a": jnp.zeros(2, jnp.bfloat16 if odd(group) else jnp.float32)})
    assert_each_rank(group, message, "a float32[2]", "a bfloat16[2]")


@claim()
def another_name_is_named_with_each_ranks(group: fddp.Group):
    message = init_error(group, {"other" if odd(group) else "kernel": jnp.zeros(2)})
    assert_each_rank(group, message, "kernel float32[2]", "other float32[2]")


@claim()
def another_number_of_parameters_is_named_with_each_ranks(group: fddp.Group):
    params = {"a": jnp.zeros(2)} | ({"more": jnp.zeros(1)} if odd(group) else {})
    message = init_error(group, params)
    assert_each_rank(group, message, "1 parameters", "2 parameters")
    assert_each_rank(group, message, "", "more float32[1]")


@claim()
def very_different_trees_are_a_short_message(group: fddp.Group):
    message = init_error(
        group, {f"{'b' if odd(group) else 'a'}{k}": jnp.zeros(2) for k in range(200)}
    )
    assert_each_rank(group, message, "more", "more")
    assert len(message) < 4096


@claim()
def other_options_are_named_with_each_ranks(group: fddp.Group):
    for name, most, odd_value in (
        ("bucket_cap_mb", 25, 12.5),
        ("schedule", "overlap", "after"),
        ("accumulation_steps", 1, 2),
        ("broadcast_buffers", True, False),
    ):
        message = init_error(
            group, {"a": jnp.zeros(2)}, **{name: odd_value if odd(group) else most}
        )
        assert_each_rank(group, message, f"{name}={most!r}", f"{name}={odd_value!r}")


@claim()
def another_optimizer_is_named_with_each_ranks(group: fddp.Group):
    optimizer = optax.adam(0.1) if odd(group) else optax.sgd(0.1, momentum=0.9)
    message = init_error(group, {"a": jnp.zeros(2)}, optimizer)
    assert_each_rank(group, message, "optimizer 0/trace/a", "optimizer 0/mu/a")


@claim()
def buffers_on_one_rank_only_are_an_error(group: fddp.Group):
    step = fddp.train_step(loss, optax.sgd(0.1), group=group)
    buffers = {"mean": jnp.zeros(3)} if odd(group) else None
    message = the_same(group, error_of(lambda: step.init(jnp.zeros(2), model_state=buffers)))
    assert_each_rank(group, message, "", "model_state mean float32[3]")


@claim()
def a_random_key_on_one_rank_only_is_an_error(group: fddp.Group):
    step = fddp.train_step(loss, optax.sgd(0.1), group=group)
    key = jax.random.key(0) if odd(group) else None
    message = the_same(group, error_of(lambda: step.init(jnp.zeros(2), rng=key)))
    assert_each_rank(group, message, "", "rng")


@claim()
def no_parameters_on_one_rank_is_an_error_on_all(group: fddp.Group):
    message = init_error(group, {} if odd(group) else {"a": jnp.zeros(2)})
    assert f"1 of {group.size} ranks failed" in message
    assert f"rank {group.size - 1}: ValueError: params holds no arrays" in message


@claim()
def no_float_parameters_on_all_ranks_is_each_ranks_own_error(group: fddp.Group):
    assert "no float arrays" in init_error(group, {"a": jnp.zeros(2, jnp.int32)})


### The first batch


def step_error(
    group: fddp.Group, batch: Any, kind: type[Exception] = ValueError, **options: Any
) -> str:
    """The error of a first step, the same on all ranks."""
    step = fddp.train_step(options.pop("loss", loss), optax.sgd(0.1), group=group, **options)
    state = step.init({"a": jnp.zeros(())})
    return the_same(group, error_of(lambda: step(state, batch), kind))


@claim()
def rows_that_one_rank_cannot_divide_are_an_error_on_all(group: fddp.Group):
    message = step_error(group, np.zeros(3 if odd(group) else 4, np.float32), accumulation_steps=2)
    assert (
        f"rank {group.size - 1}: ValueError: a batch of 3 rows cannot be divided into 2 equal parts"
        in message
    )
    assert "rank 0" not in message


@claim()
def a_batch_that_one_rank_lacks_is_an_error_on_all(group: fddp.Group):
    message = step_error(group, None if odd(group) else np.zeros(4, np.float32))
    assert f"rank {group.size - 1}: ValueError: the batch is empty: got None" in message


@claim()
def a_batch_without_rows_on_one_rank_is_an_error_on_all(group: fddp.Group):
    message = step_error(group, np.zeros(0 if odd(group) else 4, np.float32))
    assert f"rank {group.size - 1}: ValueError: a batch has 0 rows" in message


@claim()
def other_rows_in_the_first_batch_are_named_with_each_ranks(group: fddp.Group):
    message = step_error(group, np.zeros(2 if odd(group) else 4, np.float32))
    assert_each_rank(group, message, "float32[4]", "float32[2]")


@claim()
def another_batch_dtype_is_named_with_each_ranks(group: fddp.Group):
    message = step_error(group, np.zeros(4, np.float16 if odd(group) else np.float32))
    assert_each_rank(group, message, "float32[4]", "float16[4]")


@claim()
def a_loss_that_fails_on_one_rank_is_an_error_on_all(group: fddp.Group):
    def failing(params: Any, x: Any) -> jax.Array:
        if odd(group):
            raise ValueError("no file on this host")
        return loss(params, x)

    message = step_error(group, np.zeros(4, np.float32), loss=failing)
    assert f"1 of {group.size} ranks failed" in message
    assert f"rank {group.size - 1}: ValueError: no file on this host" in message


@claim()
def an_error_of_any_kind_reaches_all_ranks(group: fddp.Group):
    def failing(params: Any, x: Any) -> jax.Array:
        if odd(group):
            raise OSError("disk full")
        return loss(params, x)

    message = step_error(group, np.zeros(4, np.float32), Exception, loss=failing)
    assert f"rank {group.size - 1}: OSError: disk full" in message


@claim()
def a_loss_that_fails_on_all_ranks_is_each_ranks_own_error(group: fddp.Group):
    def failing(params: Any, x: Any) -> jax.Array:
        raise KeyError("label")

    assert step_error(group, np.zeros(4, np.float32), KeyError, loss=failing) == "'label'"


@claim()
def a_metric_that_one_rank_lacks_is_an_error_on_all(group: fddp.Group):
    def measured(params: Any, x: Any) -> Any:
        return loss(params, x), {"more": jnp.mean(x)} if odd(group) else {}

    message = step_error(group, np.zeros(4, np.float32), loss=measured, has_aux=True)
    assert "more" in message


@claim()
def a_step_and_a_no_sync_at_first_are_an_error(group: fddp.Group):
    step = fddp.train_step(loss, optax.sgd(0.1), group=group)
    state = step.init({"a": jnp.zeros(())})
    call = step.no_sync if odd(group) else step
    message = the_same(group, error_of(lambda: call(state, np.zeros(4, np.float32))))
    assert_each_rank(group, message, "call step", "call no_sync")


@claim()
def ranks_train_on_after_an_error_that_they_caught(group: fddp.Group):
    step = fddp.train_step(loss, optax.sgd(0.5), group=group)
    state = step.init({"a": jnp.zeros(())})
    the_same(group, error_of(lambda: step(state, None if odd(group) else np.ones(4, np.float32))))
    state, _ = step(state, np.ones(4, np.float32))
    assert float(state.params["a"]) == 1


@claim(quick=("mpi",))
def a_rank_that_gives_no_state_or_another_optimizers_fails_on_all(group: fddp.Group):
    step = fddp.train_step(loss, optax.sgd(0.1, momentum=0.9), group=group)
    state = step.init({"a": jnp.zeros(())})
    foreign_state = fddp.train_step(loss, optax.adam(0.1), group=group).init({"a": jnp.zeros(())})
    x = np.ones(4, np.float32)
    for wrong, kind, error_message in (
        ((state, None), TypeError, "state must be a fddp.TrainState, got tuple"),
        (foreign_state, ValueError, "the state belongs to another optimizer"),
    ):
        argument: Any = wrong if odd(group) else state
        for call in (step, lambda state, x: fddp.measure(step, state, [x])):
            message = the_same(
                group, error_of(lambda call=call, argument=argument: call(argument, x), kind)
            )
            assert f"rank {group.size - 1}: {kind.__name__}: {error_message}" in message, message
    state, _ = step(state, x)
    assert float(state.params["a"]) > 0


### The drop-in for jax.value_and_grad


@claim()
def value_and_grad_compares_parameters(group: fddp.Group):
    f = fddp.value_and_grad(loss, group=group)
    params = {"a": jnp.zeros((2, 1) if odd(group) else (1, 1))}
    message = the_same(group, error_of(lambda: f(params, np.zeros(4, np.float32))))
    assert_each_rank(group, message, "a float32[1, 1]", "a float32[2, 1]")


@claim()
def value_and_grad_compares_options(group: fddp.Group):
    f = fddp.value_and_grad(loss, group=group, bucket_cap_mb=0 if odd(group) else 25)
    params = {"a": jnp.zeros(()), "b": jnp.zeros(())}
    message = the_same(group, error_of(lambda: f(params, np.zeros(4, np.float32))))
    assert_each_rank(group, message, "bucket_cap_mb=25", "bucket_cap_mb=0")


@claim()
def value_and_grad_compares_buffers(group: fddp.Group):
    def buffered(params: Any, x: Any, *, model_state: Any) -> Any:
        return loss(params, x), (model_state, None)

    f = fddp.value_and_grad(buffered, group=group)
    buffers = {"mean": jnp.zeros(2 if odd(group) else 1)}
    message = the_same(
        group, error_of(lambda: f(jnp.zeros(()), np.zeros(4, np.float32), model_state=buffers))
    )
    assert_each_rank(group, message, "mean float32[1]", "mean float32[2]")


@claim(backends=("gloo",))
def collectives_of_the_loss_that_only_some_ranks_have_are_told_before_they_hang(group: fddp.Group):
    def loss(p: Any, x: Any) -> jax.Array:
        value = jnp.mean((p - x) ** 2)
        return jax.lax.pmean(value, "replica") if odd(group) else value

    step = fddp.train_step(loss, optax.sgd(0.1), group=group)
    state = step.init(jnp.zeros(2))
    message = the_same(group, error_of(lambda: step(state, np.ones((4, 2), np.float32))))
    assert "compiled collectives" in message
    assert_each_rank(group, message, "collectives: 1", "collectives: 3")


@claim()
def ranks_that_read_the_same_rows_are_told_so_once(group: fddp.Group):
    distinct = np.random.default_rng(group.rank).normal(size=(4, 3)).astype(np.float32)
    same = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    for rows, warned in ((distinct, False), (same, group.rank == 0)):
        step = fddp.train_step(loss, optax.sgd(0.1), group=group)
        words = io.StringIO()
        state = step.init({"a": jnp.zeros(3)})
        with contextlib.redirect_stderr(words):
            for _ in range(2):
                state, _ = step(state, rows)
        ranks = ", ".join(map(str, range(group.size)))
        assert words.getvalue().count(f"ranks {ranks} pass the same first rows") == warned, (
            words.getvalue()
        )


class Bag:
    """A class that flattens in the order of its attributes; a set has another one per process."""

    def __init__(self, **named: Any) -> None:
        self.__dict__.update(named)


jax.tree_util.register_pytree_node(
    Bag,
    lambda bag: (tuple(bag.__dict__.values()), tuple(bag.__dict__)),
    lambda names, values: Bag(**dict(zip(names, values))),
)


def in_another_order(group: fddp.Group, **named: Any) -> dict[str, Any]:
    """The same names, reversed on the odd rank."""
    return dict(reversed(named.items())) if odd(group) else named


@claim()
def classes_without_keys_in_another_order_are_an_error_that_names_both_orders(group: fddp.Group):
    named = in_another_order(group, first=jnp.zeros(2), second=jnp.ones(2))
    message = init_error(group, [Bag(**named)])
    assert_each_rank(group, message, "Bag[('first', 'second')]", "Bag[('second', 'first')]")


@claim()
def leaves_in_another_order_are_named_in_each_ranks_order(group: fddp.Group):
    rows = OrderedDict(
        in_another_order(group, a=np.zeros((4, 2)), b=np.zeros((4, 3)), c=np.ones(4))
    )
    message = step_error(group, rows, loss=lambda p, x: jnp.mean(p["a"] * x["c"]))
    assert_each_rank(group, message, "the order batch a float", "the order batch c float")


def remarks_on(group: fddp.Group, loss: Any) -> int:
    """How many remarks on other programs a first step prints."""
    words = io.StringIO()
    step = fddp.train_step(loss, optax.sgd(0.1), group=group)
    state = step.init((jnp.ones((3, 3)), jnp.full((3, 3), 2.0)))
    rows = np.random.default_rng(group.rank).normal(size=(4, 3)).astype(np.float32)
    with contextlib.redirect_stderr(words):
        step(state, rows)
    return words.getvalue().count("are different programs")


@claim(quick=("mpi",))
def parameters_in_the_order_of_a_set_are_remarked_on(group: fddp.Group):
    def loss(p: Any, x: Any) -> jax.Array:
        first, second = reversed(p) if odd(group) else p
        return jnp.mean(jnp.tanh(x @ first) @ second)

    assert remarks_on(group, loss) == (group.rank == 0)


@claim(quick=("mpi",))
def numbers_of_ranks_and_prints_of_one_rank_are_not_remarked_on(group: fddp.Group):
    @jax.jit
    def layer(x: Any, w: Any) -> jax.Array:
        if odd(group):
            jax.debug.callback(lambda _: None, jnp.max(jnp.sin(x)))
        return jnp.tanh(x @ w)

    def loss(p: Any, x: Any) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(0), group.rank)
        x = jax.checkpoint(layer)(x + jax.random.normal(key, x.shape), p[0])
        x, _ = jax.lax.scan(lambda x, _: (layer(x, p[1]), None), x, None, length=2)
        return jnp.mean(x) * (group.rank + 1.5) + p[0][group.rank % 3, 0]

    assert remarks_on(group, loss) == 0
