"""Whether several URLs lead to several servers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from opd.errors import RolloutError
from opd.served.http_client import PoolOptions, RefusedError, Server, UnavailableError
from opd.served.http_pool import HTTPPool, LoopThread

IDENTITY = ("host", "port", "startup_time")
"""What a server says of itself that no other says: `startup_time` holds the seconds that each part of its
start took, to many places.
"""


def check_distinct(options: PoolOptions) -> None:
    """Ask every server of `options` who it is, once. One that does not answer, or is too old to tell when it
    started, counts as another.

    Raises `RolloutError` if two URLs lead to one server: verbs sent to it by two clients at once end it.
    """
    if len(options.urls) < 2:
        return
    pool = HTTPPool("the rollout engine", options, RolloutError)
    loop = LoopThread("sglang-distinct")
    try:
        told = loop.run(_ask_all(pool))
    finally:
        loop.run(pool.close())
        loop.close()
    seen: dict[str, str] = {}
    for server, identity in zip(pool.servers, told, strict=True):
        if identity in seen:
            raise RolloutError(
                f"rollout.engine.urls: {seen[identity]} and {server.url} lead to one server; give every"
                " worker once."
            )
        seen[identity] = server.url


async def _ask_all(pool: HTTPPool) -> list[str]:
    return await asyncio.gather(*(_identity(pool, server) for server in pool.servers))


async def _identity(pool: HTTPPool, server: Server) -> str:
    """The same for two URLs of one server."""
    try:
        told: dict[str, Any] = await pool.ask(server, "GET", "/server_info") or {}
    except (UnavailableError, RefusedError):
        told = {}
    return json.dumps([told[name] for name in IDENTITY]) if told.get("startup_time") else server.url
