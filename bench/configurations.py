"""Does any configuration train to other parameters than plain JAX? Problems, options and batches
are drawn at random.

    python bench/configurations.py [--count 504] [--seed 0] [--minutes 60] [--shards] [--quick]

Each configuration trains for a few steps on up to eight devices of this process, and in `plain.py`,
in float64. Options that do not go together are drawn as they come: an error that fddp raises in its
own words, before anything has run, counts as refused. `--seed N --count 1` runs one again.
"""

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import fddp
from bench import plain
from bench.drawn import (
    EXACT,
    NORMED,
    OUTER,
    RATE,
    ROUNDED,
    Drawn,
    batch_of,
    buffers,
    draw,
    keys,
    loss_of,
    optimizer_of,
)
from bench.record import question

COUNT = 504
TIMEOUT_S = 180
FORGET_EVERY = 40


class Outcome(NamedTuple):
    """The outcome of a configuration."""

    kind: str
    """"trained", "refused" or "wrong"."""
    words: str = ""


class Wrong(Exception):
    """A training differs from the reference."""


def main() -> None:
    parser = question(__doc__, "12 configurations")
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--minutes", type=float, default=600.0, help="no other one begins later")
    parser.add_argument("--shards", action="store_true", help="states in shards, with more choices")
    args = parser.parse_args()
    prepare()
    count = 12 if args.quick else args.count
    outcomes = dict[int, Outcome]()
    end = time.perf_counter() + 60 * args.minutes
    for seed in range(args.seed, args.seed + count):
        drawn = draw(seed, shards=args.shards)
        begin = time.perf_counter()
        if begin > end:
            break
        outcomes[seed] = outcome = judged(drawn)
        shown = f"{drawn}: " * (outcome.kind == "wrong")
        print(
            f"{seed:5} {time.perf_counter() - begin:5.1f} s {outcome.kind} {shown}{outcome.words}",
            flush=True,
        )
        if seed % FORGET_EVERY == 0:
            jax.clear_caches()
    print(table(outcomes))


def prepare() -> None:
    """Gives this process eight devices and a compiler in a hurry, before JAX starts."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_disable_most_optimizations", True)
    # The place of the raise shows the author of an error's words.
    jax.config.update("jax_traceback_filtering", "off")
    # XLA:CPU has kernels there that take longer to make than all the rest.
    if jax.__version_info__ < (0, 11):
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"
        os.environ["XLA_FLAGS"] = flags.strip()


def table(outcomes: dict[int, Outcome]) -> str:
    """The numbers of outcomes, with reasons."""
    kinds = Counter(outcome.kind for outcome in outcomes.values())
    reasons = Counter(
        outcome.words[:60] for outcome in outcomes.values() if outcome.kind == "refused"
    )
    lines = [f"{kinds[kind]:5} {kind}" for kind in ("trained", "refused", "wrong")]
    lines[2:2] = [f"      {count:5} {words}" for words, count in reasons.most_common()]
    wrong = [(n, outcome.words) for n, outcome in outcomes.items() if outcome.kind == "wrong"]
    return "\n".join([*lines, *(f"      {n:5} {words}" for n, words in wrong)])


def judged(drawn: Drawn) -> Outcome:
    """Trains a configuration, and returns the outcome."""

    def too_long(*_: Any) -> None:
        raise Wrong(f"it hangs: nothing for {TIMEOUT_S} s")

    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(TIMEOUT_S)
    # Where not even a signal comes through.
    faulthandler.dump_traceback_later(2 * TIMEOUT_S, exit=True)
    try:
        with jax.enable_x64(drawn.x64):
            refused = trained(drawn)
        return Outcome("refused", refused) if refused else Outcome("trained")
    except Wrong as error:
        return Outcome("wrong", str(error))
    except Exception as error:  # whatever it is, it is wrong
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{type(error).__name__} in {frame.filename}:{frame.lineno}"
        return Outcome("wrong", f"{where}: {str(error)[:600]}")
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()


def trained(drawn: Drawn) -> str:
    """Trains and compares; returns the reason if fddp refuses."""
    try:
        step = step_of(drawn)
        state = step.init(drawn.params, model_state=buffers(drawn), rng=keys(drawn))
    except (ValueError, TypeError) as error:
        return message_of(error)
    reference = None
    seen_calls = set[Any]()
    infos = []
    for call in drawn.calls:
        run = step if call.kind == "step" else step.no_sync
        before = state if drawn.options.get("donate") is False else None
        old_leaves = (
            jax.tree.map(np.array, jax.tree.leaves(before._replace(rng=None)))
            if before is not None
            else None
        )
        try:
            state_after, info = run(state, batch_of(drawn, call))
        except (ValueError, TypeError) as error:
            words = message_of(error)
            if (call.kind, len(call.batches[0]["y"])) in seen_calls:
                raise Wrong(f"refused late, in a call like an earlier one: {words}") from error
            arrays = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
            if any(x.is_deleted() for x in arrays):
                raise Wrong(f"refused, and arrays of the state are gone: {words}") from error
            return words
        seen_calls.add((call.kind, len(call.batches[0]["y"])))
        if before is not None and old_leaves is not None:
            for old, x in zip(old_leaves, jax.tree.leaves(before._replace(rng=None))):
                if not np.array_equal(old, np.asarray(x), equal_nan=old.dtype.kind in "fc"):
                    raise Wrong("donate=False, and a step has written over its state")
        state = state_after
        if call.kind == "no_sync":
            continue
        reference = reference if reference is not None else plain.train(drawn)
        compare(drawn, step, state, info, reference[len(infos)], len(infos) + 1)
        infos.append(info)
    return ""


def step_of(drawn: Drawn, group: fddp.Group | None = None) -> fddp.TrainStep:
    """The step of a configuration; None: on the first devices of this process."""
    optimizer: Any = optimizer_of(drawn)
    if drawn.scale:
        interval = plain.GROWTH_INTERVAL
        optimizer = fddp.dynamic_scale(
            optimizer, initial=plain.INITIAL_SCALE, growth_interval=interval
        )
    if drawn.local:
        optimizer = fddp.local_steps(
            optimizer, **{**drawn.local, "outer": OUTER[drawn.local["outer"]]()}
        )
    devices = np.array(jax.devices()[: drawn.replicas])
    group = group or fddp.mesh_group(jax.sharding.Mesh(devices, "replica"))
    if drawn.hosts > 1:
        group = group.hierarchical(local=drawn.replicas // drawn.hosts)
    options: dict[str, Any] = dict(drawn.options)
    if drawn.ignored:
        options["ignore"] = lambda path: path == drawn.ignored
    return fddp.train_step(
        loss_of(drawn), optimizer, group=group, has_aux="aux" in drawn.form, **options
    )


def message_of(error: Exception) -> str:
    """The message of an error of fddp; an error from elsewhere is wrong."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    if not Path(frame.filename).is_relative_to(ROOT / "fddp"):
        raise Wrong(
            f"an error in {frame.filename}:{frame.lineno}, not fddp's: {str(error)[:600]}"
        ) from error
    return str(error)


def compare(
    drawn: Drawn, step: fddp.TrainStep, state: Any, info: Any, reference: plain.Report, number: int
) -> None:
    """Compares a state and a step's report with the reference."""
    equal_on_all(drawn, state)
    if int(state.step) != number:
        raise Wrong(f"step {number} left the number {int(state.step)}")
    gathered = fddp.whole(state, group=step.group)
    got = {name: x for name, x in gathered.params.items() if name in drawn.trained}
    for name, x in drawn.params.items():
        if name not in got and not np.array_equal(np.asarray(gathered.params[name]), x):
            raise Wrong(f"step {number} has changed {name}, which is not trained")
    if drawn.hook not in (*EXACT, *ROUNDED):
        if not drawn.infinite and not all(
            np.all(np.isfinite(np.asarray(x, np.complex128))) for x in got.values()
        ):
            raise Wrong(f"after step {number} parameters are not finite")
        return
    close = Tolerance(drawn, number)
    close("params", got, reference.shared if drawn.local else reference.params)
    if drawn.local:
        local = {name: gathered.opt_state.params[name] for name in drawn.trained}
        expected = {n: np.broadcast_to(reference.params[n], x.shape) for n, x in local.items()}
        close("local", local, expected)
    else:
        inner = gathered.opt_state
        if drawn.scale:
            if float(inner.scale) != reference.scale:
                raise Wrong(
                    f"after step {number} the scale is {inner.scale}, not {reference.scale}"
                )
            inner = inner.inner
        if close.exact:
            close("opt_state", jax.tree.leaves(inner), jax.tree.leaves(reference.opt_state))
    close("loss", info.loss, reference.loss)
    close("aux", info.aux, reference.aux if "aux" in drawn.form else None)
    if reference.buffers[0] is not None:
        check_buffers(drawn, close, state, gathered, reference)
    if info.used is not None and reference.used is not None and not drawn.local:
        counts = {name: int(x) for name, x in info.used.items() if name in drawn.trained}
        if counts != reference.used:
            raise Wrong(f"step {number} says leaves were used by {counts}, not {reference.used}")


def check_buffers(
    drawn: Drawn, close: "Tolerance", state: Any, gathered: Any, reference: plain.Report
) -> None:
    """Buffers of each replica."""
    for name, x in state.model_state.items():
        for shard in x.addressable_shards:
            buffers = reference.buffers[
                shard.device.id if len(reference.buffers) == drawn.replicas else 0
            ]
            close(f"buffer {name} of replica {shard.device.id}", shard.data, buffers[name])


def equal_on_all(drawn: Drawn, state: Any) -> None:
    """Checks that replicas have the same bits of their common arrays."""
    common = {"params": state.params, "opt_state": state.opt_state}
    if drawn.options.get("broadcast_buffers", True) is not False and not drawn.local:
        common["model_state"] = state.model_state
    for path, x in jax.tree_util.tree_leaves_with_path(common):
        if isinstance(x, jax.Array) and x.is_fully_replicated:
            bits = {np.asarray(shard.data).tobytes() for shard in x.addressable_shards}
            if len(bits) > 1:
                raise Wrong(f"replicas differ in {jax.tree_util.keystr(path)}")


class Tolerance:
    """The tolerance of numbers after so many steps, by the narrowest dtype of the training."""

    def __init__(self, drawn: Drawn, steps: int) -> None:
        dtypes = [jnp.dtype(drawn.dtypes[name]) for name in drawn.trained]
        # Numbers computed or sent in 16 bits have their precision, whatever the parameters have.
        dtypes += [jnp.dtype(name) for hook, name in ROUNDED.items() if hook == drawn.hook]
        dtypes += [jnp.dtype("bfloat16")] * drawn.narrow
        eps = max(float(jnp.finfo(dtype).eps) for dtype in dtypes)
        x64 = eps < 1e-12 and drawn.calls[0].batches[0]["x"].dtype == np.float64
        self.number = steps
        self.exact = eps < 1e-5
        # 16 bits: each step rounds a gradient's sum and a parameter. Where an update does not
        # shrink with its gradient, rounding may turn its sign.
        sign_flips = 2 * steps * RATE * (drawn.optimizer in NORMED)
        self.most = (1e-10 if x64 else 2e-5) if self.exact else 8 * steps * eps + sign_flips

    def __call__(self, what: str, got: Any, expected: Any) -> None:
        if jax.tree.structure(got) != jax.tree.structure(expected):
            raise Wrong(f"{what} is {jax.tree.structure(got)}, not {jax.tree.structure(expected)}")
        for (path, a), b in zip(
            jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected)
        ):
            a = np.asarray(a, np.complex128)
            b = np.asarray(b, np.complex128)
            where = f"after step {self.number} {what}{jax.tree_util.keystr(path)}"
            if a.shape != b.shape:
                raise Wrong(f"{where} has the shape {a.shape}, not {b.shape}")
            if not np.array_equal(np.isfinite(a), np.isfinite(b)):
                raise Wrong(f"{where} is {a}, not {b}")
            finite = np.isfinite(a)
            off = np.abs(a[finite] - b[finite]) / np.maximum(1, np.abs(b[finite]))
            if off.size and off.max() > self.most:
                raise Wrong(f"{where} is off by {off.max():.2g}, more than {self.most:.2g}")


if __name__ == "__main__":
    main()
