"""Is a fused step ever estimated behind plain JAX, on GPUs that are not here?

    python bench/beside.py [--models gpt:360m:8 …] [--targets h100:8 …] [--quick]

Each step is compiled ahead of time for each target, and plain JAX of the same loss and optimizer beside it; the
milliseconds are those of `fddp.audit`. It writes the table of docs/performance.md, in which the best of a line is bold.
Cells that an earlier run has compiled, and this one has not, stay.

  model   module:preset:rows of a replica, of models/
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import fddp
from bench.record import RESULTS, save
from fddp.analysis.auditing.targets import read_target
from fddp.analysis.workload import read_workload
from fddp.schedules import Timeline

PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- bench/beside.py: begin -->", "<!-- bench/beside.py: end -->"
MODELS = ("mlp:1024:256", "resnet:50:32", "bert:base:32")
TARGETS = ("h100:8", "h100:2x8", "a100:8", "a100:2x8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, help="module:preset:rows of a replica")
    parser.add_argument("--targets", nargs="+", default=TARGETS, help="as of python -m fddp audit")
    parser.add_argument("--quick", action="store_true", help="the first model and target; nothing is saved")
    args = parser.parse_args()
    models, targets = (args.models[:1], args.targets[:1]) if args.quick else (args.models, args.targets)
    cells = {f"{model} {target}": cell(model, target) for model in models for target in targets}
    if args.quick:
        print(table(cells))
        return
    earlier = RESULTS / "beside.json"
    cells = (json.loads(earlier.read_text())["results"] if earlier.exists() else {}) | cells
    text = table({name: cells[name] for name in sorted(cells)})
    print(text)
    print(save("beside", cells))
    PAGE.write_text(with_table(PAGE.read_text(), text))


def cell(model: str, where: str) -> dict[str, Any]:
    """One model on one target: what each way takes, and what of its traffic is exposed."""
    name, preset, rows = model.split(":")
    target = read_target(where)
    workload = read_workload(f"models.{name}:{preset}", int(rows) * target.size)
    step, state = workload.step(target.group())
    audit = fddp.audit(step, state, workload.batch, where, beside="jit")
    ways = {"fddp": audit.timeline, **{plain.way: plain.timeline for plain in audit.beside}}
    found = {"model": model, "target": where, "ways": {way: _ms(line) for way, line in ways.items() if line}}
    print(found, flush=True)
    return found


def table(cells: dict[str, dict[str, Any]]) -> str:
    """The cells as Markdown; of several options of one way the faster counts."""
    rows = [
        "| model, rows a replica | target | fddp | jit with NamedSharding | shard_map, a pmean for each leaf |",
        "|---|---|---|---|---|",
    ]
    for one in cells.values():
        ways = one["ways"]
        best = [min(took for way, took in ways.items() if way.startswith(start)) for start in ("fddp", "jit", "shard")]
        bold = ["**" if ms == min(best)[0] else "" for ms, _ in best]
        shown = [f"{mark}{ms:.2f}{mark}, {exposed:.2f}" for mark, (ms, exposed) in zip(bold, best)]
        name, preset, count = one["model"].split(":")
        rows.append(f"| {name}:{preset}, {count} | {one['target']} | {' | '.join(shown)} |")
    return "\n".join(rows)


def with_table(page: str, text: str) -> str:
    """A page with another table between the two marks."""
    return re.sub(rf"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n\n{text}\n\n{END}", page, flags=re.DOTALL)


def _ms(line: Timeline) -> tuple[float, float]:
    return 1e3 * line.seconds, 1e3 * line.exposed


if __name__ == "__main__":
    main()
