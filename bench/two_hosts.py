"""Two hosts on one machine: network namespaces joined by a wire of a chosen rate, one core each.

Traffic on loopback is limited by the CPU; here it is limited by the wire, so that overlap can be seen and measured on
two cores. Needs root and iproute2.

    python bench/two_hosts.py --rate 1gbit -- python models/train.py gpt     # MPI, one rank on each host
    python bench/two_hosts.py --gloo -- python models/train.py gpt          # FDDP_* variables, Gloo
"""

import argparse
import atexit
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from bench.jobs import MPIEXEC, ending

NAMES = ("fddp-a", "fddp-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
NETWORK = "10.77.0.0/24"
MEETING = f"{ADDRESSES[0]}:47011"
BACKENDS = ("gloo", "mpi")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="rate of the wire, as tc writes it (default: 1gbit)")
    parser.add_argument("--gloo", action="store_true", help="start the command with FDDP_* variables, not with mpiexec")
    parser.add_argument("command", nargs="+", help="the command to run on both hosts")
    args = parser.parse_args()
    with two_hosts(args.rate):
        start = start_gloo if args.gloo else start_mpi
        with ending(start(args.command, {})) as jobs:
            sys.exit(max(job.wait() for job in jobs))


@contextmanager
def two_hosts(rate: str) -> Iterator[None]:
    """Sets the two hosts up, and takes them down whatever happens.

    Args:
      rate: of the wire in each direction, as tc writes it: "1gbit".

    Raises:
      RuntimeError: not root, or no iproute2.
    """
    if os.geteuid() != 0:
        raise RuntimeError("two hosts need network namespaces, and these need root; run as root.")
    missing = [tool for tool in ("ip", "tc", "taskset") if shutil.which(tool) is None]
    if missing:
        raise RuntimeError(f"two hosts need {', '.join(missing)}: install iproute2 (and util-linux).")
    _take_down()
    try:
        _set_up(rate)
        yield
    finally:
        _take_down()


def ask(backend: str, rate: str, script: str, *words: object, each: int = 1) -> Any:
    """Runs a script on both hosts and returns the results that rank 0 writes.

    Args:
      backend: "gloo" or "mpi".
      rate: of the wire.
      script: its last argument is the path of a file, into which rank 0 writes JSON.
      *words: its arguments before that.
      each: ranks of a host.

    Returns:
      The contents of the file.

    Raises:
      RuntimeError: the script failed on a host.
    """
    with two_hosts(rate), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "said.json"
        command = [sys.executable, script, *map(str, words), str(path)]
        start = start_mpi if backend == "mpi" else start_gloo
        with ending(start(command, {"PYTHONPATH": str(ROOT)}, each)) as jobs:
            if any(job.wait(900) for job in jobs):
                raise RuntimeError(f"{' '.join(command)} failed over {backend}; its error is above.")
        return json.loads(path.read_text())


def start_gloo(command: Sequence[str], env: Mapping[str, str], each: int = 1, **pipes: Any) -> list[subprocess.Popen]:
    """Starts a command on each host, as so many ranks of each by FDDP_* variables."""
    world = {**os.environ, "FDDP_SIZE": str(2 * each), "FDDP_COORDINATOR": MEETING, "NPROC": "2", **env}
    return [
        subprocess.Popen([*_enter(rank // each), *command], env=world | {"FDDP_RANK": str(rank)}, **pipes)
        for rank in range(2 * each)
    ]


def start_mpi(command: Sequence[str], env: Mapping[str, str], each: int = 1, **pipes: Any) -> list[subprocess.Popen]:
    """Starts a command on each host, as so many ranks of MPI, over TCP between hosts."""
    words = [MPIEXEC, "-hosts", ",".join(ADDRESSES), "-ppn", str(each), "-n", str(2 * each), *command]
    return [_from_the_first(words, env, **pipes)]


def start_run(command: Sequence[str], env: Mapping[str, str], each: int = 1, **pipes: Any) -> list[subprocess.Popen]:
    """Starts a command on each host by `python -m fddp run`; ranks that ask for Gloo know where to meet."""
    words = [sys.executable, "-m", "fddp", "run", "-n", str(2 * each), "--hosts", ",".join(ADDRESSES), "--", *command]
    return [_from_the_first(words, {"FDDP_COORDINATOR": MEETING, **env}, **pipes)]


def _from_the_first(words: Sequence[str], env: Mapping[str, str], **pipes: Any) -> subprocess.Popen:
    """Starts on the first host what starts an mpiexec there: the second reaches it over the wire."""
    folder = tempfile.mkdtemp(prefix="fddp-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    launcher = Path(folder) / "enter"
    cases = "\n".join(f'{address}) exec {" ".join(_enter(k))} sh -c "$*" ;;' for k, address in enumerate(ADDRESSES))
    # Called as ssh is: options, host, command.
    launcher.write_text(
        f'#!/bin/sh\nwhile [ "${{1#-}}" != "$1" ]; do shift; done\nhost=$1; shift\ncase $host in\n{cases}\nesac\n'
    )
    launcher.chmod(0o755)
    enters = {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": str(launcher)}
    over_tcp = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "wire", "NPROC": "2"}
    inside = ["ip", "netns", "exec", NAMES[0], *words]
    return subprocess.Popen(inside, env={**os.environ, **enters, **over_tcp, **env}, **pipes)


def _enter(host: int) -> list[str]:
    return ["ip", "netns", "exec", NAMES[host], "taskset", "-c", str(host)]


def _set_up(rate: str) -> None:
    for name, address in zip(NAMES, ADDRESSES):
        _ip("netns", "add", name)
        # A host that asks for its own name must find its end of the wire.
        hosts = Path("/etc/netns") / name / "hosts"
        hosts.parent.mkdir(parents=True, exist_ok=True)
        hosts.write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
    _ip("link", "add", "wire", "netns", NAMES[0], "type", "veth", "peer", "name", "wire", "netns", NAMES[1])
    for name, address in zip(NAMES, ADDRESSES):
        # No IPv6: for a second or two its addresses cannot be bound yet, and MPI may pick one.
        _ip("-n", name, "link", "set", "wire", "addrgenmode", "none")
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", "wire")
        _ip("-n", name, "link", "set", "wire", "up")
        _ip("-n", name, "link", "set", "lo", "up")
        # What most hosts use, whatever this machine prefers: BBR paces by timers, and these take a part of the core.
        _ip("-n", name, "route", "change", NETWORK, "dev", "wire", "src", address, "congctl", "cubic")
        shape = ["tc", "qdisc", "add", "dev", "wire", "root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
        subprocess.run(["ip", "netns", "exec", name, *shape], check=True)
    for name in NAMES:
        while b"state UP" not in subprocess.check_output(["ip", "-n", name, "link", "show", "wire"]):
            time.sleep(0.05)


def _take_down() -> None:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    for name in NAMES:
        if name in listed:
            _ip("netns", "del", name)
        shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


if __name__ == "__main__":
    main()
