"""Islands that do not wait for each other, against NumPy in an order of merges found by hand."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trees
from problems import layer

import fddp
from fddp.islands.merge_log import Meeting, Merged, read_log, serialize
from fddp.islands.merging import Contribution, SharedParams, merge, merging_of, on_this_host
from fddp.islands.quorum import Arrival, Quorum, due_at

close = partial(trees.close, atol=1e-10)

DRAW = np.random.default_rng(7)
PARAMS = {"b": DRAW.normal(size=5), "w": DRAW.normal(size=(3, 5))}
RATE = 0.1
# (islands that are merged, the versions that they began from, steps that each had made)
Order = Sequence[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]

# Islands whose steps take 1, 1.5 and 4 s, six steps each, two between exchanges. The first two come
# at 2 and 3 s, again at 5 and 6 s; the third comes at 8 s with the first one's third. The second
# one's third waits from 9 s on, and the third island's second comes at 16 s. Then it is alone.
QUORUM_OF_TWO: Order = [
    ((0, 1), (0, 0), (2, 2)),
    ((0, 1), (1, 1), (4, 4)),
    ((0, 2), (2, 0), (6, 2)),
    ((1, 2), (2, 3), (6, 4)),
    ((2,), (4,), (6,)),
]
# Two islands whose steps take 1 and 3.5 s; the first makes four steps, the other two, with an
# exchange after each.
BOUNDED: dict[int, Order] = {
    0: [((0, 1), (0, 0), (1, 1)), ((0, 1), (1, 1), (2, 2)), ((0,), (2,), (3,)), ((0,), (3,), (4,))],
    1: [((0,), (0,), (1,)), ((0, 1), (1, 0), (2, 1)), ((0,), (2,), (3,)), ((0, 1), (3, 2), (4, 2))],
    4: [
        *(((0,), (k,), (k + 1,)) for k in range(3)),
        ((1,), (0,), (1,)),
        ((0,), (3,), (4,)),
        ((1,), (4,), (2,)),
    ],
}


def rows(island: int, count: int) -> list[np.ndarray]:
    """Batches of an island: their sizes differ, so that its steps weigh differently."""
    draw = np.random.default_rng(island)
    return [draw.normal(size=(4 + 2 * (k % 3), 3)) for k in range(count)]


def gradient(params: dict[str, Any], x: np.ndarray) -> dict[str, np.ndarray]:
    """The gradient of `problems.layer`, written out."""
    y = np.tanh(x @ params["w"])
    delta = 2 * (y - params["b"]) / y.size
    return {"b": -delta.sum(axis=0), "w": x.T @ (delta * (1 - y**2))}


def halves(count: int) -> list[np.ndarray]:
    """Batches that two replicas share: the first two islands' rows, one behind the other."""
    return [np.concatenate(both) for both in zip(rows(0, count), rows(1, count))]


def by_hand(
    counts: Sequence[int],
    order: Order,
    *,
    rate: float = 1.0,
    momentum: float = 0.0,
    half: float = 1.0,
    mix: float = 0.0,
) -> dict[str, np.ndarray]:
    """The shared parameters after merges in this order, in NumPy."""
    versions = [PARAMS]
    velocity = {name: np.zeros_like(x) for name, x in PARAMS.items()}
    local = [dict(PARAMS) for _ in counts]
    steps_done = [0] * len(counts)
    versions_taken = [0] * len(counts)
    batches = [rows(k, count) for k, count in enumerate(counts)]
    for islands, began, steps in order:
        total = {name: np.zeros_like(x) for name, x in PARAMS.items()}
        weights = 0.0
        for k, version, until in zip(islands, began, steps):
            if versions_taken[k] != version:
                versions_taken[k] = version
                local[k] = {
                    name: (1 - mix) * versions[version][name] + mix * local[k][name]
                    for name in local[k]
                }
            stretch = batches[k][steps_done[k] : until]
            for x in stretch:
                slope = gradient(local[k], x)
                local[k] = {name: local[k][name] - RATE * slope[name] for name in slope}
            weight = sum(len(x) / 4 for x in stretch)  # the first batch has four rows
            age = len(versions) - 1 - version
            for name in total:
                total[name] += weight * half**age * (versions[version][name] - local[k][name])
            weights += weight
            steps_done[k] = until
        velocity = {name: momentum * velocity[name] + total[name] / weights for name in total}
        versions.append({name: versions[-1][name] - rate * velocity[name] for name in total})
    return versions[-1]


def simulated(
    counts: Sequence[int], seconds: Sequence[float], every: int, **options: Any
) -> fddp.Islands:
    optimizer = fddp.local_steps(optax.sgd(RATE), every=every, **options)
    batches = [rows(k, count) for k, count in enumerate(counts)]
    return fddp.simulate_islands(
        layer, optimizer, PARAMS, batches, seconds=lambda island, number: seconds[island]
    )


def order_of(islands: fddp.Islands) -> list[Any]:
    return [
        (line.islands, line.began, line.steps) for line in islands.log if isinstance(line, Merged)
    ]


### The rule


def test_a_quorum_is_due_when_its_grace_is_over_or_all_have_come():
    due = partial(due_at, Quorum(2, grace_s=3.0), 5, {0: 5, 1: 4, 2: 0})
    assert due([]) is None
    assert due([Arrival(0, 1.0)]) is None
    assert due([Arrival(0, 1.0), Arrival(2, 2.5)]) == 5.5
    assert due([Arrival(0, 1.0), Arrival(2, 2.5), Arrival(1, 4.0)]) == 4.0


def test_islands_that_have_left_are_not_waited_for():
    assert due_at(Quorum(3), 2, {1: 2}, [Arrival(1, 4.0)]) == 4.0
    assert due_at(Quorum(3), 2, {}, [Arrival(1, 4.0)]) == 4.0


@pytest.mark.parametrize("bound, waits", [(None, False), (3, False), (2, True), (0, True)])
def test_an_island_that_would_grow_too_old_is_waited_for(bound: int | None, waits: bool):
    due = due_at(Quorum(1, max_staleness=bound), 5, {0: 5, 1: 3}, [Arrival(0, 1.0)])
    assert due == (None if waits else 1.0)


def test_no_contribution_is_older_than_its_bound():
    for seed in range(20):
        draw = np.random.default_rng(seed)
        bound = int(draw.integers(0, 5))
        speeds = draw.uniform(0.1, 3, size=4)
        version = 0
        began = dict.fromkeys(range(4), 0)
        comes = {k: float(speeds[k]) for k in range(4)}
        arrivals = list[Arrival]()
        rule = Quorum(int(draw.integers(1, 5)), float(draw.uniform(0, 1)), bound)
        for _ in range(200):
            due = due_at(rule, version, began, arrivals)
            first = min(comes, key=comes.__getitem__, default=None)
            if first is not None and (due is None or comes[first] <= due):
                arrivals.append(Arrival(first, comes.pop(first)))
                continue
            assert due is not None  # all have come
            assert all(version - began[arrival.island] <= bound for arrival in arrivals)
            version += 1
            for arrival in arrivals:
                began[arrival.island] = version
                comes[arrival.island] = due + float(speeds[arrival.island])
            arrivals = []
        assert version > 10


### A merge


def test_a_merge_is_a_step_of_the_outer_optimizer_weighted_and_discounted_by_age(x64: None):
    w = np.array([1.0, -2.0])
    merging = on_this_host(merging_of(optax.sgd(0.7, momentum=0.9), lambda age: 0.5**age, w))
    before = SharedParams(
        3, [w], [np.asarray(x) for x in jax.tree.leaves(optax.sgd(0.7, momentum=0.9).init(w))]
    )
    contributions = [
        Contribution(1, 3, 2.0, 8, [np.array([0.5, 1.0])]),
        Contribution(0, 1, 6.0, 4, [np.array([4.0, -8.0])]),
    ]
    after = merge(merging, before, contributions)
    gradient = (2 * np.array([0.5, 1.0]) + 6 * 0.25 * np.array([4.0, -8.0])) / 8
    assert after.version == 4
    close(after.params, [w - 0.7 * gradient])
    gradient_twice = 0.9 * gradient + gradient
    close(
        merge(
            merging,
            after,
            [contribution._replace(began=contribution.began + 1) for contribution in contributions],
        ).params,
        [w - 0.7 * gradient - 0.7 * gradient_twice],
    )


def test_pseudo_gradients_of_sixteen_bits_are_added_in_thirty_two():
    w = jnp.zeros(2, jnp.bfloat16)
    merging = on_this_host(merging_of(optax.sgd(1.0), None, w))
    contributions = [
        Contribution(k, 0, 1.0, 1, [np.full(2, x, jnp.bfloat16)])
        for k, x in enumerate((256.0, 1.0, 1.0, 1.0, 1.0))
    ]
    after = merge(merging, SharedParams(0, [np.asarray(w)], []), contributions)
    assert after.params[0].tolist() == [-52.0, -52.0]  # in bfloat16 256 + 1 is 256


### Runs


@pytest.mark.steps
@pytest.mark.parametrize(
    "hand, options",
    [
        ({}, {}),
        ({"rate": 0.7, "momentum": 0.9}, {"outer": optax.sgd(0.7, momentum=0.9)}),
        ({"half": 0.5}, {"discount": lambda age: 0.5**age}),
        ({"mix": 0.25}, {"mix": 0.25}),
    ],
    ids=["local SGD", "momentum", "discount", "mix"],
)
def test_three_islands_with_a_quorum_of_two_do_as_by_hand(
    x64: None, hand: dict[str, float], options: dict[str, Any]
):
    islands = simulated([6, 6, 6], [1.0, 1.5, 4.0], every=2, quorum=2, **options)
    assert order_of(islands) == QUORUM_OF_TWO
    assert islands.log[-1] == Meeting(5)
    close(islands.params, by_hand([6, 6, 6], QUORUM_OF_TWO, **hand))


@pytest.mark.steps
@pytest.mark.parametrize("bound", BOUNDED)
def test_asynchronous_updates_of_bounded_staleness_do_as_by_hand(x64: None, bound: int):
    islands = simulated([4, 2], [1.0, 3.5], every=1, quorum=1, max_staleness=bound)
    assert order_of(islands) == BOUNDED[bound]
    close(islands.params, by_hand([4, 2], BOUNDED[bound]))


@pytest.mark.steps
def test_without_staleness_it_is_what_islands_do_that_wait(x64: None, group: Any):
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    options: dict[str, Any] = {"outer": outer, "every": 2}
    batches = np.random.default_rng(1).normal(size=(3, 6, 4, 3))
    simulated = fddp.simulate_islands(
        layer,
        fddp.local_steps(optax.adam(RATE), quorum=1, max_staleness=0, **options),
        PARAMS,
        list(batches),
        seconds=lambda island, number: 1.0 + island,
    )
    step = fddp.train_step(layer, fddp.local_steps(optax.adam(RATE), **options), group=group(3))
    state = step.init(PARAMS)
    for number in range(6):
        state, _ = step(state, batches[:, number].reshape(12, 3))
    close(simulated.params, state.opt_state.shared)


@pytest.mark.steps
def test_a_run_is_made_again_from_its_log_to_the_same_bits(tmp_path: Path):
    def loss(params: Any, x: Any, rng: Any) -> Any:
        return layer(params, x * jax.random.bernoulli(rng, 0.5, x.shape))

    optimizer = fddp.local_steps(
        optax.adam(RATE), outer=optax.sgd(0.7, momentum=0.9), every=2, quorum=1, mix=0.3
    )
    batches = [rows(k, count) for k, count in enumerate((7, 5, 3))]
    arguments: Any = (loss, optimizer, PARAMS, batches)
    islands = fddp.simulate_islands(
        *arguments, seconds=lambda island, number: 1.0 + island * number, rng=jax.random.key(3)
    )
    log = tmp_path / "merges.jsonl"
    log.write_text("".join(serialize(line) + "\n" for line in islands.log))
    replayed = fddp.replay_islands(log, *arguments, rng=jax.random.key(3))
    assert replayed.log == islands.log
    trees.same_bits((replayed.params, replayed.states), (islands.params, islands.states))


@pytest.mark.steps
def test_an_island_of_two_counts_as_one_replica_with_its_rows(x64: None):
    batches = [halves(4), halves(2)[::-1]]
    options: Any = {"outer": optax.sgd(0.7, momentum=0.9), "every": 2, "quorum": 1, "mix": 0.25}
    simulate: Any = partial(
        fddp.simulate_islands,
        params=PARAMS,
        batches=batches,
        seconds=lambda island, step: 1 + island,
    )
    two = simulate(layer, fddp.local_steps(optax.adam(RATE), island=2, **options))
    single = simulate(layer, fddp.local_steps(optax.adam(RATE), **options))
    close(two.params, single.params)
    # Twice as many replicas, which weigh twice as much.
    twice = [line._replace(weights=tuple(2 * w for w in line.weights)) for line in single.log[:-1]]
    assert list(two.log[:-1]) == twice
    replayed = fddp.replay_islands(
        two.log, layer, fddp.local_steps(optax.adam(RATE), island=2, **options), PARAMS, batches
    )
    trees.same_bits(replayed.params, two.params)


def test_what_one_device_cannot_make_again_is_refused():
    def replay_quorum(rng: Any = None, **options: Any) -> Any:
        optimizer = fddp.local_steps(optax.sgd(RATE), quorum=1, **options)
        return fddp.replay_islands([], layer, optimizer, PARAMS, [rows(0, 1), rows(1, 1)], rng=rng)

    with pytest.raises(ValueError, match="one device has no nodes"):
        replay_quorum(island="node")
    with pytest.raises(ValueError, match="the first 3 steps run on all islands together"):
        replay_quorum(start=3)
    with pytest.raises(ValueError, match="each replica of an island draws separate random numbers"):
        replay_quorum(jax.random.key(0), island=2)


@pytest.mark.steps
def test_a_log_of_another_training_is_refused():
    islands = simulated([4, 2], [1.0, 3.5], every=1, quorum=1)
    replay: Any = partial(
        fddp.replay_islands, loss_fn=layer, optimizer=fddp.local_steps(optax.sgd(RATE), quorum=1)
    )
    with pytest.raises(ValueError, match="island 1 came in the log with step 2 and weight"):
        replay(islands.log, params=PARAMS, batches=[rows(0, 4), rows(1, 1)])
    with pytest.raises(ValueError, match="version 2 follows version 0 in the log"):
        replay(islands.log[1:], params=PARAMS, batches=[rows(0, 4), rows(1, 2)])


def test_a_line_that_is_none_of_a_log_is_named(tmp_path: Path):
    log = tmp_path / "log"
    log.write_text('{"met": 1}\n{"version": 2}\n')
    with pytest.raises(ValueError, match="log, line 2 is not a line of a log of merges"):
        read_log(log)


### Arguments of users


@pytest.mark.parametrize(
    "options, words",
    [
        ({"quorum": 0}, "quorum must be a whole number of 1 or more, got 0"),
        ({"quorum": 1, "grace_s": -1}, "grace_s must be a number of seconds of 0 or more, got -1"),
        (
            {"quorum": 1, "max_staleness": 0.5},
            "max_staleness must be a whole number of 0 or more, got 0.5",
        ),
        ({"grace_s": 1.0}, "grace_s is an option of islands that do not wait: give quorum, too"),
        ({"max_staleness": 0}, "max_staleness is an option of islands that do not wait"),
        (
            {"quorum": 1, "delay": 1, "every": 4},
            "give no fragments or delay with quorum; got fragments=1, delay=1",
        ),
        ({"quorum": 1, "fragments": 2, "every": 4}, "got fragments=2, delay=0"),
    ],
)
def test_a_rule_that_cannot_be_followed_is_refused(options: dict[str, Any], words: str):
    with pytest.raises(ValueError) as error:
        fddp.local_steps(optax.sgd(RATE), **options)
    assert words in str(error.value)


def test_an_outer_optimizer_with_a_random_key_is_refused():
    outer = optax.chain(optax.add_noise(0.01, 0.55, key=0), optax.sgd(1.0))
    with pytest.raises(ValueError, match="the outer optimizer's state has a random key"):
        fddp.local_steps(optax.sgd(0.1), outer=outer, quorum=1).init(jnp.zeros(()))


def test_a_quorum_of_more_islands_than_there_are_is_refused(group: Any):
    with pytest.raises(
        ValueError, match="quorum must be no more than the number of islands, 2, got 3"
    ):
        fddp.train_step(layer, fddp.local_steps(optax.sgd(RATE), quorum=3), group=group(2))


def test_a_quorum_counts_islands_and_not_their_replicas(group: Any):
    with pytest.raises(
        ValueError, match="quorum must be no more than the number of islands, 2, got 3"
    ):
        fddp.train_step(
            layer, fddp.local_steps(optax.sgd(RATE), quorum=3, island=2), group=group(4)
        )


@pytest.mark.steps
def test_replicas_of_one_process_are_told_that_islands_are_processes(group: Any):
    step = fddp.train_step(layer, fddp.local_steps(optax.sgd(RATE), quorum=1), group=group(2))
    assert "not the mathematics of one replica" in repr(step)
    with pytest.raises(ValueError, match="an asynchronous island is one process or several, and"):
        step(step.init(PARAMS), np.ones((4, 3)))


@pytest.mark.steps
def test_a_quorum_of_all_is_what_it_is_without(group: Any):
    options: Any = ({}, {"quorum": 2, "grace_s": 1.0}, {"quorum": 1, "max_staleness": 0})
    steps = [
        fddp.train_step(
            layer, fddp.local_steps(optax.sgd(RATE), every=2, **quorum_options), group=group(2)
        )
        for quorum_options in options
    ]
    states = [step.init(PARAMS) for step in steps]
    for x in rows(0, 2):
        states = [step(state, x)[0] for step, state in zip(steps, states)]
    trees.equal(states[1], states[0])
    trees.equal(states[2], states[0])
