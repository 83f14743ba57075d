"""Where processes meet: on the one address that is asked for, and on no other of this machine.

torch's own store and gloo's pairs listen on every address, or on the one that the machine's name stands for:
whoever reaches that machine could join a run, change what its ranks tell each other, and read its weights.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
EVERY = "0.0.0.0"


def host_store(host: str, timeout: float, port: int = 0) -> tuple[TCPStore, int]:
    """A store on `port` (0: a free one) of this machine's address `host` and of no other; it and its port.

    `timeout` is in seconds. Raises `OSError` if the port is in use or `host` is no address of this machine.
    """
    listening = socket.create_server((address_of(host), port))
    port = listening.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listening.detach(),
        use_libuv=False,  # the other server takes no socket
    )
    return store, port


def address_of(host: str) -> str:
    """The address to listen on for `host`: what it stands for.

    A machine's own name often stands for loopback on that machine alone, while the others ask for another
    address of it: then, and only then, it is every address.
    """
    address = socket.gethostbyname(host)
    named = not _is_address(host) and host != "localhost"
    return EVERY if named and ipaddress.ip_address(address).is_loopback else address


def gloo_device(host: str) -> object:
    """The device of a gloo group whose connections are made on `host`."""
    return dist.ProcessGroupGloo.create_device(hostname=address_of(host))


@contextlib.contextmanager
def gloo_towards(host: str) -> Iterator[None]:
    """Let every gloo group made in the block listen on the interface that leads to `host` alone, unless the
    environment names one. Where no interface is found (not on Linux) gloo chooses.
    """
    found = None if _GLOO_INTERFACE in os.environ else interface_towards(host)
    if found is None:
        yield
        return
    os.environ[_GLOO_INTERFACE] = found
    try:
        yield
    finally:
        os.environ.pop(_GLOO_INTERFACE, None)


def interface_towards(host: str) -> str | None:
    """Name of the network interface through which `host` is reached; `None` if it cannot be told."""
    if not sys.platform.startswith("linux"):
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            if address_of(host) == EVERY:
                return None
            asking.connect((host, 9))  # nothing is sent
            own = asking.getsockname()[0]
        except OSError:
            return None
        if ipaddress.ip_address(own).is_loopback:
            return "lo"
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == own:
                    return name
    return None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
