"""Two hosts on one machine: network namespaces joined by a wire of a chosen rate, one core each.

Traffic on loopback is limited by the CPU; here it is limited by the wire, so that overlap can be
seen and measured on two cores. Needs root and iproute2.

    # MPI, one rank on each host
    python bench/two_hosts.py --rate 1gbit -- python models/train.py gpt
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
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from bench.jobs import MPIEXEC, ending


class Hosts(NamedTuple):
    """Emulated hosts of one network of 256 addresses."""

    names: tuple[str, ...]
    """The names of the namespaces."""
    addresses: tuple[str, ...]

    @property
    def meeting(self) -> str:
        """The address at which ranks over Gloo meet."""
        return f"{self.addresses[0]}:47011"


NAMES = ("fddp-a", "fddp-b")
TWO = Hosts(NAMES, ("10.77.0.1", "10.77.0.2"))
BURST = "256kb"  # passes at once when the wire was idle
BACKENDS = ("gloo", "mpi")


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--rate", default="1gbit", help="rate of the wire, as tc writes it")
    parser.add_argument("--gloo", action="store_true", help="FDDP_* variables in place of mpiexec")
    parser.add_argument("command", nargs="+", help="the command to run on both hosts")
    args = parser.parse_args()
    with two_hosts(args.rate):
        start = start_gloo if args.gloo else start_mpi
        with ending(start(args.command, {})) as jobs:
            sys.exit(max(job.wait() for job in jobs))


@contextmanager
def two_hosts(rate: str) -> Iterator[None]:
    """Sets the two hosts up, and takes them down whatever happens; the rate is that of the wire in
    each direction, as tc writes it."""
    with namespaces(TWO.names):
        first, second = TWO.names
        ip(f"link add wire netns {first} type veth peer name wire netns {second}")
        connect(TWO, rate)
        yield


@contextmanager
def namespaces(names: Sequence[str]) -> Iterator[None]:
    """Makes network namespaces in place of those of the same names, and removes them whatever
    happens."""
    if os.geteuid() != 0:
        raise RuntimeError("emulated hosts need network namespaces; run as root.")
    missing = [tool for tool in ("ip", "tc", "taskset") if shutil.which(tool) is None]
    if missing:
        raise RuntimeError(f"emulated hosts need {', '.join(missing)}: install iproute2.")
    _remove(names)
    try:
        for name in names:
            ip(f"netns add {name}")
        yield
    finally:
        _remove(names)


def connect(hosts: Hosts, rate: str, burst: str = BURST) -> None:
    """Brings up each host's end of its wire, an interface of the name "wire", and waits until all
    are up."""
    for name, address in zip(hosts.names, hosts.addresses):
        # A host that asks for its own name must find its end of the wire.
        file = Path("/etc/netns") / name / "hosts"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
        # No IPv6: for a second or two its addresses cannot be bound yet, and MPI may pick one.
        ip(f"-n {name} link set wire addrgenmode none")
        ip(f"-n {name} addr add {address}/24 dev wire")
        ip(f"-n {name} link set wire up")
        ip(f"-n {name} link set lo up")
        # The algorithm of most hosts, not that of this machine: BBR paces by timers, which use a
        # part of the core.
        network = f"{address.rpartition('.')[0]}.0/24"
        ip(f"-n {name} route change {network} dev wire src {address} congctl cubic")
        shape(name, "wire", rate, burst)
    for name in hosts.names:
        show = f"ip -n {name} link show wire".split()
        while b"state UP" not in subprocess.check_output(show):
            time.sleep(0.05)


def shape(name: str, device: str, rate: str, burst: str) -> None:
    """Limits the rate of a device."""
    limit = f"root tbf rate {rate} burst {burst} latency 50ms"
    ip(f"netns exec {name} tc qdisc add dev {device} {limit}")


def ip(words: str) -> None:
    """Runs iproute2's `ip`."""
    subprocess.run(["ip", *words.split()], check=True)


def ask(backend: str, rate: str, script: str, *words: object, each: int = 1) -> Any:
    """Runs a script on both hosts, and returns what rank 0 writes as JSON into the file whose path
    is the script's last argument."""
    with two_hosts(rate), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "said.json"
        command = [sys.executable, script, *map(str, words), str(path)]
        start = start_mpi if backend == "mpi" else start_gloo
        with ending(start(command, {"PYTHONPATH": str(ROOT)}, each)) as jobs:
            if any(job.wait(900) for job in jobs):
                raise RuntimeError(
                    f"{' '.join(command)} failed over {backend}; its error is above."
                )
        return json.loads(path.read_text())


def start_gloo(
    command: Sequence[str], env: Mapping[str, str], each: int = 1, hosts: Hosts = TWO, **pipes: Any
) -> list[subprocess.Popen]:
    """Starts a command on each host, as so many ranks of each by FDDP_* variables."""
    size = len(hosts.names) * each
    world = {
        **os.environ,
        "FDDP_SIZE": str(size),
        "FDDP_COORDINATOR": hosts.meeting,
        "NPROC": "2",
        **env,
    }
    return [
        subprocess.Popen(
            [*_enter(hosts, rank // each), *command], env=world | {"FDDP_RANK": str(rank)}, **pipes
        )
        for rank in range(size)
    ]


def start_mpi(
    command: Sequence[str], env: Mapping[str, str], each: int = 1, hosts: Hosts = TWO, **pipes: Any
) -> list[subprocess.Popen]:
    """Starts a command on each host, as so many ranks of MPI, over TCP between hosts."""
    size = str(len(hosts.names) * each)
    words = [MPIEXEC, "-hosts", ",".join(hosts.addresses), "-ppn", str(each), "-n", size, *command]
    return [_from_the_first(hosts, words, env, **pipes)]


def _from_the_first(
    hosts: Hosts, words: Sequence[str], env: Mapping[str, str], **pipes: Any
) -> subprocess.Popen:
    """Starts mpiexec's launcher on the first host: it reaches the others over the wire."""
    folder = tempfile.mkdtemp(prefix="fddp-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    launcher = Path(folder) / "enter"
    entered = [
        f'{address}) exec {" ".join(_enter(hosts, k))} sh -c "$*" ;;'
        for k, address in enumerate(hosts.addresses)
    ]
    cases = "\n".join(entered)
    # Called as ssh is: options, host, command.
    launcher.write_text(
        '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\n'
        f"host=$1; shift\ncase $host in\n{cases}\nesac\n"
    )
    launcher.chmod(0o755)
    enters = {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": str(launcher)}
    over_tcp = {
        "MPIR_CVAR_CH4_NETMOD": "ofi",
        "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": "wire",
        "NPROC": "2",
    }
    # Here too on one core: mpiexec starts the ranks of its own host itself, and not by the
    # launcher.
    return subprocess.Popen(
        [*_enter(hosts, 0), *words], env={**os.environ, **enters, **over_tcp, **env}, **pipes
    )


def _enter(hosts: Hosts, host: int) -> list[str]:
    """The words that run a command on a host, and on one core."""
    core = host % (os.cpu_count() or 1)
    return f"ip netns exec {hosts.names[host]} taskset -c {core}".split()


def _remove(names: Sequence[str]) -> None:
    listed = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout
    existing = {line.split()[0] for line in listed.splitlines() if line}
    for name in names:
        if name in existing:
            ip(f"netns del {name}")
        shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


if __name__ == "__main__":
    main()
