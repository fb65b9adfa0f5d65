"""Random configurations: a small problem, an optimizer, options and batches, all of them from one
seed."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fddp

COLUMNS = 8
RATE = 0.05

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(RATE),
    "momentum": lambda: optax.sgd(RATE, momentum=0.9, nesterov=True),
    # With an epsilon at least as large as the rounding error of a gradient.
    "adam": lambda: optax.adam(RATE, eps=1e-2),
    "adamw": lambda: optax.adamw(RATE, eps=1e-2, weight_decay=0.1),
    "clip, adamw": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(RATE, eps=1e-2)),
    "lars": lambda: optax.lars(RATE, trust_coefficient=0.1),
    "lion": lambda: optax.lion(RATE),
    "rmsprop": lambda: optax.rmsprop(RATE, eps=1e-2),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(RATE, eps=1e-2), 2).gradient_transformation(),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.sgd(RATE, momentum=0.9), 5),
}
# Optimizers of parts of a tree, which are drawn for states in shards alone.
PARTS: dict[str, Callable[[], Any]] = {
    "multi_transform": lambda: optax.multi_transform(
        {"adam": optax.adam(RATE, eps=1e-2), "sgd": optax.sgd(RATE, momentum=0.9)},
        lambda params: by_name(params, "adam", "sgd"),
    ),
    "decay of some": lambda: optax.adamw(
        RATE, eps=1e-2, weight_decay=0.1, mask=lambda params: by_name(params, True, False)
    ),
    "momentum of some": lambda: optax.chain(
        optax.masked(optax.trace(0.9), lambda params: by_name(params, True, False)),
        optax.scale(-RATE),
    ),
}
# Whose update may be as large as the rate, however small the gradient is.
NORMED = {*OPTIMIZERS, *PARTS} - {"sgd", "momentum", "apply_if_finite", "momentum of some"}

HOOKS: dict[str, Callable[[], fddp.Hook]] = {
    "allreduce": fddp.hooks.allreduce,
    "topk(1.0)": lambda: fddp.hooks.topk(1.0),
    "bf16": fddp.hooks.bf16,
    "fp16": fddp.hooks.fp16,
    "quantize": lambda: fddp.hooks.quantize(block=8),
    "quantize without memory": lambda: fddp.hooks.quantize(error_feedback=False),
    "topk(0.3)": lambda: fddp.hooks.topk(0.3),
    "powersgd": lambda: fddp.hooks.powersgd(2, start_step=1),
    "bf16(powersgd)": lambda: fddp.hooks.bf16(fddp.hooks.powersgd(1, start_step=0)),
    "adasum": fddp.hooks.adasum,
    "4 bits": lambda: fddp.hooks.quantize(bits=4, block=8),
}
BY_ELEMENT = ("allreduce", "bf16", "fp16", "quantize without memory")
EXACT = ("", "allreduce", "topk(1.0)")
# The dtype to which a hook rounds every message, and in which it is rounded once more.
ROUNDED = {"bf16": "bfloat16", "fp16": "float16"}

# Features excluded with statistics of all rows: the rows of a replica are no longer a slice of all.
OF_A_SLICE = {"model_state", "rng", "shared rng", "branch"}

OUTER: dict[str, Callable[[], Any]] = {
    "mean": lambda: optax.sgd(1.0),
    "nesterov": lambda: optax.sgd(0.7, momentum=0.9, nesterov=True),
}


@dataclass(frozen=True)
class Call:
    """One call of a step."""

    kind: str
    """"step" or "no_sync"."""
    batches: list[dict[str, Any]]
    """One batch of rows, or several batches that are taken unchanged."""
    active: tuple[bool, ...]
    """True for each replica that still has data; all do without `fddp.join`."""
    divisor_of_all: bool = True
    """True if rows without data are counted."""


@dataclass(frozen=True)
class Drawn:
    """A configuration."""

    seed: int
    x64: bool
    replicas: int
    dtypes: dict[str, str]
    order: tuple[str, ...]
    """The order in which the loss uses the leaves; a tied leaf is in it twice, an unused leaf
    never."""
    form: frozenset[str]
    """Features of the loss: weighted, aux, model_state, rng, shared rng, branch, statistics (of all
    replicas' rows)."""
    rows: str
    """"rows", "stacked" or "joined"."""
    optimizer: str
    scale: bool
    """True if it is in `fddp.dynamic_scale`."""
    hook: str
    options: dict[str, Any]
    ignored: str
    local: dict[str, Any]
    """Arguments of `fddp.local_steps`, its outer optimizer by name; empty without."""
    infinite: bool
    params: dict[str, Any] = field(repr=False)
    calls: tuple[Call, ...] = field(repr=False)
    hosts: int = 1
    """Number of hosts, each of which sums over its own replicas first."""
    narrow: bool = False
    """True if the loss computes in bfloat16 (`fddp.mixed_precision`)."""

    @property
    def dealt(self) -> int:
        """Number of replicas among which rows are dealt."""
        return self.options.get("virtual_replicas") or self.replicas

    @property
    def micro_batches(self) -> int:
        """The number for a replica in a call."""
        return self.options.get("accumulation_steps", 1)

    @property
    def trained(self) -> tuple[str, ...]:
        """Leaves with gradients."""
        floats = (name for name, dtype in self.dtypes.items() if dtype != "int32")
        return tuple(name for name in floats if name != self.ignored)


def draw(seed: int, *, shards: bool = False) -> Drawn:
    """Draws a configuration; the same for the same seed.

    A state in shards has more choices: sums over hosts first, losses with statistics of all rows,
    losses that compute in 16 bits, and optimizers of parts of a tree. Its hooks sum each element by
    itself, mostly, and remember nothing, so that plain JAX computes the result.
    """
    pick = random.Random(f"shards {seed}" if shards else seed)
    chance = lambda p: pick.random() < p  # noqa: E731
    numbers = np.random.default_rng(seed)
    x64 = chance(0.6 if shards else 0.35)
    replicas = pick.choice((2, 2, 3, 4, 4, 8) if shards else (1, 2, 2, 2, 3, 3, 4, 8))
    dtypes, params = leaves_of(pick, numbers, x64)
    order = order_of(pick, dtypes, 0.15 if shards else 0.25)
    form = form_of(pick, order)
    rows = pick.choices(("rows", "stacked", "joined"), (6, 1, 3) if shards else (7, 2, 2))[0]
    if shards and rows == "rows" and chance(0.35):
        form = form - OF_A_SLICE | {"statistics"}
    hooks = BY_ELEMENT if shards and chance(0.9) else list(HOOKS)
    hook = pick.choice(hooks) if chance(0.35 if shards else 0.25) else ""
    options = options_of(pick, replicas, bool(hook))
    if hook:
        options["hook"] = HOOKS[hook]()
    if shards:
        options["shard"] = pick.choice(("optimizer", "state"))
        options.pop("virtual_replicas", None)
    local = _local(pick) if not shards and chance(0.22) else {}
    dealt = options.get("virtual_replicas") or replicas
    infinite = not shards and rows != "joined" and chance(0.15)
    if infinite and chance(0.7):
        options["skip_nonfinite"] = True
    micro_batches = options.get("accumulation_steps", 1)
    return Drawn(
        seed=seed,
        x64=x64,
        replicas=replicas,
        dtypes=dtypes,
        order=tuple(order),
        form=frozenset(form),
        rows=rows,
        optimizer=pick.choice([*OPTIMIZERS, *[*PARTS, *PARTS] * shards]),
        scale=chance(0.1 if shards else 0.15),
        hook=hook,
        options=options,
        ignored=pick.choice(list(dtypes)) if chance(0.08) else "",
        local=local,
        infinite=infinite,
        params=params,
        calls=tuple(
            calls_of(pick, numbers, x64, dealt, micro_batches, rows, infinite, bool(local))
        ),
        hosts=pick.choice((2, replicas // 2)) if shards and replicas > 3 and chance(0.5) else 1,
        narrow=shards and chance(0.15),
    )


FORMS = {"weighted": 0.3, "aux": 0.4, "model_state": 0.35, "branch": 0.12}
FORMS |= {"rng": 0.25, "shared rng": 0.1}


def order_of(pick: random.Random, leaves: Iterable[str], unused: float) -> list[str]:
    """Draws the leaves in the order in which a loss uses them; one is unused with this chance, and
    one may be tied."""
    order = list(leaves)
    pick.shuffle(order)
    if pick.random() < unused and len(order) > 1:
        order.pop()
    if pick.random() < 0.3:
        order.append(order[0])
    return order


def form_of(pick: random.Random, order: Sequence[str]) -> set[str]:
    """Draws the form of a loss; a branch needs two leaves."""
    form = {name for name, chance in FORMS.items() if pick.random() < chance}
    return form if len(set(order)) > 1 else form - {"branch"}


def leaves_of(
    pick: random.Random, numbers: np.random.Generator, x64: bool
) -> tuple[dict[str, str], dict[str, Any]]:
    wide = ["float32", "float64"] if x64 else ["float32"]
    narrow = ["bfloat16", "float16"]
    families = [wide[-1:], ["float32"], wide, narrow[:1], narrow[1:], ["float32", *narrow]]
    family = pick.choices(families, (6, 5, 3, 1.5, 1, 1))[0]
    dtypes = {}
    params = {}
    for name in pick.sample("abcdefgh", pick.choice((2, 2, 2, 3, 3, 4, 5))):
        dtype = pick.choice(family)
        if pick.random() < 0.06:
            dtype = "complex128" if dtype == "float64" else "complex64"
        if pick.random() < 0.06 and dtypes:
            dtype = "int32"
        dims = pick.choice((0, 1, 1, 2, 2, 2, 3))
        shape = tuple(pick.randint(1, 6) for _ in range(dims))
        if pick.random() < 0.03:
            shape = (0, 3)
        if pick.random() < 0.15:
            name = f"table_{name}"
            shape = (pick.choice((12, 60, 400)), pick.randint(1, 3))
        values = numbers.normal(size=shape)
        if dtype == "int32":
            values = 3 * values
        if dtype.startswith("complex"):
            values = values + 1j * numbers.normal(size=shape)
        dtypes[name] = dtype
        params[name] = np.asarray(values).astype(jnp.dtype(dtype))
    return dtypes, params


def options_of(pick: random.Random, replicas: int, hooked: bool) -> dict[str, Any]:
    chance = lambda p: pick.random() < p  # noqa: E731
    options: dict[str, Any] = {"schedule": pick.choice(("overlap", "overlap", "after"))}
    draws: dict[str, tuple[float, Callable[[], Any]]] = {
        "shard": (0.08 if hooked else 0.3, lambda: pick.choice(("optimizer", "state"))),
        "bucket_cap_mb": (0.5, lambda: pick.choice((0, 0, 1e-5, 1e-4, [1e-5, 1e-4, 0]))),
        "order": (0.1, lambda: "reverse"),
        "accumulation_steps": (0.4, lambda: pick.choice((2, 3))),
        "find_unused_parameters": (0.3, lambda: True),
        "broadcast_buffers": (0.5, lambda: pick.choice((False, "mean"))),
        "skip_nonfinite": (0.1, lambda: True),
        "check_replicas_every": (0.15, lambda: pick.choice((1, 2))),
        "donate": (0.3, lambda: False),
        "virtual_replicas": (0.1, lambda: pick.choice((replicas, 2 * replicas, 6))),
    }
    options |= {name: value() for name, (p, value) in draws.items() if chance(p)}
    if "virtual_replicas" in options:  # it has no other schedule
        del options["schedule"]
    return options


def _local(pick: random.Random) -> dict[str, Any]:
    every, start = pick.choice((1, 2, 2, 3)), pick.choice((0, 0, 1))
    return {"every": every, "start": start, "outer": pick.choice(list(OUTER))}


def calls_of(
    pick: random.Random,
    numbers: np.random.Generator,
    x64: bool,
    dealt: int,
    micro_batches: int,
    rows: str,
    infinite: bool,
    local: bool,
) -> list[Call]:
    kinds = ["step"] * (5 if local else 3)
    if pick.random() < 0.25 and not local:
        kinds.insert(pick.randrange(len(kinds)), "no_sync")
    dtype = np.float64 if x64 and pick.random() < 0.7 else np.float32
    uneven = pick.random() < 0.25 and rows != "stacked"
    of_all = pick.random() < 0.5
    base = pick.randint(1, 3)
    bad = pick.randrange(len(kinds))
    calls = list[Call]()
    for number, kind in enumerate(kinds):
        count = pick.randint(1, 3) if uneven and number else base
        part_count = dealt * micro_batches
        batches: list[dict[str, Any]]
        if rows == "stacked":
            batches = [_batch(numbers, dtype, count) for _ in range(part_count)]
            batches = [x | {"scale": dtype(numbers.uniform(1, 2))} for x in batches]
        else:
            batches = [_batch(numbers, dtype, part_count * count)]
        if infinite and number == bad:
            x = pick.choice(batches)["x"]
            x[pick.randrange(len(x))] = np.inf
        active = [True] * dealt
        if rows == "joined" and number > 0:
            active = [pick.random() < 0.6 for _ in active]
            active[pick.randrange(dealt)] = True
        calls.append(Call(kind, batches, tuple(active), of_all))
    return calls


def _batch(numbers: np.random.Generator, dtype: Any, rows: int) -> dict[str, Any]:
    return {
        "x": numbers.normal(size=(rows, COLUMNS)).astype(dtype),
        "y": numbers.normal(size=rows).astype(dtype),
        "word": numbers.integers(0, 12, size=rows).astype(np.int32),
        "tokens": numbers.integers(0, 4, size=rows).astype(dtype),
    }


def batch_of(drawn: Drawn, call: Call) -> Any:
    """A call's batch in the form that a user passes."""
    if drawn.rows == "stacked":
        return fddp.Stacked(call.batches)
    if drawn.rows == "rows":
        return call.batches[0]
    each = len(call.batches[0]["y"]) // drawn.dealt
    share = np.repeat(np.array(call.active, np.float32), each)
    leads = np.zeros(len(share), bool)
    leads[np.argmax(share)] = True
    return fddp.Joined(
        call.batches[0], share, np.ones_like(share) if call.divisor_of_all else share, leads
    )


def buffers(drawn: Drawn) -> Any:
    """The model state at first, or None."""
    dtype = np.float64 if drawn.x64 else np.float32
    start = {"mean": np.zeros(COLUMNS, dtype), "count": np.int32(0)}
    return start if "model_state" in drawn.form else None


def keys(drawn: Drawn) -> Any:
    """The random keys, or None."""
    drawn_keys = dict[str, Any]()
    if "rng" in drawn.form:
        drawn_keys["own"] = jax.random.key(1)
    if "shared rng" in drawn.form:
        drawn_keys["shared"] = fddp.Shared(jax.random.key(2))
    return drawn_keys or None


def optimizer_of(drawn: Drawn) -> Any:
    """The optimizer of a configuration."""
    return (OPTIMIZERS | PARTS)[drawn.optimizer]()


def by_name(params: Any, selected: Any, remaining: Any) -> Any:
    """Divides leaves into two kinds, by the last letters of their names."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: selected if path[0].key[-1] in "aceg" else remaining, params
    )


def loss_of(drawn: Drawn) -> Callable[..., Any]:
    """The loss of a configuration: a chain of its leaves, in an order unrelated to the alphabet."""

    def loss_fn(params: Any, batch: Any, *, model_state: Any = None, rng: Any = None) -> Any:
        x = batch["x"]
        if model_state is not None:
            x = x - 0.1 * model_state["mean"].astype(x.dtype)
        h = jnp.zeros_like(batch["y"])
        chain = drawn.order[:-2] if "branch" in drawn.form else drawn.order
        for place, name in enumerate(chain):
            h = jnp.tanh(0.5 * h + _term(params[name], name, place, x, batch["word"]))
        if "branch" in drawn.form:
            way = [
                lambda name=name: _term(params[name], name, 3, x, batch["word"])
                for name in drawn.order[-2:]
            ]
            wide = jnp.result_type(*(jax.eval_shape(f).dtype for f in way))
            branches = [lambda f=f: f().astype(wide) for f in way]
            h = jnp.tanh(0.5 * h + jax.lax.cond(batch["y"][0] > 0, *branches))
        if "statistics" in drawn.form:
            mean = jax.lax.pmean(jnp.mean(h), "replica")
            h = (h - mean) / jnp.sqrt(1 + jax.lax.pmean(jnp.mean((h - mean) ** 2), "replica"))
        rates = (h - batch["y"]) ** 2 * batch.get("scale", 1)
        for key in jax.tree.leaves(rng):
            rates = rates * (1 + 0.2 * jax.random.uniform(key, (), jnp.float32))
        tokens = batch["tokens"].astype(rates.dtype)
        weight = jnp.sum(tokens)
        mean = jnp.mean
        if "weighted" in drawn.form:
            mean = lambda x: jnp.sum(tokens * x) / jnp.maximum(weight, 1)  # noqa: E731
        loss: Any = fddp.Weighted(mean(rates), weight) if "weighted" in drawn.form else mean(rates)
        aux = {"distance": mean(jnp.abs(h))} if "aux" in drawn.form else None
        if model_state is not None:
            mean_x = jnp.mean(jnp.clip(batch["x"], -9, 9), axis=0).astype(model_state["mean"].dtype)
            mean = 0.5 * model_state["mean"] + 0.5 * mean_x
            return loss, ({"mean": mean, "count": model_state["count"] + 1}, aux)
        return (loss, aux) if "aux" in drawn.form else loss

    return fddp.mixed_precision(loss_fn) if drawn.narrow else loss_fn


def _term(leaf: Any, name: str, place: int, x: Any, word: Any) -> Any:
    """The term of a leaf for each row."""
    leaf = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.real(leaf) * (1 + jnp.imag(leaf))
    if name.startswith("table"):
        return jnp.sum(leaf[word], axis=1)
    if leaf.ndim == 2 and leaf.size:
        return jnp.mean(x[:, : leaf.shape[0]] @ leaf, axis=1)
    columns = x[:, (np.arange(leaf.size) + place) % COLUMNS]
    return columns @ leaf.reshape(-1) / max(1.0, leaf.size**0.5)
