"""Is a fused step ever estimated behind plain JAX, on GPUs that are not here?

    python bench/beside.py [--models gpt:360m:2 …] [--targets h100:8 …] [--again] [--first] [--page]
    [--quick]

Each step is compiled ahead of time for each target, under each schedule and cap that `fddp.tune`
tries, next to plain JAX of the same loss and optimizer; the milliseconds are those of `fddp.audit`.
Every result is saved at once. The script writes the table of bench/README.md from all saved
results, with a line for each model and target.

  model   module:preset:rows of a replica, of models/
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from bench.plain_jax import HIDING, JIT, SHARD_MAP, plain_steps
from bench.record import save, saved, with_table
from fddp.analysis.auditing.targets import read_target
from fddp.analysis.tuning.for_target import on_target
from fddp.analysis.workload import find_workload
from fddp.schedules import Timeline

PAGE = ROOT / "bench" / "README.md"
MODELS = ("mlp:1024:256", "scanned:360m:2", "bert:base:32", "gpt:360m:2", "resnet:50:32")
TARGETS = ("h100:8", "h100:2x8", "a100:8", "a100:2x8", "a100:4x8")
DEFAULT = "schedule='fused', bucket_cap_mb=25"
PLAIN = (JIT, SHARD_MAP)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", default=MODELS, help="module:preset:rows of a replica"
    )
    parser.add_argument("--targets", nargs="+", default=TARGETS, help="as of python -m fddp audit")
    parser.add_argument("--again", action="store_true", help="compile what is saved, too")
    parser.add_argument(
        "--first", action="store_true", help="of fddp's schedules and caps the default alone"
    )
    parser.add_argument("--page", action="store_true", help="compile nothing, write the table")
    parser.add_argument(
        "--quick", action="store_true", help="the first model and target; nothing is saved"
    )
    args = parser.parse_args()
    if args.quick:
        cell = {
            "ways": {name: ms(compile()) for name, compile in ways(args.models[0], args.targets[0])}
        }
        print("\n".join(lines({f"{jax.__version__} {args.models[0]} {args.targets[0]}": cell})))
        return
    for model in () if args.page else args.models:
        for target in args.targets:
            fill(model, target, repeat=args.again, first=args.first)
    text = sections(saved("beside"))
    print(text)
    PAGE.write_text(with_table(PAGE.read_text(), text, "bench/beside.py"))


def fill(model: str, target: str, *, repeat: bool, first: bool) -> None:
    """Compiles the missing programs of a model on a target, and saves their estimates."""
    name = f"{jax.__version__} {model} {target}"
    ms_of_way = {} if repeat else saved("beside").get(name, {"ways": {}})["ways"]
    for way, compile in ways(model, target, first=first):
        if way not in ms_of_way:
            ms_of_way[way] = ms(compile())
            print(name, way, ms_of_way[way], flush=True)
            save("beside", saved("beside") | {name: {"ways": ms_of_way}})


def ways(
    model: str, where: str, *, first: bool = False
) -> Iterator[tuple[str, Callable[[], Timeline]]]:
    """Yields the compiled programs of a model for a target: the default, plain JAX, then other
    schedules and caps."""
    name, preset, rows = model.split(":")
    target = read_target(where)
    workload = find_workload(f"models.{name}:{preset}")(int(rows), target.size, shapes=True)
    steps = on_target(*workload.forms(target.group()), target)
    step_of_task = next(steps)
    yield str(step_of_task), step_of_task.timeline
    plain = plain_steps(step_of_task.step, step_of_task.state, step_of_task.batch, target)
    for way in (name for name in plain if name + HIDING not in plain):  # which hides no less
        yield way, lambda way=way: plain[way]().timeline
    for step in () if first else steps:
        yield str(step), step.timeline


def ms(line: Timeline) -> list[float]:
    """Milliseconds of a step, of its exposed traffic, and of all of its traffic."""
    return [
        1e3 * seconds
        for seconds in (
            line.seconds,
            line.exposed,
            sum(span.seconds for span in line.communication),
        )
    ]


def sections(cells: dict[str, Any]) -> str:
    """A table for each version of JAX, as Markdown."""
    versions = sorted({name.split()[0] for name in cells})
    tables = [
        (version, lines({name: cell for name, cell in cells.items() if name.split()[0] == version}))
        for version in versions
    ]
    return "\n\n".join(f"With JAX {version}:\n\n" + "\n".join(rows) for version, rows in tables)


def lines(cells: dict[str, Any]) -> list[str]:
    """The cells that hold fddp and plain JAX, as a table in Markdown; the shortest step of a line
    is bold."""
    head = [
        "model, rows per replica",
        "target",
        "fddp",
        "choice of `fddp.tune`",
        *PLAIN,
        "tuned ÷ plain",
    ]
    rows = [
        line(name, cell["ways"])
        for name, cell in sorted(cells.items(), key=place)
        if complete(cell["ways"])
    ]
    return [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]]


def line(name: str, ways: dict[str, list[float]]) -> list[str]:
    """One model on one target."""
    _, model, target = name.split()
    module, preset, rows = model.split(":")
    fddp_ways = {way: ms_pair for way, ms_pair in ways.items() if way.startswith("schedule")}
    best = min(fddp_ways, key=lambda way: (fddp_ways[way][0], way))
    plain = [
        min(ms_pair for way, ms_pair in ways.items() if way.startswith(start)) for start in PLAIN
    ]
    columns = [fddp_ways[DEFAULT], fddp_ways[best], *plain]
    shortest = min(ms_pair[0] for ms_pair in columns)
    bold = ["**" if ms_pair[0] == shortest else "" for ms_pair in columns]
    shown = [
        f"{mark}{ms_pair[0]:.2f}{mark}, {ms_pair[1]:.2f}" for mark, ms_pair in zip(bold, columns)
    ]
    if len(fddp_ways) == 1:
        shown[1] = "not tried"
    elif best != DEFAULT:
        shown[1] += f" ({re.sub('schedule=|bucket_cap_mb=', '', best)})"
    return [
        f"{module}:{preset}, {rows}",
        target,
        *shown,
        f"{fddp_ways[best][0] / min(ms_pair[0] for ms_pair in plain):.3f}",
    ]


def complete(ways: dict[str, list[float]]) -> bool:
    """True if a cell has the default and both ways of plain JAX."""
    return DEFAULT in ways and all(any(way.startswith(start) for way in ways) for start in PLAIN)


def place(cell: tuple[str, Any]) -> tuple[int, int]:
    """The place of a cell in the table."""
    _, model, target = cell[0].split()
    return (
        MODELS.index(model) if model in MODELS else len(MODELS),
        TARGETS.index(target) if target in TARGETS else len(TARGETS),
    )


if __name__ == "__main__":
    main()
