"""`python -m fddp run`: ranks that fail end all, and training goes on from the last checkpoint with
the same bits."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from processes import TESTS, UNOPTIMIZED, WORKERS, launch

from fddp.__main__ import main
from fddp.runtime import cores_for
from fddp.runtime.commands import read_command
from fddp.runtime.mpi_vendors import launchers
from fddp.runtime.replacing import supervise_ranks
from fddp.runtime.supervisor import Job, supervise

PYTHON = (sys.executable, "-c")
ENV = {
    "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}",
    "JAX_PLATFORMS": "cpu",
    "FDDP_GRACE_S": "1",
    **UNOPTIMIZED,
}


def run(*words: str, timeout_s: float = 300, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `python -m fddp run WORDS`; its output is shown if the test fails."""
    command = [sys.executable, "-m", "fddp", "run", *words]
    completed = subprocess.run(
        command, env=os.environ | ENV | env, capture_output=True, text=True, timeout=timeout_s
    )
    print(completed.stdout, completed.stderr)
    return completed


def end_of_ranks(
    capfd: pytest.CaptureFixture[str], script: str, **job: Any
) -> tuple[int, str, str]:
    """The end of ranks that run a script of plain Python; the script knows its `rank`."""
    code = supervise(
        Job(
            [
                *PYTHON,
                f"import os, sys, time; rank = int(os.environ.get('FDDP_RANK', 0)); {script}",
            ],
            **job,
        )
    )
    out, err = capfd.readouterr()
    return code, out, err


### Processes of our own, without JAX


def test_lines_have_their_rank_in_front_and_success_is_0(capfd: pytest.CaptureFixture[str]):
    code, out, err = end_of_ranks(
        capfd, "print('out'); print(os.environ['FDDP_SIZE'], file=sys.stderr)", ranks=2
    )
    assert code == 0
    assert sorted(out.splitlines()) == ["[0] out", "[1] out"]
    assert sorted(err.splitlines()) == ["[0] 2", "[1] 2"]


def test_a_progress_bar_is_shown_as_it_grows_and_a_long_line_in_pieces(
    capfd: pytest.CaptureFixture[str],
):
    bar = "[print(f'{k} %', end='\\r', flush=True) for k in (10, 20)]"
    assert end_of_ranks(capfd, bar, ranks=1) == (0, "10 %\r20 %\r", "")
    code, out, _ = end_of_ranks(capfd, "print('x' * 300_000)", ranks=2)
    assert code == 0 and out.count("x") == 600_000 and out.count("[") > 2


@pytest.mark.ranks
def test_ranks_go_on_when_nothing_takes_their_output(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        f"for k in range(1000): print('x' * 100)\nopen({str(tmp_path / 'end')!r}, 'w')"
    )
    run = f"{sys.executable} -m fddp run --by processes -n 1 {script}"
    for redirection, words in (
        ("> /dev/full", "No space left on device"),
        (">&-", ""),
        ("| true", ""),
    ):
        completed = subprocess.run(
            f"{run} {redirection}", shell=True, env=os.environ | ENV, capture_output=True, text=True
        )
        assert completed.returncode == 0 and words in completed.stderr, completed.stderr
        (tmp_path / "end").unlink()


def impatient(script: Path, *words: str) -> subprocess.Popen[bytes]:
    """Starts `fddp run` of one rank, with half a second for the rest of its output."""
    words = ("run", *words, "--by", "processes", "-n", "1", str(script))
    patched = (
        # A shell starts a command in the background with SIGINT ignored.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from fddp.__main__ import main; from fddp.runtime import replacing, supervisor; "
        f"replacing.END_S = supervisor.END_S = 0.5; raise SystemExit(main({words}))"
    )
    return subprocess.Popen(
        [*PYTHON, patched], env=os.environ | ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.ranks
@pytest.mark.parametrize("words", [(), ("--elastic",)], ids=["together", "elastic"])
def test_a_slow_reader_receives_all_output_after_the_end_of_the_ranks(
    words: tuple[str, ...], tmp_path: Path
):
    script = tmp_path / "script.py"
    script.write_text("for k in range(10_000): print('line', k)")
    with impatient(script, *words) as job:
        assert job.stdout and job.stderr and job.stdout.readline().endswith(b"line 0\n")
        time.sleep(3)
        out, err = job.stdout.read(), job.stderr.read()
    assert (job.returncode, err, out.count(b"\n")) == (0, b"", 9_999)


@pytest.mark.ranks
def test_a_process_that_outlives_its_rank_and_prints_does_not_delay_the_end(tmp_path: Path):
    script = tmp_path / "script.py"
    prints = "for k in $(seq 80); do echo alive; sleep 0.1; done"
    script.write_text(
        f"import subprocess; subprocess.Popen({prints!r}, shell=True, start_new_session=True)"
    )
    with impatient(script) as job:
        out, _ = job.communicate(timeout=60)
    assert job.returncode == 0 and out.count(b"alive") < 60


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 5), (signal.SIGINT, 128 + 9)], ids=["TERM", "INT"]
)
def test_a_rank_of_an_elastic_job_has_unlimited_time_after_sigterm_alone(
    number: int, code: int, tmp_path: Path
):
    script = tmp_path / "script.py"
    script.write_text(
        f"import signal, sys, time\nsaves = []\n"
        f"signal.signal({int(number)}, lambda *_: saves.append(1))\n"
        "print('trains', flush=True)\n"
        "until = time.monotonic() + 60\n"
        "while not saves and time.monotonic() < until: time.sleep(0.05)\n"
        "time.sleep(5)\nsys.exit(5)"
    )
    with impatient(script, "--elastic") as job:
        assert job.stdout and job.stderr and job.stdout.readline() == b"[0] trains\n"
        job.send_signal(number)
        err = job.stderr.read().decode()
    assert job.returncode == code and "Traceback" not in err, err


@pytest.mark.ranks
def test_no_rank_outlives_fddp_run_though_it_is_killed(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        f"import os, time\nopen(f'{tmp_path}/rank{{os.getpid()}}', 'w').close()\ntime.sleep(600)"
    )
    words = [sys.executable, "-m", "fddp", "run", "-n", "2", "--by", "processes", str(script)]
    with subprocess.Popen(words, env=os.environ | ENV, stderr=subprocess.PIPE) as launcher:
        until = time.monotonic() + 60
        while len(ranks := list(tmp_path.glob("rank*"))) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        launcher.kill()
    assert len(ranks) == 2
    while alive := [
        rank for rank in ranks if Path("/proc", rank.name.removeprefix("rank")).exists()
    ]:
        assert time.monotonic() < until, alive
        time.sleep(0.05)


def test_a_command_that_is_not_there_is_refused():
    completed = run("-n", "2", "--by", "processes", "--", "no-such-command")
    assert (
        completed.returncode == 2
        and "there is no command 'no-such-command' here" in completed.stderr
    )


def test_a_folder_is_no_command(tmp_path: Path):
    with pytest.raises(ValueError, match=r"is a folder: give a script in it, such as train\.py"):
        read_command([str(tmp_path)], module=False)


@pytest.mark.ranks
@pytest.mark.parametrize("code", [0, 3])
def test_a_parent_that_ignores_sigchld_hides_no_exit_code(code: int):
    ignoring = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
    command = "os.execv(sys.executable, [sys.executable, '-m', 'fddp', *sys.argv[1:]])"
    words = ["run", "-n", "2", "--by", "processes", "--", *PYTHON, f"raise SystemExit({code})"]
    completed = subprocess.run(
        [*PYTHON, ignoring + command, *words], env=os.environ | ENV, capture_output=True, timeout=60
    )
    assert completed.returncode == code, completed.stderr


@pytest.mark.ranks
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT])
def test_signals_of_schedulers_reach_the_ranks(number: signal.Signals):
    waits = (
        f"import signal, sys; signal.signal({number}, lambda *_: sys.exit(print('saved'))); "
        "print('ready', flush=True); signal.pause()"
    )
    # A shell starts a command in the background with SIGQUIT ignored.
    heeding = (
        f"import os, signal, sys; signal.signal({number}, signal.SIG_DFL); "
        "os.execv(sys.executable, [sys.executable, '-m', 'fddp', *sys.argv[1:]])"
    )
    words = [*PYTHON, heeding, "run", "-n", "2", "--by", "processes", "--", *PYTHON, waits]
    with subprocess.Popen(words, env=os.environ | ENV, stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        ready = {job.stdout.readline() for _ in range(2)}
        job.send_signal(number)
        printed, _ = job.communicate(timeout=60)
    assert {*printed.splitlines()} == {b"[0] saved", b"[1] saved"}
    assert ready == {b"[0] ready\n", b"[1] ready\n"} and job.returncode == 0


def test_last_lines_of_two_ranks_without_an_end_are_two_lines(capfd: pytest.CaptureFixture[str]):
    code, out, _ = end_of_ranks(capfd, "print('last', end='')", ranks=2)
    assert code == 0 and sorted(out.splitlines()) == ["[0] last", "[1] last"]


def test_a_script_or_a_module_runs_under_this_python_and_any_command_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """torchrun's form; the words after the script are its own, those of `run` included."""
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.executable, *sys.argv[1:])")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    by = ["run", "-n", "2", "--by", "processes"]

    def shown(*words: str) -> list[str]:
        assert main([*by, *words]) == 0
        return sorted(capfd.readouterr().out.splitlines())

    lines = [f"[{rank}] {sys.executable} --restarts 2 -n 3" for rank in range(2)]
    for words in ([str(script)], ["--", sys.executable, str(script)], ["-m", "script"]):
        assert shown(*words, "--restarts", "2", "-n", "3") == lines
    assert shown("echo", "as it is") == ["[0] as it is", "[1] as it is"]
    assert main(by) == 2
    assert "run: give a script, such as train.py" in capfd.readouterr().err


@pytest.mark.ranks
def test_lines_that_ranks_write_in_pieces_stay_whole_under_mpiexec(
    capfd: pytest.CaptureFixture[str],
):
    write = (
        "rank = os.environ['PMI_RANK']; [(os.write(1, text), time.sleep(0.05)) for text in pieces]"
    )
    mpich = next(launchers("MPICH"), None)
    pieces = "pieces = [b'10 s ', b'so far', b'\\n', b'loss [1] 0.5\\nend ', b'without a newline']"
    code, out, _ = end_of_ranks(capfd, f"{pieces}; {write}", ranks=2, mpiexec=mpich)
    by_rank = ("10 s so far", "end without a newline", "loss [1] 0.5")
    lines = [f"[{rank}] {line}" for rank in range(2) for line in by_rank]
    assert (code, sorted(out.replace("newline[", "newline\n[").splitlines())) == (0, lines)


@pytest.mark.ranks
def test_ranks_under_mpiexec_share_a_secret_and_have_their_own_cores(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("FDDP_SECRET", raising=False)
    monkeypatch.delenv("HYDRA_BINDING", raising=False)
    shows = "print(os.environ['FDDP_SECRET'], *os.sched_getaffinity(0))"
    mpich = next(launchers("MPICH"), None)
    code, out, _ = end_of_ranks(capfd, shows, ranks=2, mpiexec=mpich)
    (_, first, *cores), (_, second, *others) = map(str.split, out.splitlines())
    assert code == 0 and first == second and len(first) == 32
    usable = {str(core) for core in os.sched_getaffinity(0)}
    if (share := cores_for(2)) == 0:  # a core, or not all of the host's
        assert {*cores} == {*others} == usable
    else:
        assert len(cores) == len(others) == share and not {*cores} & {*others}


@pytest.mark.parametrize(
    ("cores", "usable", "ranks", "share"), [(8, 8, 2, 4), (8, 8, 3, 2), (2, 2, 3, 0), (8, 4, 2, 0)]
)
def test_ranks_share_the_cores_of_a_host_that_is_theirs_alone(
    monkeypatch: pytest.MonkeyPatch, cores: int, usable: int, ranks: int, share: int
):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(usable)))
    assert cores_for(ranks) == share


def test_greetings_of_gloo_are_not_shown(capfd: pytest.CaptureFixture[str]):
    greets = (
        "print('[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer "
        "ranks is : 1')"
    )
    assert end_of_ranks(capfd, f"{greets}; print('trained')", ranks=1) == (0, "trained\n", "")


def test_one_rank_is_shown_as_it_is(capfd: pytest.CaptureFixture[str]):
    assert end_of_ranks(capfd, "print('out')", ranks=1) == (0, "out\n", "")


def test_the_first_fault_is_named_and_is_the_exit_code_and_ends_the_others(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr("fddp.runtime.supervisor.END_S", 0.5)
    goes_on = tmp_path / "rank 0 goes on"
    rank_0 = f"(time.sleep(600), open({str(goes_on)!r}, 'w')) if rank == 0"
    code, _, err = end_of_ranks(capfd, f"{rank_0} else sys.exit(7)", ranks=2)
    assert (code, err) == (7, "fddp run: rank 1 ended with exit code 7.\n")
    code, _, err = end_of_ranks(capfd, f"{rank_0} else os.kill(os.getpid(), 9)", ranks=2)
    assert (code, err) == (128 + 9, "fddp run: rank 1 ended by SIGKILL.\n")
    assert not goes_on.exists()


@pytest.mark.parametrize("vendor", ["MPICH", "Open MPI"])
def test_a_rank_of_an_elastic_job_starts_again_on_its_host(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], vendor: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fddp.runtime.replacing.PAUSE_S", 0.0)
    mpiexec = tmp_path / "mpiexec"
    mpiexec.write_text(
        '#!/bin/sh\necho "$FDDP_RANK" "$@"\n'
        f"[ $FDDP_RANK = 1 ] && {{ mkdir {tmp_path}/first && exit 1; touch {tmp_path}/again; }}\n"
        f"until [ -e {tmp_path}/again ]; do sleep 0.1; done\n"
    )
    mpiexec.chmod(0o755)
    job = Job(["train"], 2, hosts=("a", "b"), restarts=9, mpiexec=(str(mpiexec), vendor))
    assert supervise_ranks(job) == 0
    out, err = capfd.readouterr()
    hosts = {"MPICH": "-hosts {} -ppn 1 train", "Open MPI": "--host {}:1 train"}[vendor]
    starts = [line for line in out.splitlines() if line.startswith("[1]")]
    assert len(starts) == 2 and all(line.endswith(hosts.format("b")) for line in starts)
    assert ("-x FDDP_RANK" in out) == (vendor == "Open MPI")
    assert "rank 1 ended with exit code 1: it starts again" in err


@pytest.mark.parametrize("end", ["sys.exit(3)", "os.abort()"])
def test_a_rank_of_an_elastic_job_that_fails_at_once_starts_three_times(
    end: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fddp.runtime.replacing.PAUSE_S", 0.0)
    script = f"import os, sys, time; (time.sleep(2) if os.environ['FDDP_RANK'] == '0' else {end})"
    assert supervise_ranks(Job([*PYTHON, script], 2, restarts=9)) == 0
    err = capfd.readouterr().err
    assert "soon after 3 starts, and is not started again" in err and "restart 3" not in err


def test_a_rank_of_an_elastic_job_that_is_stopped_while_it_exits_is_ended(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fddp.runtime.replacing.END_S", 0.5)
    script = "import os; os.environ['FDDP_RANK'] == '0' or os.kill(os.getpid(), 19)"  # SIGSTOP
    assert supervise_ranks(Job([*PYTHON, script], 2, restarts=9)) == 0
    assert "rank 1 ended by SIGKILL." in capfd.readouterr().err


def test_an_elastic_job_ends_when_no_rank_with_the_state_is_left(
    capfd: pytest.CaptureFixture[str],
):
    script = (
        "import json, os, pathlib, sys, time\n"
        "if os.environ['FDDP_RANK'] == '1': time.sleep(600)\n"
        "members = [[0, f'0-{os.getpid()}-a', ['127.0.0.1', 1]]]\n"
        "pathlib.Path(os.environ['FDDP_ELASTIC'], 'members.json').write_text(json.dumps(members))\n"
        "sys.exit(3)"
    )
    assert supervise_ranks(Job([*PYTHON, script], 2, restarts=9)) == 3
    assert "no rank with the state of the training is left" in capfd.readouterr().err


@pytest.mark.steps
def test_an_mpiexec_that_stays_though_its_watchers_have_ended_the_job_is_ended(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """It waits for ranks behind a cut wire."""
    monkeypatch.setattr("fddp.runtime.supervisor.END_S", 0.5)
    stays = tmp_path / "mpiexec"
    stays.write_text('#!/bin/sh\nshift 4\n"$@"\nexec sleep $LONG\n')
    stays.chmod(0o755)
    script_text = (
        "print('fddp: `python -m fddp flight /tmp/x` shows the last messages of each rank.')"
    )
    monkeypatch.setenv("LONG", "600")
    code, _, err = end_of_ranks(capfd, script_text, ranks=1, mpiexec=(str(stays), None))
    assert (code, err) == (128 + 15, "fddp run: the job ended by SIGTERM.\n")
    # A job with ranks that have ended well has unlimited time.
    monkeypatch.setenv("LONG", "3")
    assert end_of_ranks(capfd, "print('done')", ranks=1, mpiexec=(str(stays), None)) == (
        0,
        "done\n",
        "",
    )


@pytest.mark.steps
def test_it_is_started_again_so_often_and_no_more(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr("fddp.runtime.supervisor.PAUSE_S", 0.0)
    script = f"path = '{tmp_path}/' + str(time.time()); open(path, 'w').close(); sys.exit(3)"
    code, _, err = end_of_ranks(capfd, script, ranks=1, restarts=2)
    assert code == 3 and len(list(tmp_path.iterdir())) == 3
    assert err.splitlines() == [
        "fddp run: rank 0 ended with exit code 3: restart 1 of 2, with 1 ranks.",
        "fddp run: rank 0 ended with exit code 3: restart 2 of 2, with 1 ranks.",
        "fddp run: rank 0 ended with exit code 3, and all restarts are used up.",
    ]


def test_it_goes_on_with_the_hosts_that_answer_and_not_with_too_few(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    started = list[list[str]]()

    def failing(job: Job, hosts: list[str], *_: Any) -> tuple[int, str]:
        started.append(list(hosts))
        return 9, "rank 3 died"

    # As ssh would say it: the host b does not answer.
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\ntest $1 != b\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("HYDRA_LAUNCHER_EXEC", str(ssh))
    monkeypatch.setattr("fddp.runtime.supervisor.PAUSE_S", 0.0)
    monkeypatch.setattr("fddp.runtime.supervisor._run", failing)
    job = Job(
        ["train"], ranks=6, hosts=("a", "b", "c"), restarts=1, least=4, mpiexec=("mpiexec", "MPICH")
    )
    assert supervise(job) == 9 and started == [["a", "b", "c"], ["a", "c"]]
    assert "restart 1 of 1, with 4 ranks." in capfd.readouterr().err
    more = Job(
        ["train"], ranks=6, hosts=("a", "b", "c"), restarts=1, least=6, mpiexec=("mpiexec", "MPICH")
    )
    assert supervise(more) == 9
    assert (
        "with 4 ranks on the hosts that answer it is not started again." in capfd.readouterr().err
    )


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"ranks": 0}, "-n must be 1 or more"),
        ({"ranks": 2, "least": 3}, "--min from 1 to it, got -n 2 and --min 3"),
        ({"ranks": 2, "restarts": -1}, "--restarts must be 0 or more, got -1"),
        ({"ranks": 2, "hosts": ("a", "b")}, "--hosts needs an mpiexec"),
        (
            {"ranks": 3, "hosts": ("a", "b"), "mpiexec": ("mpiexec", None)},
            "a multiple of the 2 hosts, got 3",
        ),
        (
            {"ranks": 2, "hosts": ("a", "-oProxyCommand=x"), "mpiexec": ("mpiexec", None)},
            "got '-oProxyCommand=x'",
        ),
    ],
)
def test_what_cannot_be_started_is_refused(job: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        Job(["train"], **job)


### Trainings

SCRIPT = str(WORKERS / "resumes.py")


def supervised(
    folder: Path,
    *words: str,
    faults: tuple[str, ...] = (),
    **env: Any,
) -> tuple[Any, str]:
    """The end of a training under `run WORDS`, with ranks being killed, and its output."""
    folder.mkdir()
    completed = run(*words, "--", sys.executable, SCRIPT, str(folder), "14", *faults, **env)
    assert completed.returncode == 0
    return json.loads((folder / "end.json").read_text()), completed.stderr


def calm(folder: Path, backend: str, size: int, **env: Any) -> Any:
    """The end of the same training without a supervisor and without killed ranks."""
    folder.mkdir()
    assert launch(backend, size, SCRIPT, folder, "14", folder=folder, **env).succeeded
    return json.loads((folder / "end.json").read_text())


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("shard", "before_kill_s", "faults"),
    [
        pytest.param("", "1", ("1:6", "0:11"), id="whole", marks=pytest.mark.slow),
        pytest.param("state", "0", ("1:8", "0:12"), id="in shards that are being written"),
    ],
)
@pytest.mark.parametrize(
    ("by", "backend", "size"),
    [
        ("processes", "gloo", 2),
        pytest.param("mpiexec", "mpi", 3, marks=pytest.mark.slow),
    ],
)
def test_a_training_that_is_killed_twice_ends_with_the_bits_of_one_that_was_not(
    by: str,
    backend: str,
    size: int,
    shard: str,
    before_kill_s: str,
    faults: tuple[str, ...],
    tmp_path: Path,
):
    if by == "mpiexec" and next(launchers(None), None) is None:
        pytest.skip("there is no mpiexec: install the extra 'mpi'.")
    env: Any = {"SHARD": shard, "BEFORE_KILL_S": before_kill_s}
    words = ("--by", by, "-n", str(size), "--restarts", "2")
    killed, printed = supervised(tmp_path / "killed", *words, faults=faults, **env)
    assert printed.count("training goes on from step") == 2
    assert "restart 2 of 2" in printed
    assert killed == calm(tmp_path / "calm", backend, size, **env)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_rank_that_is_lost_for_good_costs_no_bit_where_replicas_are_virtual(tmp_path: Path):
    env: Any = {"VIRTUAL_REPLICAS": "12"}
    folder = tmp_path / "killed"
    folder.mkdir()
    by = ("--by", "processes", "-n")
    words = ("--", sys.executable, SCRIPT, str(folder), "14", "2:6")
    assert run(*by, "3", *words, **env).returncode != 0
    assert run(*by, "2", *words, **env).returncode == 0
    end = json.loads((folder / "end.json").read_text())
    assert end == calm(tmp_path / "calm", "gloo", 2, **env)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("shard", ["", "state"])
def test_who_is_told_to_end_saves_and_ends_all_well(
    shard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SHARD", shard)
    command = [
        sys.executable,
        "-m",
        "fddp",
        "run",
        "-n",
        "2",
        "--by",
        "processes",
        "--restarts",
        "3",
        "--",
    ]
    command += [sys.executable, SCRIPT, str(tmp_path), "1000000"]
    job = subprocess.Popen(command, env=os.environ | ENV, stderr=subprocess.PIPE, text=True)
    saved = tmp_path / "saved"
    until = time.monotonic() + 60
    while not (saved.exists() and any(saved.glob("*/fddp.json"))) and time.monotonic() < until:
        time.sleep(0.1)
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 0, job.communicate()
    assert "restart" not in job.communicate()[1]
