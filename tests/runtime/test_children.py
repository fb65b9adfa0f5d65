"""Child processes of `fddp run` and `fddp.launch`: whose number still names their group."""

import os
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

import fddp
from fddp.runtime import spawn
from fddp.runtime.children import exit_code, kill_groups

END_S = 60.0  # a last resort


def leader() -> tuple[subprocess.Popen[bytes], int]:
    """A process that has ended, and the number of another of its group, which runs."""
    words = ["sh", "-c", "sleep 600 > /dev/null & echo $!"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
    with process.stdout as output:  # type: ignore
        member = int(output.readline())
    until = time.monotonic() + END_S
    while exit_code(process.pid) is None and time.monotonic() < until:
        time.sleep(0.01)
    return process, member


def runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_group_of_an_ended_process_is_killed_until_the_process_was_reaped():
    process, member = leader()
    kill_groups([process.pid])
    assert process.wait() == 0
    until = time.monotonic() + END_S
    while runs(member) and time.monotonic() < until:
        time.sleep(0.01)
    assert not runs(member)

    process, member = leader()
    process.wait()
    kill_groups([process.pid])  # the number may name another group
    time.sleep(0.1)
    assert runs(member)
    os.kill(member, 9)


@pytest.mark.ranks
def test_the_ranks_of_a_launch_are_not_reaped_before_their_groups_were_killed(
    monkeypatch: pytest.MonkeyPatch,
):
    codes = list[int | None]()

    def killed(pids: Iterable[int]) -> None:
        pids = list(pids)
        codes.extend(map(exit_code, pids))
        kill_groups(pids)

    monkeypatch.setattr(spawn, "kill_groups", killed)
    assert fddp.launch(os.getenv, 2, "FDDP_RANK", timeout_s=END_S) == ["0", "1"]
    assert codes == [0, 0]
