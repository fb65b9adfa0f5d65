"""Mutation testing: how many faults of one line in fddp/ does the test suite notice?

    python bench/mutants.py [--only NAME ...] [--workers 0] [--timeout 600] [--baseline] [--whole]

Each patch in tests/mutants/ makes one fault. It is applied to a fresh copy of the tracked files,
where the tests of its package run, and then those of the nearest packages, until a test fails. A
test counts only if it passes on a copy without the fault, and a timeout only if the same tests end
in time there. The command fails if a patch no longer applies, or if less than 95 % are caught. With
`--quick` it tries one mutant of a small package, and saves nothing.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
from pytest import ExitCode

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from bench.record import save, saved

PATCHES = ROOT / "tests" / "mutants"
KINDS = ("sign", "off by one", "division", "rank", "wait", "weight", "dtype", "refusal")
SHARE = 0.95  # of the mutants, which are to be caught
END_S = 10.0  # for processes to be gone that were killed
QUICK = ("buckets",)


def on_ranks(*names: str) -> tuple[str, ...]:
    """Files of claims, which tests/test_on_*_ranks.py hold on real processes."""
    return tuple(f"{CLAIMS}{name}.py" for name in names)


LANE = Path("fddp", "comm", "lane.cc")
CLAIMS = "tests/on_ranks/"
# Package → files and folders of tests that run after its own, the nearest first.
NEAREST: dict[str, tuple[str, ...]] = {
    "analysis": ("tests/test_command.py", *on_ranks("measurement")),
    "buckets": (
        *("tests/step/test_embeddings.py", "tests/step/test_dtypes.py"),
        *on_ranks("rows"),
        *("tests/step", "tests/sharding"),
    ),
    "checkpoints": (*on_ranks("checkpoints"), "tests/test_train.py"),
    "comm": (
        *on_ranks("group", "agreement", "collectives", "modules"),
        *on_ranks("one_program", "two_levels", "round_robin", "train_step"),
        *("tests/training", "tests/step/test_mesh_group.py", "tests/comm/test_two_levels.py"),
    ),
    "data": (*on_ranks("join", "evaluation"), "tests/training", "tests/step/test_buffers.py"),
    "hooks": (*on_ranks("hooks"), "tests/sharding/test_shard.py", "tests/step/test_cases.py"),
    "jax_internals": (
        *("tests/test_jax_internals.py", "tests/test_hlo.py", "tests/jaxpr"),
        "tests/step/schedules",
    ),
    "jaxpr": (
        *("tests/step/test_find_unused_parameters.py", "tests/step/test_scanned_layers.py"),
        *("tests/program/test_overlap.py", "tests/optim/test_parts.py"),
        *on_ranks("unused", "scan"),
        *("tests/step", "tests/sharding"),
    ),
    "losses": ("tests/step", "tests/data", *on_ranks("join")),
    "modules": (*on_ranks("modules"), "tests/test_models.py"),
    "optim": ("tests/training", "tests/step"),
    "program": (
        *on_ranks("one_program", "scan", "in_flight", "train_step"),
        *("tests/step/test_scanned_layers.py", "tests/analysis/test_audit.py"),
    ),
    "runtime": ("tests/test_command.py", *on_ranks("start")),
    "sharding": (*on_ranks("shard"), "tests/checkpoints", "tests/optim/test_parts.py"),
    "step": (
        *on_ranks("in_flight", "scan", "differing_programs", "train_step", "buffers", "unused"),
        *on_ranks("join", "rows"),
        *("tests/hooks/test_hook_memory.py", "tests/data", "tests/losses", "tests/sharding"),
    ),
    "training": (*on_ranks("local_steps", "virtual_replicas", "guards"), "tests/step"),
}
# Tests of this repository's files, which say nothing of the library.
OF_FILES = ("tests/test_bench.py", "tests/test_house.py")


class Mutant(NamedTuple):
    """A fault of one line, as a patch."""

    name: str
    package: str
    kind: str
    fault: str
    """The fault in a sentence."""
    patch: Path

    @property
    def module(self) -> str:
        """The name of its module."""
        (path,) = re.findall(r"^\+\+\+ b/(.+)\.(?:py|cc)$", self.patch.read_text(), re.MULTILINE)
        return Path(path).name


# Arguments by which pytest selects tests.
Tests: TypeAlias = tuple[str, ...]


class Verdict(NamedTuple):
    """The outcome of one mutant."""

    outcome: str
    """"caught", "caught by timeout", "survived" or "does not apply"."""
    by: str = ""
    """The test that failed."""
    seconds: float = 0.0

    @property
    def caught(self) -> bool:
        return self.outcome.startswith("caught")


Verdicts: TypeAlias = Mapping[str, Verdict]


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of mutants' names")
    parser.add_argument("--workers", type=int, default=0, help="processes of pytest, a file each")
    parser.add_argument("--timeout", type=float, default=600, help="seconds of one run of pytest")
    parser.add_argument("--baseline", action="store_true", help="run all tests unmutated first")
    parser.add_argument("--whole", action="store_true", help="last of all the whole default tier")
    parser.add_argument("--quick", action="store_true", help="one mutant, nothing is saved")
    args = parser.parse_args()
    mutants = read_mutants()
    chosen = [x for x in mutants if x.name.startswith(tuple(args.only))]
    if args.quick:
        chosen = [next(x for x in chosen if x.package == package) for package in QUICK]
    if not chosen:
        parser.error(f"no mutant begins with {' or '.join(args.only)}.")
    # Ends its processes, and removes copies, when this command is to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    verdicts = dict[str, Verdict]()
    with tempfile.TemporaryDirectory(prefix="fddp-mutants-") as folder:
        suite = Suite(Path(folder), args.workers, args.timeout, args.whole)
        if args.baseline:
            suite.find_broken(chosen)
        for number, mutant in enumerate(chosen, 1):
            verdicts[mutant.name] = verdict = suite.verdict(mutant)
            print(f"{number:3} of {len(chosen)}  {line(mutant, verdict)}", flush=True)
            if not args.quick:  # after each mutant: all of them take hours
                save("mutants", with_verdict(saved("mutants"), mutants, mutant, verdict))
    print(summary(chosen, verdicts, suite.broken))
    sys.exit(complaint(chosen, verdicts))


def read_mutants() -> list[Mutant]:
    """The mutants in order of their names."""
    return [_mutant(path) for path in sorted(PATCHES.glob("*.patch"))]


def _mutant(path: Path) -> Mutant:
    fault, kind, *_ = path.read_text().splitlines()
    package = path.stem.partition("-")[0]
    return Mutant(path.stem, package, kind.removeprefix("Kind: "), fault, path)


def applies(patch: Path, folder: Path, *, check: bool = False) -> bool:
    """Applies a patch to a copy of the repository, or only checks that it would apply."""
    command = ["git", "apply", *["--check"] * check, str(patch)]
    # A copy is no repository, and git must not take one above it.
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True).returncode == 0


def with_verdict(results: Any, mutants: Sequence[Mutant], mutant: Mutant, verdict: Verdict) -> Any:
    """Saved results with the verdict on one mutant; mutants that are gone are left out."""
    entry_of = {entry["name"]: entry for entry in results.get("mutants", ())}
    shown = {name: x for name, x in mutant._asdict().items() if name != "patch"}
    entry_of[mutant.name] = shown | verdict._asdict()
    entries = [entry_of[x.name] for x in mutants if x.name in entry_of]
    caught = sum(entry["outcome"].startswith("caught") for entry in entries)
    return {"caught": caught, "of": len(entries), "mutants": entries}


def line(mutant: Mutant, verdict: Verdict) -> str:
    seconds = f"{verdict.seconds:6.0f} s"
    return f"{mutant.name:<48} {verdict.outcome:<17} {seconds}  {verdict.by}".rstrip()


def summary(mutants: Sequence[Mutant], verdicts: Verdicts, broken: Sequence[str]) -> str:
    survivors = [x for x in mutants if not verdicts[x.name].caught]
    caught = f"{len(mutants) - len(survivors)} of {len(mutants)} caught"
    rows = [f"  {verdicts[x.name].outcome}: {x.name}: {x.fault}" for x in survivors]
    fails = [f"  fails without a mutant, and does not count: {test}" for test in broken]
    return "\n".join([caught, *rows, *fails])


def complaint(mutants: Sequence[Mutant], verdicts: Verdicts) -> str | None:
    """The reason why the command fails; None: it does not."""
    stale = [x.name for x in mutants if verdicts[x.name].outcome == "does not apply"]
    if stale:
        return f"does not apply any more, so write the patch again: {', '.join(stale)}"
    caught = sum(verdict.caught for verdict in verdicts.values())
    few = caught < SHARE * len(mutants)
    return f"only {caught} of {len(mutants)} mutants are caught" if few else None


### Tests


class Run(NamedTuple):
    """A run of pytest."""

    code: int | None
    """The exit code; None: pytest was ended at the timeout."""
    failed: tuple[str, ...]
    """The tests that failed."""
    words: str
    """The last line of the output."""

    @property
    def passed(self) -> bool:
        return self.code in (ExitCode.OK, ExitCode.NO_TESTS_COLLECTED)


@dataclass
class Suite:
    """The tests, which run on copies of the repository below one folder."""

    folder: Path
    workers: int
    timeout_s: float
    whole_tier: bool
    """True if the whole default tier runs where no near test fails."""
    broken: list[str] = field(default_factory=list)
    """Tests that fail without a mutant."""
    sound: dict[Tests, bool] = field(default_factory=dict)
    """True if tests come to an end in time without a mutant."""

    def verdict(self, mutant: Mutant) -> Verdict:
        """Runs tests on a copy with a mutant until one fails."""
        mutated = copied(self.folder / "mutated")
        begin = time.monotonic()
        if not applies(mutant.patch, mutated):
            return Verdict("does not apply")
        if mutant.module == LANE.stem:
            compile_lane(mutated)
        for tests in self.stages(mutant):
            while self.sound.get(tests, True):
                run = self.run(mutated, tests, "-x")
                if run.passed:
                    break
                if (verdict := self.judged(run, tests)) is not None:
                    return verdict._replace(seconds=round(time.monotonic() - begin, 1))
        return Verdict("survived", seconds=round(time.monotonic() - begin, 1))

    def stages(self, mutant: Mutant) -> Iterator[Tests]:
        """The test that caught it last, those named like the mutant's module, those of its package,
        then of the nearest ones; a file for each worker."""
        results = saved("mutants").get("mutants", ())
        yield from ((x["by"],) for x in results if x["name"] == mutant.name and "::" in x["by"])
        near = (f"fddp/{mutant.package}", f"tests/{mutant.package}", *NEAREST[mutant.package])
        words = set(mutant.module.split("_"))
        paths = sorted(
            dict.fromkeys(file for path in near for file in files_of(path)),
            key=lambda path: words.isdisjoint(Path(path).stem.split("_")),
        )
        for of_ranks, group in groupby(paths, lambda path: path.startswith(CLAIMS)):
            files = list(group)
            size = 1 if of_ranks else max(1, self.workers)
            for at in range(0, len(files), size):
                yield claims_of(files[at]) if of_ranks else tuple(files[at : at + size])
        if self.whole_tier:
            yield tuple(f"--ignore={path}" for path in OF_FILES)

    def judged(self, run: Run, tests: Tests) -> Verdict | None:
        """The verdict of a run that failed; None: it would have failed without the mutant."""
        for test in run.failed:
            if self.run(self.plain, (test,)).code == ExitCode.OK:
                return Verdict("caught", test)
            self.broken.append(test)
        if run.failed:
            return None
        if tests not in self.sound:
            self.sound[tests] = finished(self.run(self.plain, tests))
        outcome = "caught by timeout" if run.code is None else "caught"
        return Verdict(outcome, f"pytest {' '.join(tests)}") if self.sound[tests] else None

    def find_broken(self, mutants: Sequence[Mutant]) -> None:
        """Runs all tests that are chosen for some mutants, without a mutant."""
        for mutant in mutants:
            for tests in self.stages(mutant):
                if tests not in self.sound:
                    run = self.run(self.plain, tests)
                    self.broken += [test for test in run.failed if test not in self.broken]
                    self.sound[tests] = finished(run)
                    print(f"without a mutant: {' '.join(tests)}: {run.words}", flush=True)

    @property
    def plain(self) -> Path:
        """A copy without a mutant."""
        plain = self.folder / "plain"
        return plain if plain.exists() else copied(plain)

    def run(self, copy: Path, words: Sequence[str], *options: str) -> Run:
        """Runs pytest in a copy, and ends all that it leaves behind."""
        without = [f"--deselect={test}" for test in self.broken]
        # Compiled programs are kept in pytest's cache: all mutants share it.
        shared = ["-o", f"cache_dir={self.folder / 'cache'}", f"--basetemp={copy / 'tmp'}"]
        options = (*options, "-rfE", "-n", str(self.workers), *shared, *without)
        command = [sys.executable, "-m", "pytest", *options, *words]
        scratch = copy / "scratch"
        scratch.mkdir(exist_ok=True)
        log = self.folder / "log"
        env = os.environ | {"TMPDIR": str(scratch), "PYTHONPATH": str(copy)}
        with log.open("w") as out:
            pipes: Any = {"stdout": out, "stderr": subprocess.STDOUT, "start_new_session": True}
            process = subprocess.Popen(command, cwd=copy, env=env, **pipes)
        try:
            code = process.wait(self.timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_all(copy)
            process.wait()
        text = log.read_text(errors="replace")
        if code == ExitCode.USAGE_ERROR and "ERROR: not found" not in text:
            raise RuntimeError(f"pytest cannot run {' '.join(words)}:\n{text}")
        failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
        last = text.strip().rpartition("\n")[2]
        return Run(code, () if code is None else tuple(dict.fromkeys(failed)), last)


def finished(run: Run) -> bool:
    """True if pytest reached an end by itself, with tests that pass or fail."""
    return run.passed or run.code == ExitCode.TESTS_FAILED


def files_of(path: str) -> list[str]:
    """A file of tests, the files in a folder of tests, or a package with its examples."""
    inside = [str(x.relative_to(ROOT)) for x in sorted((ROOT / path).glob("test_*.py"))]
    return [] if not (ROOT / path).exists() else inside or [path]


def claims_of(path: str) -> Tests:
    """Arguments by which pytest selects the claims in a file."""
    text = (ROOT / path).read_text()
    claims = re.findall(r"^@claim\(.*?^def (\w+)", text, re.DOTALL | re.MULTILINE)
    return ("tests/test_on_mpi_ranks.py", "tests/test_on_gloo_ranks.py", "-k", " or ".join(claims))


### Copies


def copied(folder: Path) -> Path:
    """Copies the tracked files and the compiled lane, as they are in the working tree, into an
    empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in (*filter(None, listed.split("\0")), "fddp/comm/liblane.so"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def compile_lane(copy: Path) -> None:
    """Compiles the lane of a copy as `hatch_build.py` does."""
    options = "-O2", "-std=c++17", "-fPIC", "-shared", "-w", "-I", jax.ffi.include_dir()
    command = ["c++", *options, str(LANE), "-o", str(LANE.with_name("liblane.so"))]
    subprocess.run(command, cwd=copy, check=True)


def end_all(copy: Path) -> None:
    """Kills the processes that tests of a copy have started, those in other sessions too."""
    until = time.monotonic() + END_S
    while (processes := processes_of(copy)) and time.monotonic() < until:
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)


def processes_of(copy: Path) -> list[int]:
    """Processes that work in a copy, or import from it: no other process knows its path."""
    return [int(x.name) for x in Path("/proc").iterdir() if x.name.isdigit() and _knows(x, copy)]


def _knows(process: Path, copy: Path) -> bool:
    try:
        if (process / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z":
            return False
        works_there = (process / "cwd").readlink().is_relative_to(copy)
        return works_there or str(copy).encode() in (process / "environ").read_bytes()
    except OSError:  # it has ended, or belongs to another user
        return False


if __name__ == "__main__":
    main()
