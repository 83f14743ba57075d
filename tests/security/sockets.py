"""Who listens where: the sockets of processes, as the system tells them."""

import contextlib
import os
import socket
import struct
from pathlib import Path


def listening(*processes: int) -> set[str]:
    """Addresses (without ports) on which these processes listen for TCP connections."""
    inodes = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for entry in os.listdir(f"/proc/{process}/fd"):
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(f"/proc/{process}/fd/{entry}"))
    found = set()
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                found.add(_address(words[1].partition(":")[0]))
    return found


def descendants(process: int) -> list[int]:
    """`process` and all processes it has started, directly or not."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int(Path(f"/proc/{int(entry)}/stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry))
    found = [process]
    for one in found:
        found += children.get(one, [])
    return found


def _address(digits: str) -> str:
    words = [struct.pack("=I", int(digits[at : at + 8], 16)) for at in range(0, len(digits), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, b"".join(words)).removeprefix("::ffff:")
