"""Which ranks of an elastic job go on when the wire between its two hosts is cut for ever?

    python bench/split.py [--count 5] [--quick]

Ranks on two hosts (`two_hosts.py`) train a tiny network over Gloo with a stall of two seconds. The
wire is pulled, or swallows all packets. The larger side must go on, the other one end; of two
equal halves none goes on, or with `FDDP_TIE=1` the one with the first rank. The results are each
rank's exit code, the seconds until it has done 30 further steps or ended, and its group.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.jobs import ending
from bench.record import save
from bench.two_hosts import NAMES, ROOT, TWO, two_hosts
from fddp.runtime.watching import poll

CUTS = {"pulled": "ip link set wire down", "silent": "tc qdisc replace dev wire root bfifo limit 1"}
STALL_S = 2.0
LIMIT_S = 60.0
STEPS = 60  # before the cut
FURTHER = 30

# Ranks on the first host, on the second one, FDDP_TIE, and the ranks that go on.
SPLITS = ((2, 1, "0", [0, 1]), (1, 2, "0", [1, 2]), (2, 2, "0", []), (2, 2, "1", [0, 1]))


@dataclass(frozen=True)
class Trial:
    """The outcome of a job after its wire was cut."""

    split: tuple[int, int]
    tie: str
    cut: str
    goes_on: list[int]
    """The ranks that should go on."""
    codes: list[int | None]
    """The ranks' exit codes; None: still running at the limit."""
    seconds: list[float]
    groups: list[str]
    """The words of a rank that has gone on: the number of its group, and its ranks."""

    @property
    def right(self) -> bool:
        expected = [0 if rank in self.goes_on else 1 for rank in range(sum(self.split))]
        told = {words for words in self.groups if words}
        return self.codes == expected and told == ({f"2 {self.goes_on}"} if self.goes_on else set())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=5, help="cuts of each kind (default 5)")
    parser.add_argument("--quick", action="store_true", help="one of each; nothing is saved")
    parser.add_argument("--rank", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        train(Path(args.rank))
        return
    results = list[Trial]()
    for (first, second, tie, goes_on), cut in product(SPLITS, CUTS):
        count = 1 if args.quick else args.count
        trials = [tried((first, second), tie, cut, goes_on) for _ in range(count)]
        results += trials
        good = sum(trial.right for trial in trials)
        print(
            f"{first} and {second} ranks, FDDP_TIE={tie}, {cut:<7} {good} of {count} right; the "
            f"last rank after {max(max(trial.seconds) for trial in trials):.1f} s",
            *[trial for trial in trials if not trial.right],
            sep="\n",
            flush=True,
        )
    if not args.quick:
        print(save("split", {"stall_s": STALL_S, "jobs": [asdict(trial) for trial in results]}))


def tried(split: tuple[int, int], tie: str, cut: str, goes_on: list[int]) -> Trial:
    """Cuts the wire of a job, and observes its ranks."""
    size = sum(split)
    with two_hosts("1gbit"), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
            "FDDP_SIZE": str(size),
            "FDDP_COORDINATOR": TWO.meeting,
            "FDDP_TIE": tie,
        }
        quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        host_of = [NAMES[0]] * split[0] + [NAMES[1]] * split[1]
        command = [sys.executable, __file__, "--rank", name]
        jobs = [
            subprocess.Popen(
                ["ip", "netns", "exec", host, *command], env=env | {"FDDP_RANK": str(k)}, **quiet
            )
            for k, host in enumerate(host_of)
        ]
        with ending(jobs):
            poll(lambda: (folder / "trains").exists(), LIMIT_S)
            for host in NAMES:
                subprocess.run(["ip", "netns", "exec", host, *CUTS[cut].split()], check=True)
            at = time.monotonic()
            gone = dict[int, float]()

            def observe() -> bool:
                for rank, job in enumerate(jobs):
                    if job.poll() is not None:
                        gone.setdefault(rank, round(time.monotonic() - at, 2))
                return len(gone) == size

            poll(observe, LIMIT_S)
            codes = [job.poll() for job in jobs]
        words = [folder / f"group_{rank}" for rank in range(size)]
        groups = [file.read_text() if file.exists() else "" for file in words]
    seconds = [gone.get(rank, LIMIT_S) for rank in range(size)]
    return Trial(split, tie, cut, goes_on, codes, seconds, groups)


def train(folder: Path) -> None:
    """One rank: trains until its group has changed, and some steps further."""
    import jax.numpy as jnp
    import optax

    import fddp

    fddp.init(elastic=True, stall_s=STALL_S)
    loss = lambda w, x: jnp.mean((x @ w - 1) ** 2)  # noqa: E731
    trainer = fddp.elastic.Trainer(
        lambda group: fddp.train_step(loss, optax.adam(0.01), group=group, schedule="staged"),
        np.zeros((64, 64), np.float32),
    )
    last = None
    while last is None or trainer.number < last:
        trainer.step(np.ones((4, 64), np.float32))
        time.sleep(0.02)
        stats = trainer.stats()
        if trainer.number == STEPS:
            (folder / "trains").touch()
        if stats.group > 1 and last is None:
            last = trainer.number + FURTHER
    group = f"{trainer.stats().group} {list(trainer.stats().ranks)}"
    (folder / f"group_{os.environ['FDDP_RANK']}").write_text(group)


if __name__ == "__main__":
    main()
