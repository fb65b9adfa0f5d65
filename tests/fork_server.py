"""Starts Python scripts in 0.1 s instead of 3: forks a process that has imported JAX, optax and
fddp, and no backend.

`fork_server.py SOCKET` serves one pytest process until that process closes the connection. Each
later connection starts one script: the request comes with two open files for stdout and stderr; the
answers are the process id and, when the script has ended, its exit code. The script ends as under
`python SCRIPT`: with its own exit hooks and excepthook.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType

LONGEST_REQUEST = 1 << 20


@dataclass(frozen=True)
class Request:
    """A script, its arguments and all environment variables that it sees."""

    command: Sequence[str]
    env: dict[str, str]


@dataclass
class Forked:
    """A process that the fork server has started."""

    pid: int
    connection: socket.socket
    code: int | None = field(default=None, init=False)

    def poll(self) -> int | None:
        if self.code is None and select.select([self.connection], [], [], 0)[0]:
            self.code = int(self.connection.recv(32))
            self.connection.close()
        return self.code

    def wait(self, timeout: float) -> int:
        if self.code is None:
            select.select([self.connection], [], [], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return code

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)


# JAX sets it when it is imported; the plugin that compiles for GPUs reads it later.
SET_BY_JAX = "TF_CPP_MIN_LOG_LEVEL"


def main(path: str) -> None:
    for name in ("jax", "optax", "fddp"):
        import_module(name)
    become(wait_for_request(path))


def start(server: str, request: Request, out: int, err: int) -> Forked:
    """Requests a script of the server at this path."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(server)
    socket.send_fds(connection, [json.dumps(asdict(request)).encode()], [out, err])
    return Forked(int(connection.recv(32)), connection)


def wait_for_request(path: str) -> Request:
    """Serves requests; returns in a forked child, with its request. The server itself never
    returns."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(64)
        owner, _ = listener.accept()
        children = dict[int, tuple[int, socket.socket]]()
        while True:
            ready, _, _ = select.select([owner, listener, *children], [], [])
            if owner in ready:
                os._exit(0)
            for process in [x for x in children if x in ready]:
                _report_exit(process, *children.pop(process))
            if listener in ready:
                connection, _ = listener.accept()
                message, files, _, _ = socket.recv_fds(connection, LONGEST_REQUEST, 2)
                pid = os.fork()
                if not pid:
                    break
                for file in files:
                    os.close(file)
                children[os.pidfd_open(pid)] = pid, connection
    os.setsid()
    connection.send(str(os.getpid()).encode())
    for file, number in zip(files, (1, 2)):
        os.dup2(file, number)
        os.close(file)
    for pidfd, (_, peer) in children.items():
        os.close(pidfd)
        peer.close()
    owner.close()
    connection.close()
    return Request(**json.loads(message))


def become(request: Request) -> None:
    """Runs a script in this process as `python SCRIPT` would."""
    quiet = {SET_BY_JAX: os.environ[SET_BY_JAX]}
    os.environ.clear()
    os.environ.update(quiet | request.env)
    script = request.command[0]
    sys.argv = list(request.command)
    sys.path[0] = str(Path(script).parent)
    program = ModuleType("__main__")
    program.__file__ = script
    sys.modules["__main__"] = program
    exec(compile(Path(script).read_text(), script, "exec"), program.__dict__)


def _report_exit(pidfd: int, pid: int, connection: socket.socket) -> None:
    _, status = os.waitpid(pid, 0)
    os.close(pidfd)
    with suppress(OSError):  # the test has ended without waiting
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())
    connection.close()


if __name__ == "__main__":
    main(sys.argv[1])
