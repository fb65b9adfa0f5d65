r"""Few bits: how much do they cost in test loss? Digits and a GPT of bytes, several seeds, plain
sums and each hook.

    python bench/few_bits.py [--problems digits gpt] [--methods plain bf16 ...] [--seeds 5] \
        [--first 0] [--quick]

The problems, their optimizers and four replicas are those of `bench/local_steps.py`. No clock
decides anything here: the bits of adaptive are those that `bench/fitted_bits.py` would choose if
stages took as long as they have gradients to make, and a link carried plain sums in twice, or in 16
times, the time of all of them. Each call adds to the results in the file.
"""

import argparse
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parents[1]))
from rich.console import Console
from rich.table import Table

import fddp
from bench.bits_on_paper import SimulatedMessage, fitting_bits
from bench.fitted_bits import EXPOSED
from bench.local_steps import PROBLEMS, Problem, train
from bench.record import save, saved, with_table
from fddp import hooks

REPLICAS = 4
STEPS = {"digits": 512, "gpt": 256}
QUICK_STEPS = 32
CAPS = {"digits": 0.0, "gpt": 1.0}
README = Path(__file__).parent / "README.md"


class Momentum(NamedTuple):
    """The state of an optimizer that first computes the momentum of gradients, and later receives
    it."""

    step: Any
    momentum: Any
    variance: Any


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--problems", nargs="+", default=["digits", "gpt"], choices=["digits", "gpt"]
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="number of the first seed")
    parser.add_argument(
        "--quick", action="store_true", help="one seed and few steps, nothing is saved"
    )
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", REPLICAS)
    group = fddp.init("local")
    results = {} if args.quick else saved("few_bits").get("problems", {})
    for name in args.problems:
        steps = QUICK_STEPS if args.quick else STEPS[name]
        methods = results.setdefault(name, {"steps": steps, "methods": {}})["methods"]
        for seed in range(args.first, args.first + (1 if args.quick else args.seeds)):
            for method in args.methods:
                begin = time.perf_counter()
                test_loss, mib = loss_and_mib(group, name, method, seed, steps)
                print(
                    f"{name:7} {method:26} seed {seed}: {test_loss:.5f}, "
                    f"{time.perf_counter() - begin:.0f} s",
                    flush=True,
                )
                entry = methods.setdefault(
                    method, {"test_loss": {}, "bytes_a_step": round(mib * 2**20 / steps)}
                )
                entry["test_loss"][str(seed)] = round(test_loss, 5)
                if not args.quick:
                    save("few_bits", {"replicas": REPLICAS, "problems": results})
    Console(width=120).print(*map(shown, results.items()))
    if not args.quick:
        README.write_text(with_table(README.read_text(), page(results), "few_bits.py"))


def loss_and_mib(
    group: fddp.Group, name: str, method: str, seed: int, steps: int
) -> tuple[float, float]:
    """Test loss, and MiB that each replica sent."""
    problem, options = METHODS[method](group, name, PROBLEMS[name](seed, steps))
    loss, mib, _ = train(group, problem, seed, bucket_cap_mb=CAPS[name], **options)
    return loss, mib


def summing(
    hook: Callable[[int], fddp.Hook | None],
) -> Callable[..., tuple[Problem, dict[str, Any]]]:
    """A method for the unchanged problem; the hook depends on the number of steps before it begins,
    a tenth of all."""
    return lambda group, name, problem: (problem, {"hook": hook(problem.steps // 10)})


def one_bit(group: fddp.Group, name: str, problem: Problem) -> tuple[Problem, dict[str, Any]]:
    """1-bit Adam, and SGD whose momentum travels in one bit: the variance is frozen when momentum
    begins to travel."""
    del group
    start = problem.steps // 4
    hook = hooks.momentum(hooks.sign(), start=start)
    if name == "digits":
        optimizer = from_momentum(
            optax.cosine_decay_schedule(1.0, problem.steps), start, variance=False
        )
    else:
        rate = optax.warmup_cosine_decay_schedule(0.0, 2e-3, problem.steps // 10, problem.steps)
        clip = optax.clip_by_global_norm(1.0)
        optimizer = optax.chain(clip, from_momentum(rate, start, variance=True))
    return problem._replace(optimizer=optimizer), {"hook": hook}


def from_momentum(rate: Any, start: int, *, variance: bool) -> optax.GradientTransformation:
    """Descends along the mean of gradients, optionally divided by the root of their variance; see
    docs/hooks.md."""

    def init(params: Any) -> Momentum:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Momentum(jnp.zeros((), jnp.int32), zeros, zeros)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Momentum]:
        del params
        first = lambda m, g: jnp.where(state.step < start, 0.9 * m + 0.1 * g, g)  # noqa: E731
        second = lambda v, g: jnp.where(state.step < start, 0.999 * v + 0.001 * g**2, v)  # noqa: E731
        m = jax.tree.map(first, state.momentum, updates)
        v = jax.tree.map(second, state.variance, updates)
        divided = lambda m, v: m / (jnp.sqrt(v / 0.999) + 1e-8) if variance else m  # noqa: E731
        steps = jax.tree.map(lambda m, v: -rate(state.step) * divided(m, v), m, v)
        return steps, Momentum(state.step + 1, m, v)

    return optax.GradientTransformation(init, update)


def adaptive(times: float) -> Callable[..., tuple[Problem, dict[str, Any]]]:
    """Bits for a link on which plain sums take so many times as long as the stages."""

    def method(group: fddp.Group, name: str, problem: Problem) -> tuple[Problem, dict[str, Any]]:
        step = fddp.train_step(
            problem.loss_fn, problem.optimizer, group=group, bucket_cap_mb=CAPS[name]
        )
        state = step.init(problem.params)
        step(state, next(problem.batches(0)))  # its plan is that of the step with bits
        nbytes = [bucket.nbytes for bucket in step.plan.buckets]
        # The first third of a step is the forward pass.
        ready = [1 / 3 + 2 / 3 * nbytes_done / sum(nbytes) for nbytes_done in accumulate(nbytes)]
        messages = [
            SimulatedMessage(k, at, 1 + EXPOSED, n) for k, (at, n) in enumerate(zip(ready, nbytes))
        ]
        bits = fitting_bits(messages, lambda k, bits: times * bits / 32 * nbytes[k] / sum(nbytes))
        print(f"{name}: {times:g} times, bits {bits}", flush=True)
        return problem, {"hook": hooks.adaptive(bits)}

    return method


METHODS: dict[str, Callable[..., tuple[Problem, dict[str, Any]]]] = {
    "plain": summing(lambda start: None),
    "bf16": summing(lambda start: hooks.bf16()),
    "quantize(bits=8)": summing(lambda start: hooks.quantize()),
    "quantize(bits=4)": summing(lambda start: hooks.quantize(bits=4)),
    "sign": summing(lambda start: hooks.starting(start, hooks.sign())),
    "momentum(sign)": one_bit,
    "topk(0.01)": summing(lambda start: hooks.starting(start, hooks.topk(0.01))),
    "adaptive, link of 1/2": adaptive(2),
    "adaptive, link of 1/16": adaptive(16),
}


def rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row for each method: test loss with its range, relative to plain with its range over seeds,
    and bytes a step."""
    plain = result["methods"]["plain"]["test_loss"]
    table_rows = list[tuple[str, ...]]()
    for method in [method for method in METHODS if method in result["methods"]]:
        run = result["methods"][method]
        losses = np.array([run["test_loss"][seed] for seed in run["test_loss"]])
        of_plain = np.array(
            [run["test_loss"][seed] / plain[seed] for seed in run["test_loss"] if seed in plain]
        )
        table_rows.append(
            (
                method,
                str(len(losses)),
                f"{losses.mean():.4f} ({losses.min():.4f}–{losses.max():.4f})",
                f"{losses.mean() / np.mean([plain[seed] for seed in run['test_loss']]):.3f}",
                f"{of_plain.min():.3f}–{of_plain.max():.3f}",
                f"{run['bytes_a_step']:,}",
            )
        )
    return table_rows


HEAD = ("hook", "seeds", "test loss (range)", "of plain's", "seed by seed", "bytes a step")


def shown(item: tuple[str, dict[str, Any]]) -> Table:
    name, result = item
    table = Table(*HEAD, title=f"{name}, {result['steps']} steps")
    for row in rows(result):
        table.add_row(*row)
    return table


def page(results: dict[str, Any]) -> str:
    """The tables in Markdown."""
    lines = list[str]()
    for name, result in results.items():
        lines += [
            f"| {name}, {result['steps']} steps | {' | '.join(HEAD[1:])} |",
            "|---" * len(HEAD) + "|",
        ]
        lines += [f"| {' | '.join(row)} |" for row in rows(result)]
        lines.append("")
    return "\n".join(lines).strip()


if __name__ == "__main__":
    main()
