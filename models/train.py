"""Trains a ResNet on handwritten digits or a GPT on Python's own sources, on as many replicas as
you start.

mpiexec -n 2 python models/train.py                   two processes over MPI

mpiexec -n 2 python models/train.py --backend gloo    the same over Gloo

python models/train.py --replicas 4                   four devices of one process

python models/train.py gpt --steps 200                a language model of bytes

Rank 0 shows progress and, at the end, a page; it draws the loss curve in runs/.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jaxtyping import Int
from matplotlib.figure import Figure
from rich.console import Console, Group
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

import fddp

sys.path.append(
    str(Path(__file__).parents[1])
)  # where models is, with fddp installed and run from anywhere
from models import data, gpt, resnet


@dataclass(frozen=True)
class Config:
    model: Annotated[Literal["resnet", "gpt"], tyro.conf.Positional] = "resnet"
    """The model to train; `gpt --help` shows that model's defaults."""
    preset: str = "18-digits"
    """Its shape: a name in PRESETS of models/resnet.py or models/gpt.py."""
    data: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """resnet: a folder with MNIST's four IDX files, instead of scikit-learn's digits.
    gpt: a folder of text files, instead of the sources of Python's standard library."""
    steps: int = 300
    """Updates of the parameters."""
    batch: int = 64
    """Rows a step, over all replicas."""
    learning_rate: float = 3e-3
    """The highest: it rises during the first tenth of the steps, then falls along a cosine."""
    seed: int = 0
    """Decides the first parameters and the order of rows, alike for any number of replicas."""
    replicas: int = 1
    """CPU devices of this process, if it is alone; under mpiexec each process is a replica."""
    virtual_replicas: int | None = None
    """Slices of the batch: training gives the same bits on any number of replicas that divides this
    one."""
    backend: Literal["nccl", "gloo", "mpi", "local"] | None = None
    """The transport of the gradients; None: the best one that fddp.init finds."""
    bucket_cap_mb: float = 25
    """MiB of gradients that travel together."""
    layer_drop: float = 0.0
    """gpt: how likely a replica leaves out a layer in a step; each replica leaves out its own."""
    out: Path = Path("runs")
    """Folder for the loss curve."""
    resume: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder for checkpoints: training saves there, and the same command goes on from the newest.
    If no step is left, it tests that one."""
    save_every: int = 100
    """Steps between two checkpoints, with --resume; the last step is saved as well."""
    quick: bool = False
    """Few steps of the smallest model, as the tests run it, unless other arguments say
    otherwise."""


CONFIGS = {"resnet": Config(), "gpt": Config("gpt", preset="bytes", steps=300, batch=16)}


def read_config(words: Sequence[str]) -> Config:
    """The command line, over the defaults of the model that it names."""
    default = CONFIGS[next((word for word in words if word in CONFIGS), "resnet")]
    default = replace(default, preset="tiny", steps=60) if "--quick" in words else default
    return tyro.cli(Config, default=default, args=words, prog="train.py", description=__doc__)


def main(config: Config) -> None:
    """This process's part of the job."""
    if config.replicas > 1:
        jax.config.update("jax_num_cpu_devices", config.replicas)
    group = fddp.init(config.backend)
    if config.replicas not in (1, group.size):
        raise ValueError(
            f"--replicas {config.replicas} is for a process alone, on CPUs; this one is in {group}."
        )

    console = screen(group)
    task = TASKS[config.model](config)
    state, plan, history = train(task, config, group, console)
    results = task.test(state, group)
    if group.is_main:
        if history.losses:
            results["loss curve"] = str(draw(task.title, config, history))
        console.print(page(task.title, config, group, history, results, plan))


class Task(NamedTuple):
    """A model and its data."""

    title: str
    loss_fn: Callable[..., Any]
    params: Any
    model_state: Any
    rows: int
    batch: Callable[[Int[np.ndarray, " B"]], Any]
    """Rows, by their numbers."""
    test: Callable[[fddp.TrainState, fddp.Group], dict[str, str]]
    """Tests a state on held-out data, a part on each process; returns lines for the page."""
    rng: Any = None
    """A random key, if the loss draws numbers."""


@dataclass
class History:
    """A host's record of each step."""

    start: int = 0
    """The step before the first one: 0, or that of the checkpoint."""
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=lambda: [time.perf_counter()])

    def note(self, info: fddp.StepInfo) -> None:
        """Waits for a step. A loss that is no number ends the job: on every rank, as all see the
        same loss."""
        self.losses.append(float(info.loss))
        self.accuracies.append(float(info.aux["accuracy"]))
        self.times.append(time.perf_counter())
        if not math.isfinite(self.losses[-1]):
            raise FloatingPointError(
                f"the loss of step {self.step} is {self.losses[-1]}; try a smaller --learning-rate."
            )

    @property
    def step(self) -> int:
        """The training's number of the last step that was seen."""
        return self.start + len(self.losses)

    @property
    def step_seconds(self) -> float:
        """The median step: the first ones, which compile, do not count."""
        return float(np.median(np.diff(self.times)))

    def summary(self, rows: int) -> str:
        """The state of the training after a step of so many rows."""
        return f"loss {self.losses[-1]:.3f} · {rows / self.step_seconds:,.0f} samples/s"


### Training


def train(
    task: Task, config: Config, group: fddp.Group, console: Console
) -> tuple[Any, fddp.BucketPlan, History]:
    """The loop."""
    if config.steps < 1:
        raise ValueError(f"--steps must be 1 or more, got {config.steps}.")
    if config.batch % group.size or not 0 < config.batch <= task.rows:
        raise ValueError(
            f"--batch must be a multiple of {group.size} up to {task.rows} rows, got "
            f"{config.batch}."
        )
    if not 0 <= config.layer_drop < 1 or (config.layer_drop and config.model != "gpt"):
        raise ValueError(
            f"--layer-drop is for gpt and must be from 0 to below 1, got {config.layer_drop}."
        )
    rate = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, config.steps // 10, config.steps
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01))
    # A layer that no replica ran stays as it is, moments and all.
    options: Any = {
        "bucket_cap_mb": config.bucket_cap_mb,
        "find_unused_parameters": config.layer_drop > 0,
    }
    options["virtual_replicas"] = config.virtual_replicas
    options["skip_nonfinite"] = True  # so no checkpoint holds a NaN
    step = fddp.train_step(task.loss_fn, optimizer, group=group, has_aux=True, **options)
    state = step.init(task.params, model_state=task.model_state, rng=task.rng)
    with saved(config, step, state) as (state, save):
        state, history = loop(task, config, group, console, step, state, save)
    return state, step.plan, history


def loop(
    task: Task,
    config: Config,
    group: fddp.Group,
    console: Console,
    step: fddp.TrainStep,
    state: fddp.TrainState,
    save: Callable[[fddp.TrainState, bool], None],
) -> tuple[fddp.TrainState, History]:
    """Trains from the state's step up to the last; a state of the last one comes back as it is."""
    history = History(int(state.step))
    start = int(state.step)
    if start > config.steps:
        raise ValueError(
            f"--steps {config.steps}: the checkpoint in {config.resume} is of step {start}."
        )
    if start == config.steps:
        return state, history
    # This process reads its own rows only, in Grain's threads while the step before runs; a step
    # has the same rows on any number of processes.
    own_rows = fddp.samples(
        task.rows,
        config.batch,
        rank=group.rank,
        size=group.processes,
        seed=config.seed,
        drop_last=True,
        virtual_replicas=config.virtual_replicas,
        start_step=start,
    )
    rows = grain.MapDataset.source(list(islice(own_rows, config.steps - start)))
    batches = rows.map(task.batch).to_iter_dataset(
        grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
    )
    flying = deque[fddp.StepInfo](maxlen=2)
    with progress(console) as bar:
        job = bar.add_task("", total=config.steps, completed=start, now="compiling")
        for batch in batches:
            state, info = step(state, batch)
            save(state, False)
            flying.append(info)
            if (
                len(flying) == 2
            ):  # the host looks at a step once the next is on its way: neither waits for the other
                history.note(flying[0])
                bar.update(job, advance=1, now=history.summary(config.batch))
                if bar.disable and history.step * 10 % config.steps < 10:
                    console.print(bar)
        history.note(flying[-1])
        bar.update(job, advance=1, now=history.summary(config.batch))
    save(state, True)
    if bar.disable:
        console.print(bar)
    return state, history


@contextmanager
def saved(
    config: Config, step: fddp.TrainStep, state: fddp.TrainState
) -> Iterator[tuple[fddp.TrainState, Callable[[fddp.TrainState, bool], None]]]:
    """The state to start from, and a function to call after each step.

    The function saves now and then, or before the job ends. Its argument is True to save in any
    case, as after the last step.
    """
    if config.resume is None:
        yield state, lambda state, at_end: None
        return
    if fddp.preempted():  # its first call takes SIGTERM over, compiling included
        raise SystemExit(0)
    with fddp.Checkpoints(config.resume, step, every=config.save_every) as checkpoints:

        def save(state: fddp.TrainState, at_end: bool) -> None:
            results = fddp.preempted()
            checkpoints.save(state, now=at_end or results)
            if results:
                checkpoints.close()
                raise SystemExit(0)

        state, _ = checkpoints.restore(state)
        yield state, save


def chosen(presets: Mapping[str, Any], name: str) -> Any:
    if name not in presets:
        raise ValueError(f"--preset must be one of {', '.join(presets)}, got {name!r}.")
    return presets[name]


### The ResNet and its digits


def resnet_task(config: Config) -> Task:
    """The task of recognizing handwritten digits."""
    model = chosen(resnet.PRESETS, config.preset)
    if jax.default_backend() == "cpu":
        model = model.clone(conv_general_dilated=fddp.conv_general_dilated)
    images, labels, test_images, test_labels = (
        data.read_mnist(config.data) if config.data else data.split_digits()
    )
    mean = images.mean()
    std = images.std()
    images, test_images = (
        ((x[..., None] - mean) / std).astype(np.float32) for x in (images, test_images)
    )

    def batch(rows: Any) -> dict[str, np.ndarray]:
        return {"image": images[rows], "label": labels[rows].astype(np.int32)}

    def right(params: Any, batch: Any, *, model_state: Any = None) -> Any:
        logits = resnet.predict(model, params, model_state, batch["image"])
        return jnp.mean(logits.argmax(-1) == batch["label"])

    def test(state: fddp.TrainState, group: fddp.Group) -> dict[str, str]:
        count = len(test_images)
        local_rows = np.array_split(group.rows(np.arange(count)), math.ceil(count / 500))
        batches = ({"image": test_images[rows], "label": test_labels[rows]} for rows in local_rows)
        share = fddp.evaluate(right, state, batches, group=group)
        return {"test accuracy": f"{share:.2%}: {round(share * count):,} of {count:,} images"}

    params, model_state = resnet.init(model, jax.random.key(config.seed), batch([0]))
    title = f"ResNet {config.preset} on {len(images):,} handwritten digits"
    return Task(title, resnet.loss_fn(model), params, model_state, len(images), batch, test)


### The GPT and its text


def gpt_task(config: Config) -> Task:
    """Foretells the next byte of a source; every tenth file is held out."""
    model = chosen(gpt.PRESETS, config.preset).clone(layer_drop=config.layer_drop)
    text, held_out = data.read_text(config.data, model.context)
    loss_fn = gpt.loss_fn(model)

    def batch(rows: Any) -> dict[str, np.ndarray]:
        return {"tokens": text[rows].astype(np.int32)}

    def test(state: fddp.TrainState, group: fddp.Group) -> dict[str, str]:
        tokens = group.rows(held_out[:: len(held_out) // 256 + 1]).astype(np.int32)
        loss, aux = fddp.evaluate(loss_fn, state, [{"tokens": tokens}], group=group)
        params = jax.tree.map(np.asarray, state.params)
        score = (
            f"{loss / math.log(2):.2f} bits per byte, {aux['accuracy']:.0%} of the bytes foretold"
        )
        return {"held-out files": score, "it writes": write(model, params, b"def ", 160)}

    params, _ = gpt.init(model, jax.random.key(config.seed), batch([0]))
    title = (
        f"GPT {config.preset} on {text.shape[0] * model.context / 1e6:.1f} MB of "
        f"{config.data or 'Python sources'}"
    )
    rng = jax.random.key(config.seed) if config.layer_drop else None
    return Task(title, loss_fn, params, None, len(text), batch, test, rng)


def write(model: gpt.GPT, params: Any, prompt: bytes, length: int) -> str:
    """Draws one byte after the other."""

    def draw_byte(i: Any, tokens: Any) -> Any:
        logits = jnp.asarray(model.apply({"params": params}, tokens[None]))[0, i - 1]
        return tokens.at[i].set(jax.random.categorical(jax.random.key(i), logits / 0.7))

    tokens = np.frombuffer(prompt.ljust(length), np.uint8).astype(np.int32)
    tokens = jax.jit(lambda tokens: jax.lax.fori_loop(len(prompt), length, draw_byte, tokens))(
        tokens
    )
    return "".join(
        c if c.isprintable() or c == "\n" else "·"
        for c in bytes(tokens.tolist()).decode(errors="replace")
    )


TASKS = {"resnet": resnet_task, "gpt": gpt_task}


### Output


def screen(group: fddp.Group) -> Console:
    """The console of rank 0. With several ranks it writes lines, possibly to a file: Open MPI gives
    one of them a terminal."""
    if group.processes > 1:
        return Console(width=100, force_terminal=False, quiet=not group.is_main)
    return Console(width=None if sys.stdout.isatty() else 100)


def progress(console: Console) -> Progress:
    """A bar that moves on a terminal; without a terminal the loop prints it now and then."""
    text = TextColumn("steps · {task.fields[now]} ·")
    columns = (BarColumn(), MofNCompleteColumn(), text, TimeRemainingColumn())
    return Progress(*columns, console=console, disable=console.quiet or not console.is_terminal)


def draw(title: str, config: Config, history: History) -> Path:
    """The loss of every step that this run has seen, and its mean over the last ones."""
    losses = history.losses
    numbers = range(history.start + 1, history.step + 1)
    last = max(1, len(losses) // 20)
    means = np.convolve(losses, np.full(last, 1 / last), "valid")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(numbers, losses, color="#9db8d2", linewidth=0.8, label="each step")
    axes.plot(
        numbers[last - 1 :], means, color="#1f4e79", linewidth=2, label=f"mean of the last {last}"
    )
    axes.set(title=title, xlabel="step", ylabel="loss", ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    config.out.mkdir(parents=True, exist_ok=True)
    path = config.out / f"{config.model}-{config.preset}.png"
    figure.savefig(path, dpi=150)
    return path


def page(
    title: str,
    config: Config,
    group: fddp.Group,
    history: History,
    results: dict[str, str],
    plan: Any,
) -> Panel:
    """A page about the model, its data, its results and its speed."""
    devices = f"{group.size} × {jax.local_devices()[0].device_kind}"
    lines = {"replicas": f"{devices} · backend {group.backend} · processes: {group.processes}"}
    if history.start:
        lines["resumed"] = f"after step {history.start:,} of {config.steps:,}"
    if history.losses:
        loss = np.mean(history.losses[-10:])
        accuracy = np.mean(history.accuracies[-10:])
        change = f"{history.losses[0]:.3f} → {loss:.3f}"
        lines["training loss"] = f"{change} · accuracy {accuracy:.1%} (mean of the last 10 steps)"
        times = (
            f"{history.step_seconds * 1e3:,.0f} ms a step (median) · "
            f"{history.times[-1] - history.times[0]:,.0f} s"
        )
        lines["speed"] = f"{config.batch / history.step_seconds:,.0f} samples/s · {times}"
    lines |= results | {"try next": TRY_NEXT[config.model]}
    table = Table.grid(padding=(0, 2))
    for name, line in lines.items():
        table.add_row(Text(name, "bold cyan"), Text(line))
    if not history.losses:  # no step has settled the buckets
        return Panel(table, title=title, border_style="cyan", padding=(1, 2))
    *buckets, foot = str(plan).splitlines()
    names = Text("\n".join(buckets), "dim", no_wrap=True, overflow="ellipsis")
    return Panel(
        Group(table, "", names, Text(foot, "dim")), title=title, border_style="cyan", padding=(1, 2)
    )


TRY_NEXT = {
    "resnet": "mpiexec -n 2 python models/train.py gpt --steps 200",
    "gpt": "python models/train.py --replicas 4 --bucket-cap-mb 0.5",
}


if __name__ == "__main__":
    main(read_config(sys.argv[1:]))
