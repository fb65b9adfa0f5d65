"""What does it cost a step that its job survives the loss of a rank?

    python bench/elastic_cost.py [--quick]

Two hosts (`two_hosts.py`), Gloo, an elastic job. The same staged step in turn by itself, with its
state donated, and by `fddp.elastic.Trainer`, which preserves the state before each step; also the
share of a core that the threads of the membership take.
"""

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import optax

sys.path.insert(0, str(Path(__file__).parents[1]))
import fddp
from bench.problems import problem
from bench.record import interleave, ratio, save, summary
from bench.two_hosts import ask

ROUNDS = 40


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problem", default="mlp640", help="of bench/problems.py")
    parser.add_argument("--quick", action="store_true", help="few rounds; nothing is saved")
    parser.add_argument("--rank", nargs=3, metavar="WORD", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        name, rounds, path = args.rank
        measure(name, int(rounds), Path(path))
        return
    rounds = 4 if args.quick else ROUNDS
    result = ask("gloo", "1gbit", __file__, "--rank", args.problem, rounds)
    time_of = result["trainer / step"]
    print(
        f"{args.problem}: {time_of['median']:.3f} of the step's time "
        f"({time_of['quartile_1']:.3f} … {time_of['quartile_3']:.3f}), "
        f"{result['nbytes'] / 2**20:.0f} MiB, {100 * result['core']:.2f} % of a core"
    )
    if not args.quick:
        print(save(f"elastic_cost_{args.problem}", {"rounds": rounds, **result}))


def measure(name: str, rounds: int, path: Path) -> None:
    """One rank."""
    group = fddp.init(elastic=True)
    workload = problem(name, group.rank)
    options: Any = {"has_aux": True, "schedule": "staged"}

    def make(group: fddp.Group) -> fddp.TrainStep:
        return fddp.train_step(workload.loss_fn, optax.adam(1e-3), group=group, **options)

    step = make(group)
    state = step.init(workload.params, model_state=workload.model_state)
    trainer = fddp.elastic.Trainer(make, workload.params, model_state=workload.model_state)

    def plain() -> Any:
        nonlocal state
        state, info = step(state, workload.batch)
        return info.loss, state

    begin, cpu_s = time.monotonic(), cpu_of_membership()
    seconds = interleave(
        {"step": plain, "trainer": lambda: trainer.step(workload.batch)},
        rounds=rounds,
        pause=group.barrier,
    )
    if group.rank == 0:
        core = (cpu_of_membership() - cpu_s) / (time.monotonic() - begin)
        result = {
            **{key: summary(values) for key, values in seconds.items()},
            "trainer / step": ratio(seconds["trainer"], seconds["step"]),
            "nbytes": trainer.stats().nbytes,
            "core": core,
        }
        path.write_text(json.dumps(result))
    jax.block_until_ready(state)
    group.barrier()


def cpu_of_membership() -> float:
    """Seconds of CPU of the threads that read connections and send signs of life."""
    ticks = 0
    for thread in threading.enumerate():
        if thread.name.startswith(("fddp-beat", "fddp-member")):
            words = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().split(")")[1]
            ticks += sum(map(int, words.split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
