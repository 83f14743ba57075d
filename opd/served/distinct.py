"""Whether two URLs lead to one server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from opd.errors import OpdError
from opd.served.http_pool import HTTPPool, LoopThread, PoolOptions, Server


def check_distinct(wanted: Mapping[str, PoolOptions], error: type[OpdError]) -> None:
    """Ask every server who it is, once. One that does not answer, or is too old to tell when it started,
    counts as another.

    Args:
        wanted: Servers by the field that names them, such as `rollout.engine.urls`.
        error: Raised if two URLs lead to one server: the student's weights in place of a teacher's, or verbs
            of two clients at once, which end it.
    """
    if sum(len(options.urls) for options in wanted.values()) < 2:
        return
    pools = {where: HTTPPool(where, options, error) for where, options in wanted.items()}
    loop = LoopThread("distinct-servers")
    try:
        told = loop.run(_ask_all(_servers(pools)))
    finally:
        for pool in pools.values():
            loop.run(pool.close())
        loop.close()
    seen: dict[str, tuple[str, str]] = {}
    for (where, _, server), identity in zip(_servers(pools), told, strict=True):
        if identity in seen:
            there, url = seen[identity]
            other = "" if there == where else f"{where}: "
            raise error(f"{there}: {url} and {other}{server.url} lead to one server; give every server once.")
        seen[identity] = where, server.url


def _servers(pools: Mapping[str, HTTPPool]) -> list[tuple[str, HTTPPool, Server]]:
    return [(where, pool, server) for where, pool in pools.items() for server in pool.servers]


async def _ask_all(servers: list[tuple[str, HTTPPool, Server]]) -> list[str]:
    return await asyncio.gather(*(pool.identity(server) for _, pool, server in servers))
