"""Addresses of Ray clusters: which one is meant, and whether a Ray head answers there."""

from __future__ import annotations

import os
import socket

from opd.config import RayLaunch
from opd.errors import LaunchError

PROBE_SECONDS = 10.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""What a gRPC client says first: HTTP/2's preface and an empty SETTINGS frame (RFC 9113, section 3.4)."""


def resolved(launch: RayLaunch) -> str:
    if launch.address != "auto":
        return str(launch.address)
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        raise LaunchError(
            "launch.address is auto, but RAY_ADDRESS is not set: submit the run as a Ray job, or give the"
            " cluster's HOST:PORT."
        )
    return address


def probe(address: str, seconds: float = PROBE_SECONDS) -> None:
    """`LaunchError` unless something at `address` (HOST:PORT) answers as a Ray head would: Ray itself would
    go on trying for minutes.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise LaunchError(f"launch.address is {address!r}, but must be HOST:PORT, or auto.")
    try:
        with socket.create_connection((host, int(port)), timeout=seconds) as connection:
            connection.settimeout(seconds)
            connection.sendall(PREFACE)
            answer = connection.recv(9)
    except TimeoutError:
        raise LaunchError(
            f"{address} does not answer within {seconds:g} s; check launch.address and that a Ray head"
            " listens there."
        ) from None
    except OSError as error:
        reason = error.strerror or error
        raise LaunchError(
            f"the Ray cluster at {address} cannot be reached ({reason}); start it, or correct launch.address."
        ) from None
    if len(answer) < 9 or answer[3] != 4:
        raise LaunchError(f"what listens at {address} is no Ray head; correct launch.address.")


def require_free(port: int) -> None:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            raise LaunchError(
                f"launch.port {port} is in use; choose another, or none to take a free one."
            ) from None
