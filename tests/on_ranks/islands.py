"""Islands that do not wait for each other."""

import io
import os
import signal
import time
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.checkpoints import shared_folder
from on_ranks.claims import claim, error_of, same_on_all_ranks
from problems import RATE, square
from trees import same_bits

import fddp
from fddp.islands.merge_log import Merged, read_log


def batches_of(rank: int, count: int) -> np.ndarray:
    return np.sin(np.arange(4 * count, dtype=np.float32) + 100 * rank).reshape(count, 4)


def local_copy(copies: Any) -> np.ndarray:
    """This island's own array."""
    return np.asarray(copies.parts.addressable_shards[0].data).reshape(copies.shape)


@claim(quick=("gloo",))
def islands_that_do_not_wait_are_made_again_from_their_log_to_the_same_bits(group: fddp.Group):
    batches = [
        batches_of(rank, 5 + 2 * rank) for rank in range(group.size)
    ]  # as many steps as each likes
    cases: Any = ((1, 0.0, "fused"), (max(group.size - 1, 1), 0.25, "staged"))
    for quorum, mix, schedule in cases:
        with shared_folder(group) as folder:
            optimizer = fddp.local_steps(
                optax.sgd(RATE, momentum=0.5),
                outer=optax.sgd(0.7, momentum=0.9),
                every=2,
                quorum=quorum,
                mix=mix,
                discount=lambda age: 0.9**age,
                log=folder / "merges.jsonl",
            )
            step = fddp.train_step(square, optimizer, group=group, schedule=schedule)
            state = step.init(jnp.zeros(()))
            nbytes = []
            for x in batches[group.rank]:
                state, info = step(state, x)
                nbytes.append(int(info.sent.sum()))
            assert nbytes[:4] == [0, 4, 0, 4]
            state = fddp.meet(step, state)
            assert same_on_all_ranks(
                group, (local_copy(state.opt_state.shared), local_copy(state.params))
            )
            arguments: Any = (square, optimizer, jnp.zeros(()), batches)
            replayed = fddp.replay_islands(folder / "merges.jsonl", *arguments, schedule=schedule)
            same_bits(local_copy(state.opt_state.shared), replayed.params)
            same_bits(local_copy(state.params), local_copy(replayed.states[group.rank].params))


@claim(quick=("gloo",))
def an_island_that_is_stopped_stops_no_other_be_it_rank_0(group: fddp.Group):
    for stopped in (0, 1):
        with shared_folder(group) as folder:
            train_while_one_is_stopped(group, stopped, folder)
            *merges, _ = read_log(folder / "merges.jsonl")
            ranks = [
                island for line in merges if isinstance(line, Merged) for island in line.islands
            ]
            assert [ranks.count(rank) for rank in range(group.size)] == [
                1 if rank == stopped else 21 for rank in range(group.size)
            ]


@claim(sizes=(4,), quick=())
def an_island_whose_leader_is_stopped_is_late_as_a_whole(group: fddp.Group):
    with shared_folder(group) as folder:
        train_while_one_is_stopped(group, 2, folder, island=2)
        *merges, _ = read_log(folder / "merges.jsonl")
        merged_islands = [
            island for line in merges if isinstance(line, Merged) for island in line.islands
        ]
        assert (merged_islands.count(0), merged_islands.count(1)) == (21, 1)


@claim(sizes=(4,), quick=())
def islands_of_two_are_made_again_from_their_log(group: fddp.Group):
    batches = [batches_of(rank, 5 + 2 * (rank // 2)) for rank in range(group.size)]
    with shared_folder(group) as folder:
        optimizer = fddp.local_steps(
            optax.sgd(RATE, momentum=0.5),
            outer=optax.sgd(0.7, momentum=0.9),
            every=2,
            quorum=1,
            island=2,
            log=folder / "merges.jsonl",
        )
        step = fddp.train_step(square, optimizer, group=group)
        state = step.init(jnp.zeros(()))
        for x in batches[group.rank]:
            state, _ = step(state, x)
        state = fddp.meet(step, state)
        assert same_on_all_ranks(
            group, (local_copy(state.params), local_copy(state.opt_state.outer[0].trace))
        )
        rows = [np.concatenate(batches[k : k + 2], axis=1) for k in (0, 2)]
        replayed = fddp.replay_islands(
            folder / "merges.jsonl", square, optimizer, jnp.zeros(()), rows
        )
        np.testing.assert_allclose(
            local_copy(state.opt_state.shared), replayed.params, rtol=1e-5, atol=1e-6
        )


def train_while_one_is_stopped(
    group: fddp.Group, stopped: int, folder: Path, island: int = 1
) -> None:
    """Stops a rank after its first step until the ranks of all other islands have made twenty
    more."""
    pids = group.all_gather_object(os.getpid())
    running = [rank for rank in range(group.size) if rank // island != stopped // island]
    optimizer = fddp.local_steps(
        optax.sgd(RATE), quorum=1, island=island, log=folder / "merges.jsonl"
    )
    step = fddp.train_step(square, optimizer, group=group)
    state, _ = step(step.init(jnp.zeros(())), batches_of(group.rank, 1)[0])
    if group.rank == stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif group.rank in running:
        wait(
            lambda: (
                Path(f"/proc/{pids[stopped]}/stat").read_text().rpartition(") ")[2].startswith("T")
            )
        )
        for x in batches_of(group.rank, 20):
            state, _ = step(state, x)
        (folder / f"{group.rank}").touch()
    if group.rank == running[0]:
        wait(lambda: all((folder / f"{rank}").exists() for rank in running))
        os.kill(pids[stopped], signal.SIGCONT)
    fddp.meet(step, state)


@claim()
def a_server_that_dies_is_an_error_on_every_rank(group: fddp.Group):
    island = 2 if group.size == 4 else 1
    step = fddp.train_step(
        square, fddp.local_steps(optax.sgd(RATE), quorum=1, island=island), group=group
    )
    state, _ = step(step.init(jnp.zeros(())), batches_of(group.rank, 1)[0])
    group.barrier()
    if group.is_main:
        os.kill(servers()[-1], signal.SIGKILL)
    group.barrier()
    words = error_of(lambda: step(state, batches_of(group.rank, 1)[0]), RuntimeError)
    assert "the server of the shared parameters, a process on rank 0's host, has ended" in words


@claim(quick=("gloo",))
def islands_go_on_from_a_checkpoint_with_the_newest_parameters(group: fddp.Group):
    def quorum_step() -> fddp.TrainStep:
        return fddp.train_step(square, fddp.local_steps(optax.sgd(RATE), quorum=1), group=group)

    with shared_folder(group) as folder:
        step = quorum_step()
        state = step.init(jnp.zeros(()))
        for x in batches_of(group.rank, 3):
            state, _ = step(state, x)
        merged_state = fddp.meet(step, state)
        with fddp.Checkpoints(folder, step) as checkpoints:
            checkpoints.save(merged_state, now=True)
        step = quorum_step()
        with redirect_stderr(io.StringIO()), fddp.Checkpoints(folder, step) as checkpoints:
            state, _ = checkpoints.restore(step.init(jnp.zeros(())))
        same_bits(local_copy(state.params), local_copy(merged_state.params))
        state, _ = step(state, batches_of(group.rank, 1)[0])
        assert local_copy(fddp.meet(step, state).opt_state.version) > local_copy(
            merged_state.opt_state.version
        )


@claim(quick=("gloo",))
def a_state_that_is_not_the_last_is_no_islands(group: fddp.Group):
    step = fddp.train_step(square, fddp.local_steps(optax.sgd(RATE), quorum=1), group=group)
    state, _ = step(step.init(jnp.zeros(())), batches_of(group.rank, 1)[0])
    version = int(local_copy(fddp.meet(step, state).opt_state.version))
    state = step.init(jnp.zeros(()))
    words = error_of(lambda: step(state, batches_of(group.rank, 1)[0]), ValueError)
    assert (
        f"version 0 of the shared parameters, and the island received version {version} last"
        in words
    )


def wait(condition: Any) -> None:
    while not condition():
        time.sleep(0.01)


def servers() -> list[int]:
    """The servers of this process, in the order of their start."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [
        int(pid)
        for pid in children
        if b"fddp.islands.server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
