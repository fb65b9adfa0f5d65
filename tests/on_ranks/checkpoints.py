"""Ranks save and restore jointly: states in shards in parts; for others only rank 0 must see the
folder."""

import io
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.claims import claim, error_of, same_on_all_ranks, sampled

import fddp
from fddp.checkpoints import saving
from fddp.checkpoints.files import write_at_once

ROWS = np.random.default_rng(3).normal(size=(12, 24, 3)).astype(np.float32)


@contextmanager
def folder(group: fddp.Group) -> Iterator[Path]:
    """An empty folder of rank 0's; the others get a path that does not exist."""
    path = Path(tempfile.mkdtemp()) if group.rank == 0 else Path("/nowhere/at/all")
    yield path
    group.barrier()
    if group.rank == 0:
        shutil.rmtree(path)


@contextmanager
def shared_folder(group: fddp.Group) -> Iterator[Path]:
    """An empty folder that all ranks see."""
    path = Path(group.broadcast_object(tempfile.mkdtemp() if group.rank == 0 else None))
    yield path
    group.barrier()
    if group.rank == 0:
        shutil.rmtree(path)


def make(group: fddp.Group) -> tuple[fddp.TrainStep, fddp.TrainState]:
    """A step with a hook whose memory differs between ranks, and buffers that do, too."""

    def loss(p: Any, x: Any, *, rng: Any, model_state: Any) -> Any:
        x = x * jax.random.normal(rng, x.shape)
        return jnp.mean((x @ p["w"] + p["b"] + model_state) ** 2), (jnp.mean(x), {})

    options: Any = {"hook": fddp.hooks.topk(0.4), "bucket_cap_mb": 0, "broadcast_buffers": False}
    step = fddp.train_step(loss, optax.adam(0.1), group=group, **options)
    params = {"w": np.ones((3, 4), np.float32), "b": np.zeros(4, np.float32)}
    return step, step.init(params, rng=jax.random.key(2), model_state=np.float32(0))


def in_shards(group: fddp.Group, shard: Any) -> tuple[fddp.TrainStep, fddp.TrainState]:
    """A step with leaves cut with padding, layer by layer, or into fewer parts than there are
    replicas."""

    def loss(p: Any, x: Any) -> jax.Array:
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x @ p["w"] + p["b"], p["stack"])
        return jnp.mean(h**2) + p["one"][0] ** 2

    step = fddp.train_step(loss, optax.adam(0.1), group=group, shard=shard)
    stack = np.sin(np.arange(3 * 20 * 20, dtype=np.float32)).reshape(3, 20, 20)
    params = {
        "w": np.ones((3, 20), np.float32),
        "b": np.zeros(20, np.float32),
        "stack": stack,
        "one": np.ones(1),
    }
    return step, step.init(jax.tree.map(np.float32, params))


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def train(
    group: fddp.Group, step: fddp.TrainStep, state: fddp.TrainState, until: int
) -> fddp.TrainState:
    for number in range(int(state.step), until):
        state, _ = step(state, np.split(ROWS[number], group.processes)[group.rank])
    return state


def local_bits(state: fddp.TrainState) -> list[bytes]:
    """The bits of all that this process has of a state."""
    words = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    leaves: list[Any] = [words(x) for x in jax.tree.leaves(state)]
    return [np.asarray(shard.data).tobytes() for x in leaves for shard in x.addressable_shards]


@claim(quick=("mpi",))
def a_training_goes_on_from_a_checkpoint_bit_for_bit(group: fddp.Group):
    for place in sampled(group, (folder, shared_folder)):
        calm = train(group, *make(group), 9)
        assert not same_on_all_ranks(group, calm.model_state)
        with place(group) as path:
            step, state = make(group)
            with fddp.Checkpoints(path, step, every=5) as checkpoints:
                state = train(group, step, state, 5)
                assert checkpoints.save(state, {"shard": 3})
            step, fresh = make(group)
            with (
                fddp.Checkpoints(path, step, every=5) as checkpoints,
                redirect_stderr(io.StringIO()) as printed,
            ):
                state, data = checkpoints.restore(fresh)
            assert ("training goes on from step 5" in printed.getvalue()) == (group.rank == 0)
            assert data == {"shard": 3}
            assert int(state.step) == 5
            assert local_bits(train(group, step, state, 9)) == local_bits(calm)


@claim(quick=("gloo",))
def local_states_come_back_bit_for_bit(group: fddp.Group):
    loss = lambda p, x: jnp.mean((x @ p["w"] + p["b"]) ** 2)  # noqa: E731
    noisy = optax.chain(
        optax.add_noise(0.01, 0.55, key=0), optax.adam(0.1)
    )  # its state has a random key
    make = lambda: fddp.train_step(loss, fddp.local_steps(noisy, every=3), group=group)  # noqa: E731
    params = {"w": np.ones((3, 4), np.float32), "b": np.zeros(4, np.float32)}
    rows = np.split(ROWS[0], group.processes)[group.rank]
    with shared_folder(group) as path:
        step = make()
        state, _ = step(step.init(params), rows)
        like = make().init(params)
        with fddp.Checkpoints(path, step) as checkpoints, redirect_stderr(io.StringIO()):
            checkpoints.save(state, now=True)
            restored_state, _ = checkpoints.restore(like)
        assert local_bits(restored_state) == local_bits(state) != local_bits(like)
        noise, _ = fddp.whole(restored_state.opt_state.inner)
        assert same_on_all_ranks(group, jax.random.key_data(noise.rng_key))


@claim()
def ranks_that_save_different_steps_all_raise(group: fddp.Group):
    step, state = in_shards(group, "state")
    with shared_folder(group) as path, fddp.Checkpoints(path, step) as checkpoints:
        state = state._replace(step=state.step + group.rank)
        message = error_of(lambda: checkpoints.save(state, now=True))
    assert "ranks differ in their step to save" in message and "rank 1: step 1" in message, message


@claim()
def what_rank_0_cannot_open_is_an_error_on_every_rank(group: fddp.Group):
    step, _ = make(group)
    with tempfile.NamedTemporaryFile() as file:
        message = error_of(lambda: fddp.Checkpoints(file.name, step), RuntimeError)
    assert "checkpoints in" in message and "rank 0: FileExistsError" in message, message


@claim(quick=("mpi",))
def a_state_in_shards_is_written_by_all_ranks_and_read_in_all_shards(group: fddp.Group):
    kinds: tuple[Any, ...] = ("state", "optimizer", None)
    for saved in sampled(group, kinds):
        step, state = in_shards(group, saved)
        state = train(group, step, state, 2)
        expected = bits(fddp.whole(state, group=group))
        with shared_folder(group) as path:
            with fddp.Checkpoints(path, step) as checkpoints:
                assert checkpoints.save(state, now=True)
            part = path / "2" / f"{group.rank}.npz"
            nbytes = part.stat().st_size if part.exists() else 0
            assert (nbytes > 3000) == (saved is not None or group.rank == 0), nbytes
            for target in sampled(group, kinds[kinds.index(saved) :] + kinds[: kinds.index(saved)]):
                second_step, like = in_shards(group, target)
                for form in (
                    like,
                    second_step.shapes(
                        jax.tree.map(np.asarray, fddp.whole(like.params, group=group))
                    ),
                ):
                    with (
                        fddp.Checkpoints(path, second_step) as checkpoints,
                        redirect_stderr(io.StringIO()),
                    ):
                        restored_state, _ = checkpoints.restore(form)
                    assert jax.tree.structure(restored_state) == jax.tree.structure(like)
                    assert jax.tree.map(lambda x: x.sharding, restored_state) == jax.tree.map(
                        lambda x: x.sharding, like
                    )
                    assert bits(fddp.whole(restored_state, group=group)) == expected
                train(group, second_step, restored_state, 3)


@claim()
def a_folder_of_shards_that_a_rank_does_not_see_is_an_error_on_every_rank(group: fddp.Group):
    step, _ = in_shards(group, "optimizer")
    with folder(group) as path:
        message = error_of(lambda: fddp.Checkpoints(path, step))
    blind_ranks = list(range(1, group.processes))
    words = (f"ranks {blind_ranks} do not see {group.broadcast_object(str(path))} as rank 0 does",)
    words += ("shard='optimizer' each rank writes its part", "such as /nowhere/at/all: give all")
    assert all(text in message for text in words), message


@claim(sizes=(3, 4))
def ranks_of_a_subgroup_save_and_restore_by_themselves(group: fddp.Group):
    if group.rank == 0:
        return
    subgroup = group.subgroup(range(1, group.size))
    step, state = in_shards(subgroup, "state")
    state = train(subgroup, step, state, 2)
    with shared_folder(subgroup) as path, redirect_stderr(io.StringIO()):
        with fddp.Checkpoints(path, step) as checkpoints:
            checkpoints.save(state, now=True)
        step, like = in_shards(subgroup, "state")
        with fddp.Checkpoints(path, step) as checkpoints:
            restored_state, _ = checkpoints.restore(like)
    assert local_bits(restored_state) == local_bits(state)


### Damage to ranks and files


@contextmanager
def full_disk(full: bool) -> Iterator[None]:
    """Limits the size of this rank's files, if `full`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40 if full else before[0], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def numbers(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.name.isdecimal())


@contextmanager
def two_checkpoints(group: fddp.Group) -> Iterator[tuple[Path, list[bytes], list[bytes]]]:
    """A folder with the checkpoints of steps 1 and 2, of a state in shards, and this rank's bytes
    of each."""
    step, state = in_shards(group, "state")
    with shared_folder(group) as path:
        with fddp.Checkpoints(path, step, every=1) as checkpoints:
            state = train(group, step, state, 1)
            checkpoints.save(state)
            first = local_bits(state)
            state = train(group, step, state, 2)
            checkpoints.save(state)
            second = local_bits(state)
        yield path, first, second


def restored(group: fddp.Group, path: Path) -> tuple[fddp.TrainState, str]:
    """The newest checkpoint, and the lines of rank 0."""
    step, like = in_shards(group, "state")
    with fddp.Checkpoints(path, step) as checkpoints, redirect_stderr(io.StringIO()) as printed:
        state, _ = checkpoints.restore(like)
    return state, "".join(group.all_gather_object(printed.getvalue()))


@claim(quick=("gloo",))
def a_byte_that_changed_in_any_ranks_part_sends_all_ranks_to_the_checkpoint_before(
    group: fddp.Group,
):
    with two_checkpoints(group) as (path, first, second):
        assert local_bits(restored(group, path)[0]) == second
        for rank in range(group.processes):
            file = path / "2" / f"{rank}.npz"
            data = file.read_bytes()
            group.barrier()
            if group.rank == 0:
                file.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
            group.barrier()
            state, printed = restored(group, path)
            assert local_bits(state) == first
            assert (
                printed.count(f"not whole: step 2 ({file.relative_to(path / '2')} is damaged)") == 1
            ), printed
            group.barrier()
            if group.rank == 0:
                file.write_bytes(data)
            group.barrier()
        if group.rank == 0:
            (path / "2" / "1.npz").unlink()
        group.barrier()
        state, printed = restored(group, path)
        assert local_bits(state) == first and "is missing" in printed


@claim()
def a_disk_that_is_full_on_one_rank_costs_nothing_older_and_all_ranks_are_told(group: fddp.Group):
    for rank in sampled(group, (0, group.processes - 1)):
        with two_checkpoints(group) as (path, _, _):
            step, like = in_shards(group, "state")
            with redirect_stderr(io.StringIO()) as printed:
                checkpoints = fddp.Checkpoints(path, step, every=1)
                state, _ = checkpoints.restore(like)
                with full_disk(group.rank == rank):
                    state = train(group, step, state, 3)
                    checkpoints.save(state)
                    checkpoints._writing.result()
                    group.barrier()  # rank 0 has given up
                assert numbers(path) == ["1", "2"], numbers(path)
                state = train(group, step, state, 4)
                checkpoints.save(state)  # there is room again
                checkpoints.close()
            assert numbers(path) == ["1", "2", "4"], numbers(path)
            words = "".join(group.all_gather_object(printed.getvalue()))
            assert "the checkpoint of step 3 could not be written" in words
            assert (f"rank {rank} could not write its part" in words) == (rank != 0), words
            assert local_bits(restored(group, path)[0]) == local_bits(state)
            step, like = in_shards(group, "state")
            with redirect_stderr(io.StringIO()):
                checkpoints = fddp.Checkpoints(path, step, every=1)
                state, _ = checkpoints.restore(like)
                with full_disk(group.rank == rank):
                    checkpoints.save(train(group, step, state, 5))
                    message = error_of(checkpoints.close, Exception)
            assert f"rank {rank}" in message, message


@claim(quick=("gloo",))
def a_rank_that_writes_nothing_is_named_and_costs_nothing_older(group: fddp.Group):
    """The rank has died, in effect, or its files were lost, unseen by the others."""
    with two_checkpoints(group) as (path, _, second):
        step, like = in_shards(group, "state")
        with redirect_stderr(io.StringIO()) as printed:
            checkpoints = fddp.Checkpoints(path, step, every=1)
            state, _ = checkpoints.restore(like)
            state = train(group, step, state, 3)
            with (
                mock.patch.object(saving, "WAIT_S", 0.5),
                mock.patch.object(saving, "write_at_once", silent),
            ):
                checkpoints.save(state)
                checkpoints._writing.result()
            train(group, step, state, 4)
            message = error_of(checkpoints.close, Exception)
        last = group.processes - 1
        assert f"rank {last} has not written its part" in message, message
        assert ("could not be written: TimeoutError" in printed.getvalue()) == (group.rank == 0)
        state, _ = restored(group, path)
        assert local_bits(state) == second and numbers(path) == ["1", "2"]


def silent(path: Path, text: str) -> None:
    """Writes the report of every rank except the last."""
    if path.stem != str(fddp.init().processes - 1):
        write_at_once(path, text)


@claim(quick=("gloo",))
def an_error_in_training_ends_without_waiting_for_ranks_that_write_nothing(group: fddp.Group):
    with two_checkpoints(group) as (path, _, _):
        step, state = in_shards(group, "state")
        waits = mock.patch.object(saving, "ENDING_S", 0.1)
        reported = mock.patch.object(saving, "write_at_once", silent)
        opened = fddp.Checkpoints(path, step)
        with (
            waits,
            reported,
            redirect_stderr(io.StringIO()),
            suppress(InterruptedError),
            opened as checkpoints,
        ):
            checkpoints.save(train(group, step, state, 5), now=True)
            raise InterruptedError
        group.barrier()
        assert numbers(path) == ["1", "2"]
