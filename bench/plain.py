"""The training of a drawn configuration by plain JAX, in float64: loops, `jax.grad` and optax only.

If the loss of a row depends on that row alone, there is one batch of all rows. Else (buffers,
random keys, branches, batches taken unchanged, ranks without data) each replica's micro-batches are
gone through one by one.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fddp
from bench.drawn import COLUMNS, OUTER, Call, Drawn, by_name, keys, loss_of, optimizer_of

INITIAL_SCALE = 2.0**10
GROWTH_INTERVAL = 2


class Contribution(NamedTuple):
    """Weighted sums over micro-batches."""

    grads: Any
    loss: Any
    aux: Any
    weight: Any
    divisor: Any
    used: frozenset[str]


class Replica(NamedTuple):
    """The state of a replica; replicas that train together share the first one's, except for
    buffers."""

    params: Any
    """The trained leaves."""
    opt_state: Any
    buffers: Any
    scale: float = INITIAL_SCALE
    good: int = 0


class Report(NamedTuple):
    """The visible results of a step."""

    params: Any
    opt_state: Any
    buffers: list[Any]
    """The buffers of each replica."""
    loss: Any
    aux: Any
    scale: float
    shared: Any = None
    """The parameters of the last synchronization under `local_steps`; `params` are then those of
    each replica."""
    used: dict[str, int] | None = None


def wide(tree: Any) -> Any:
    """The same numbers in 64 bits; whole numbers unchanged."""

    def widened(x: Any) -> Any:
        kinds = ((jnp.complexfloating, jnp.complex128), (jnp.floating, jnp.float64))
        dtype = next((to for kind, to in kinds if jnp.issubdtype(x.dtype, kind)), x.dtype)
        return np.asarray(x).astype(dtype)

    return jax.tree.map(widened, tree)


def train(drawn: Drawn) -> list[Report]:
    """Trains a configuration; returns the visible results of each step but calls of `no_sync`."""
    with jax.enable_x64(True):
        return _Plain(drawn).run()


class _Plain:
    def __init__(self, drawn: Drawn) -> None:
        self.drawn = drawn
        self.inner = optimizer_of(drawn)
        self.outer = OUTER[drawn.local.get("outer", "mean")]()
        params = wide(drawn.params)
        trained = {name: params[name] for name in drawn.trained}
        self.fixed = {name: x for name, x in params.items() if name not in trained}
        buffers = {"mean": np.zeros(COLUMNS), "count": np.int32(0)}
        opt_state = jax.device_get(self.inner.init(trained))
        first = Replica(trained, opt_state, buffers if "model_state" in drawn.form else None)
        self.replicas = [first] * drawn.dealt
        self.shared = trained
        self.outer_state = jax.device_get(self.outer.init(trained))
        slices = {"model_state", "rng", "shared rng", "branch", "statistics"} & drawn.form
        self.joined = not (slices or drawn.rows != "rows" or drawn.local)
        self.step = 0
        loss_fn = loss_of(drawn)

        def objective(trained: Any, fixed: Any, batch: Any, buffers: Any, rng: Any) -> Any:
            extra = {"model_state": buffers, "rng": rng}
            value = loss_fn(
                trained | fixed, batch, **{name: x for name, x in extra.items() if x is not None}
            )
            value, aux = value if type(value) is tuple else (value, None)
            after = None
            if buffers is not None:
                after, aux = aux  # pyright: ignore[reportGeneralTypeIssues]
            loss, weight = (
                value if isinstance(value, fddp.Weighted) else (value, jnp.float64(len(batch["y"])))
            )
            return loss, (weight, aux, after)

        def among_all(trained: Any, fixed: Any, batches: Any) -> Any:
            on_replicas = jax.vmap(
                lambda batch: objective(trained, fixed, batch, None, None), axis_name="replica"
            )
            loss, (weight, aux, _) = on_replicas(batches)
            weighed = jax.tree.map(lambda x: jnp.sum(weight * x), (loss, aux))
            return weighed[0], (*weighed, jnp.sum(weight))

        together = jax.jit(jax.value_and_grad(among_all, has_aux=True))
        self.gradient_among_all = lambda *args: jax.device_get(together(*args))
        # Between programs there are arrays of NumPy: JAX would compile every sum.
        gradient = jax.jit(jax.value_and_grad(objective, has_aux=True))
        self.gradient = lambda *args: jax.device_get(gradient(*args))
        self.update = {optimizer: _moved(optimizer) for optimizer in (self.inner, self.outer)}

    def run(self) -> list[Report]:
        reports = []
        pending = []
        for call in self.drawn.calls:
            pending.append(call)
            if call.kind == "no_sync":
                continue
            self.step += 1
            local = self.drawn.local and self.step > self.drawn.local["start"]
            reports.append(self._local_step(pending) if local else self._together(pending))
            pending = []
        return reports

    # Steps that average gradients

    def _together(self, pending: list[Call]) -> Report:
        drawn = self.drawn
        if self.joined or "statistics" in drawn.form:
            of_all = [self._of_all(pending)] if self.joined else [*self._among_all(pending)]
            live = [None] * drawn.dealt
        else:
            of_all, live = map(
                list, zip(*(self._contribution_of(r, pending) for r in range(drawn.dealt)))
            )
        mean = _mean(of_all)
        used = {name: sum(name in x.used for x in of_all) for name in drawn.trained}
        used_by_any = frozenset[str]().union(*(x.used for x in of_all))
        updated, skipped = self._updated(self.replicas[0], mean[0], used_by_any)
        buffers = [replica.buffers for replica in self.replicas]
        if not skipped:
            buffers = self._landed(live, pending[-1].active)
        self.replicas = [updated._replace(buffers=x) for x in buffers]
        self.shared = updated.params
        loss, aux = mean[1:]
        used_counts = None if self.joined or "statistics" in drawn.form else used
        state = (updated.params, updated.opt_state, buffers)
        return Report(*state, loss, aux, updated.scale, self.shared, used_counts)

    def _landed(self, live: list[Any], active: Sequence[bool]) -> list[Any]:
        """The buffers of all replicas after they have communicated."""
        mode = self.drawn.options.get("broadcast_buffers", True)
        if live[0] is None or mode is False:
            return live
        first = live[int(np.argmax(active))]
        if mode == "mean":
            means = [x["mean"] for x, is_active in zip(live, active) if is_active]
            first = first | {"mean": sum(means) / len(means)}
        return [first] * len(live)

    # Steps of replicas that train alone

    def _local_step(self, pending: list[Call]) -> Report:
        local = self.drawn.local
        means = []
        for r, replica in enumerate(self.replicas):
            contribution, live = self._contribution_of(r, pending)
            grads, *mean = _mean([contribution._replace(divisor=contribution.weight)])
            means.append(mean)
            updated, skipped = self._updated(replica, grads, contribution.used)
            self.replicas[r] = updated if skipped else updated._replace(buffers=live)
        average = lambda *x: sum(x) / len(x)  # noqa: E731
        loss, aux = means[0]
        if (self.step - local["start"]) % local["every"] == 0:
            loss, aux = jax.tree.map(average, *means)
            self._synchronize(pending[-1])
        params = jax.tree.map(lambda *x: np.stack(x), *(x.params for x in self.replicas))
        buffers = [replica.buffers for replica in self.replicas]
        return Report(params, None, buffers, loss, aux, self.replicas[0].scale, self.shared)

    def _synchronize(self, call: Call) -> None:
        average = lambda *x: sum(x) / len(x)  # noqa: E731
        mean = jax.tree.map(average, *(replica.params for replica in self.replicas))
        change = jax.tree.map(np.subtract, self.shared, mean)
        self.shared, self.outer_state = self.update[self.outer](
            change, self.outer_state, self.shared
        )
        buffers = self._landed([replica.buffers for replica in self.replicas], call.active)
        pairs = zip(self.replicas, buffers)
        self.replicas = [replica._replace(params=self.shared, buffers=x) for replica, x in pairs]

    # Contributions of batches

    def _of_all(self, pending: list[Call]) -> Contribution:
        batch = jax.tree.map(lambda *x: np.concatenate(x), *(call.batches[0] for call in pending))
        (loss, (_, aux, _)), grads = self.gradient(
            self.replicas[0].params, self.fixed, wide(batch), None, None
        )
        return Contribution(grads, loss, aux, 1, 1, self._used(batch))

    def _among_all(self, pending: list[Call]) -> Iterator[Contribution]:
        """The contribution of each micro-batch of all replicas, whose statistics are common."""
        for call in pending:
            for k in range(self.drawn.micro_batches):
                numbers = range(
                    k, self.drawn.dealt * self.drawn.micro_batches, self.drawn.micro_batches
                )
                shards = [self._part(call, number) for number in numbers]
                batches = wide(jax.tree.map(lambda *x: np.stack(x), *shards))
                (_, (loss, aux, weight)), grads = self.gradient_among_all(
                    self.replicas[0].params, self.fixed, batches
                )
                yield Contribution(grads, loss, aux, weight, weight, self._used(shards[0]))

    def _contribution_of(self, replica: int, pending: list[Call]) -> tuple[Contribution, Any]:
        """The contributions of one replica's micro-batches, and its buffers after them."""
        drawn = self.drawn
        replica_state = self.replicas[replica]
        live = self.replicas[replica].buffers
        number = 0
        total: Any = None
        for call in pending:
            for k in range(drawn.micro_batches):
                batch = self._part(call, replica * drawn.micro_batches + k)
                rng = self._key(number, replica)
                result = self.gradient(replica_state.params, self.fixed, wide(batch), live, rng)
                (loss, (weight, aux, live)), grads = result
                weight = 1 if drawn.rows == "stacked" and "weighted" not in drawn.form else weight
                share = weight if call.active[replica] else 0 * weight
                divisor = weight if call.divisor_of_all else share
                used = self._used(batch) if share > 0 else frozenset[str]()
                times = partial(jax.tree.map, lambda x, share=share: share * x)
                sums = (times(grads), times(loss), times(aux))
                contribution = Contribution(*sums, share, divisor, used)
                total = contribution if total is None else _plus(total, contribution)
                number += 1
        return total, live

    def _part(self, call: Call, number: int) -> Any:
        """One micro-batch."""
        if len(call.batches) > 1 or self.drawn.rows == "stacked":
            return call.batches[number]
        rows = len(call.batches[0]["y"]) // (self.drawn.dealt * self.drawn.micro_batches)
        return {name: x[number * rows : (number + 1) * rows] for name, x in call.batches[0].items()}

    def _key(self, number: int, replica: int) -> Any:
        with_numbers = partial(reduce, jax.random.fold_in)
        numbered = {}
        drawn_keys = keys(self.drawn) or {}
        if "own" in drawn_keys:
            numbered["own"] = with_numbers((self.step - 1, number, replica), drawn_keys["own"])
        if "shared" in drawn_keys:
            numbered["shared"] = with_numbers((self.step - 1, number), drawn_keys["shared"].key)
        return numbered or None

    def _used(self, batch: Any) -> frozenset[str]:
        order = self.drawn.order
        if "branch" in self.drawn.form:
            order = (*order[:-2], order[-2] if batch["y"][0] > 0 else order[-1])
        return frozenset(order)

    # Updates

    def _updated(
        self, replica_state: Replica, grads: Any, used: set[str] | frozenset[str]
    ) -> tuple[Replica, bool]:
        """An update, and True if it was left out, and the buffers with it."""
        drawn = self.drawn
        finite = _finite(grads)
        if drawn.scale:
            good = replica_state.good + 1 if finite else 0
            grows = good >= GROWTH_INTERVAL
            scale = replica_state.scale * (0.5 if not finite else 2 if grows else 1)
            replica_state = replica_state._replace(scale=scale, good=0 if grows else good)
        if not finite and (drawn.scale or drawn.options.get("skip_nonfinite")):
            return replica_state, True
        finds = drawn.options.get("find_unused_parameters")
        if finds and used and not used.intersection(drawn.trained):  # none of a batch without rows
            return replica_state, False
        params, opt_state = self.update[self.inner](
            grads, replica_state.opt_state, replica_state.params
        )
        if drawn.options.get("find_unused_parameters"):
            params = {n: x if n in used else replica_state.params[n] for n, x in params.items()}
            moves = {name: name in used for name in params}
            opt_state = _put_back(opt_state, replica_state.opt_state, moves)
        skipped = not finite and drawn.optimizer == "apply_if_finite"
        return replica_state._replace(params=params, opt_state=opt_state), skipped


def _moved(optimizer: Any) -> Callable[..., Any]:
    """An update as one program: (gradients, state, parameters) → the parameters and the state."""

    def moved(grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    program = jax.jit(moved)
    return lambda *args: jax.device_get(program(*args))


def _plus(a: Contribution, b: Contribution) -> Contribution:
    sums = jax.tree.map(np.add, a._replace(used=None), b._replace(used=None))  # type: ignore
    return sums._replace(used=a.used | b.used)


def _mean(contributions: list[Contribution]) -> tuple[Any, Any, Any]:
    divisor = sum(contribution.divisor for contribution in contributions)
    divisor = divisor if divisor else 1
    add: Callable[..., Any] = lambda *x: sum(x) / divisor  # noqa: E731
    parts = zip(*(contribution[:3] for contribution in contributions))
    return tuple(jax.tree.map(add, *part) for part in parts)  # type: ignore


def _finite(grads: Any) -> bool:
    return all(np.all(np.isfinite(x)) for x in jax.tree.leaves(grads))


def _put_back(new: Any, old: Any, moves: dict[str, bool]) -> Any:
    """An optimizer's state with the moved leaves from `new`, by their names, and all others from
    `old`."""

    def chosen(path: Sequence[Any], x: Any, y: Any) -> Any:
        return x if all(moves.get(getattr(key, "key", ""), True) for key in path) else y

    if isinstance(new, optax.transforms.PartitionState):
        # A part counts no step if none of its leaves moves. Without leaves it counts, as in optax.
        labels = by_name(moves, "adam", "sgd")
        inner_states = dict(new.inner_states)
        for label in inner_states:
            its_moves = [moves[name] for name in moves if labels[name] == label]
            if its_moves and not any(its_moves):
                inner_states[label] = old.inner_states[label]
        new = new._replace(inner_states=inner_states)
    return jax.tree_util.tree_map_with_path(chosen, new, old)
