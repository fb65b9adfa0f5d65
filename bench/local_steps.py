r"""Training alone between synchronizations: how much does it cost in test loss? Loss over bytes.

    python bench/local_steps.py [--problems digits gpt] [--methods "local SGD"] \
        [--seeds 5] [--first 0] [--quick]

Four replicas on devices of one CPU, equal rows for all methods: handwritten digits with a small
network and plain momentum, and a GPT of bytes (1.6 million parameters, Python's own sources) with
AdamW. Bytes are those of each replica in the whole training.

With --methods (the beginnings of names) and --first it can be run in parts: the file keeps the
rest.

Source: the figures of Lin et al., "Don't Use Large Mini-Batches, Use Local SGD" (2020), and
Douillard et al., "DiLoCo" (2023).
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
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
from bench.plots import figure
from bench.record import save, save_picture, saved
from fddp import hooks
from models import data, gpt

REPLICAS = 4
MiB = 2**20
Optimizer = optax.GradientTransformation
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


class Problem(NamedTuple):
    """A model, its data and its optimizer."""

    loss_fn: Callable[..., Any]
    params: Any
    optimizer: Optimizer
    batches: Callable[[int], Iterator[Any]]
    """seed → batches of all replicas"""
    held_out: list[Any]
    """held-out batches"""
    steps: int


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--problems", nargs="+", default=["digits", "gpt"], choices=["digits", "gpt"]
    )
    parser.add_argument("--methods", nargs="+", default=[""], help="beginnings of their names")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--first",
        type=int,
        default=0,
        help="number of the first seed; the file keeps those before it",
    )
    parser.add_argument(
        "--quick", action="store_true", help="one seed and few steps, nothing is saved"
    )
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", REPLICAS)
    group = fddp.init("local")
    results: dict[str, Any] = {}
    for name in args.problems:
        steps = 32 if args.quick else {"digits": 512, "gpt": 256}[name]
        seeds = range(args.first, args.first + (1 if args.quick else args.seeds))
        runs = {
            method: [train(group, PROBLEMS[name](seed, steps), seed, **options) for seed in seeds]
            for method, options in methods(steps).items()
            if method.startswith(tuple(args.methods))
        }
        results[name] = summarize(name, runs, steps)
    if not args.quick:
        results = together(results, args.first)
        print(save("local_steps", {"replicas": REPLICAS, "problems": results}))
        print(picture(results))


def together(results: dict[str, Any], first: int) -> dict[str, Any]:
    """The results, appended to those of earlier seeds and merged with those of other problems in
    the file."""
    before = saved("local_steps").get("problems", {})
    for name, entry in results.items():
        earlier = before.get(name, {}).get("methods", {})
        for method, run in entry["methods"].items():
            was = earlier[method]["test_loss"][:first] if first else []
            run["test_loss"] = [*was, *run["test_loss"]]
        merged = earlier | entry["methods"]
        entry["methods"] = {
            method: merged[method] for method in methods(entry["steps"]) if method in merged
        }
        ddp = entry["methods"].get("DDP", {}).get("mib_sent")
        for run in entry["methods"].values():
            run["of_ddp"] = round(run["mib_sent"] / ddp, 5) if ddp else None
    return before | results


def methods(steps: int) -> dict[str, dict[str, Any]]:
    """Ways to synchronize, by name: the arguments of `train`."""
    half = steps // 2
    return {
        "DDP": {},
        **{f"local SGD, {k}": {"local": {"every": k}} for k in (2, 8, 32)},
        **{f"post-local SGD, {k}": {"local": {"every": k, "start": half}} for k in (2, 8, 32)},
        **{
            f"SlowMo, {k}": {"local": {"every": k, "outer": optax.sgd(1.0, momentum=0.5)}}
            for k in (8, 32)
        },
        **{f"DiLoCo, {k}": {"local": {"every": k, "outer": NESTEROV}} for k in (8, 32, 128)},
        "streaming DiLoCo, 32": {
            "local": {"every": 32, "outer": NESTEROV, "fragments": 3, "delay": 1, "mix": 0.5},
            "bucket_cap_mb": 0,
        },
        "local SGD in islands of two, 8": {"local": {"every": 8, "island": 2}},
        **{
            f"DiLoCo in islands of two, {k}": {
                "local": {"every": k, "outer": NESTEROV, "island": 2}
            }
            for k in (8, 32)
        },
        "PowerSGD(2)": {"hook": hooks.powersgd(2, start_step=steps // 10)},
        "top-k, 1 %": {"hook": hooks.topk(0.01)},
    }


def train(
    group: fddp.Group,
    problem: Problem,
    seed: int,
    local: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[float, float, float]:
    """Test loss, MiB that each replica sent, and seconds."""
    optimizer = fddp.local_steps(problem.optimizer, **local) if local else problem.optimizer
    step = fddp.train_step(problem.loss_fn, optimizer, group=group, **options)
    state = step.init(problem.params)
    nbytes = 0
    begin = time.perf_counter()
    for batch in islice(problem.batches(seed), problem.steps):
        state, info = step(state, batch)
        nbytes += int(np.sum(np.asarray(info.sent), dtype=np.int64))
    test_loss = fddp.evaluate(problem.loss_fn, state, problem.held_out, group=group)
    return test_loss, nbytes / MiB, time.perf_counter() - begin


def digits(seed: int, steps: int) -> Problem:
    images, labels, test_images, test_labels = data.split_digits()
    images, test_images = (
        x.reshape(len(x), -1).astype(np.float32) / 16 for x in (images, test_images)
    )

    def loss(p: Any, batch: Any) -> Any:
        hidden = jax.nn.relu(batch["image"] @ p["first"] + p["bias"])
        logits = hidden @ p["second"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    def batches(seed: int) -> Iterator[Any]:
        for chosen in fddp.samples(len(images), 64, seed=seed, drop_last=True):
            yield {"image": images[chosen], "label": labels[chosen].astype(np.int32)}

    draw = np.random.default_rng(seed)
    params = {
        "first": draw.normal(size=(64, 128), scale=(2 / 64) ** 0.5).astype(np.float32),
        "bias": np.zeros(128, np.float32),
        "second": draw.normal(size=(128, 10), scale=(1 / 128) ** 0.5).astype(np.float32),
    }
    held_out = [{"image": test_images, "label": test_labels.astype(np.int32)}]
    rate = optax.cosine_decay_schedule(0.1, steps)
    return Problem(loss, params, optax.sgd(rate, momentum=0.9), batches, held_out, steps)


def byte_gpt(seed: int, steps: int) -> Problem:
    model = gpt.PRESETS["bytes"]
    length = 64
    rows, test_rows = data.read_text(None, length)
    with_metrics = gpt.loss_fn(model)

    def loss(params: Any, batch: Any) -> Any:
        value, _ = with_metrics(params, batch)
        return value

    def batches(seed: int) -> Iterator[Any]:
        for chosen in fddp.samples(len(rows), 16, seed=seed, drop_last=True):
            yield {"tokens": rows[chosen].astype(np.int32)}

    tests = np.random.default_rng(0).permutation(len(test_rows))[:256].reshape(8, 32)
    held_out = [{"tokens": test_rows[chosen].astype(np.int32)} for chosen in tests]
    params, _ = gpt.init(
        model, jax.random.key(seed), {"tokens": jnp.zeros((1, length + 1), jnp.int32)}
    )
    rate = optax.warmup_cosine_decay_schedule(0.0, 2e-3, steps // 10, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    return Problem(loss, params, optimizer, batches, held_out, steps)


PROBLEMS = {"digits": digits, "gpt": byte_gpt}


def summarize(
    name: str, runs_of_method: dict[str, list[tuple[float, float, float]]], steps: int
) -> dict[str, Any]:
    """A table on the screen, and the same as data."""
    table = Table(
        "method",
        "test loss (range)",
        "of DDP's",
        "MiB sent",
        "of DDP's",
        "s",
        title=f"{name}, {steps} steps",
    )
    ddp = (
        np.mean([run[:2] for run in runs_of_method["DDP"]], axis=0)
        if "DDP" in runs_of_method
        else np.full(2, np.nan)
    )
    results = dict[str, Any]()
    for method, runs in runs_of_method.items():
        losses = np.array([run[0] for run in runs])
        mib_sent = runs[0][1]
        spread = f"{losses.mean():.4f} ({losses.min():.4f}–{losses.max():.4f})"
        share = mib_sent / ddp[1]
        seconds = f"{np.mean([run[2] for run in runs]):.1f}"
        table.add_row(
            method,
            spread,
            f"{losses.mean() / ddp[0]:.3f}",
            f"{mib_sent:.2f}",
            f"{share:.4f}",
            seconds,
        )
        results[method] = {
            "test_loss": losses.round(5).tolist(),
            "mib_sent": round(mib_sent, 4),
            "of_ddp": round(share, 5),
        }
    Console(width=110).print(table)
    return {"steps": steps, "methods": results}


def picture(results: dict[str, Any]) -> Path:
    """Test loss over bytes, with the range over seeds."""
    sheet, axes = figure(len(results))
    for axis, (name, result) in zip(np.atleast_1d(axes), results.items()):
        families = list(dict.fromkeys(method.split(",")[0] for method in result["methods"]))
        for k, (method, entry) in enumerate(result["methods"].items()):
            losses = np.array(entry["test_loss"])
            family = families.index(method.split(",")[0])
            low = losses.mean() - losses.min()
            high = losses.max() - losses.mean()
            look = {"fmt": "osD^"[k % 4], "color": f"C{family}", "capsize": 3}
            axis.errorbar(entry["mib_sent"], losses.mean(), [[low], [high]], label=method, **look)
        axis.set(
            xscale="log",
            yscale="log",
            xlabel="MiB sent by each replica",
            ylabel="test loss",
            title=name,
        )
        axis.legend(
            fontsize=6, ncols=2, loc="center left", bbox_to_anchor=(1.01, 0.5), borderaxespad=0
        )
    return save_picture("local_steps", sheet, dpi=150)


if __name__ == "__main__":
    main()
