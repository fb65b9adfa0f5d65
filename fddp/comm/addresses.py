"""Addresses by which the processes of a group reach each other outside of its collectives."""

import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # a group has hosts
    from fddp.comm.group import Group

SIOCGIFADDR = 0x8915


def on_one_host(group: "Group") -> bool:
    """Returns True if all processes of a group share a loopback device; every process calls it."""
    return len(set(host_keys(group))) == 1


def host_keys(group: "Group") -> list[bytes]:
    """Returns `host_key` of each process; every process calls it."""
    keys = group.hosts.all_gather(np.frombuffer(host_key().encode()[:80].ljust(80), np.uint8))
    return [key.tobytes() for key in keys]


def own_addresses() -> list[str]:
    """Returns this host's IPv4 addresses except loopback, or its name if it has none."""
    import fcntl  # POSIX only

    addresses = list[str]()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(
                    probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15])
                )
                addresses.append(socket.inet_ntoa(answer[20:24]))
            except OSError:
                continue
    return [address for address in addresses if not address.startswith("127.")] or [
        socket.gethostname()
    ]


def host_key() -> str:
    """Returns a key of kernel and network namespace, equal if processes share a loopback device."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + str(
            Path("/proc/self/ns/net").readlink()
        )
    except OSError:
        return socket.gethostname()
