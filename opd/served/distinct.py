"""Whether two URLs lead to one server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from opd.errors import OpdError
from opd.served.http_client import PoolOptions, Server
from opd.served.http_pool import HTTPPool
from opd.served.loop_thread import LoopThread


def check_distinct(
    wanted: Mapping[str, PoolOptions], error: type[OpdError], models: Mapping[str, str] | None = None
) -> None:
    """Ask every server who it is, once. One that does not answer, or is too old to tell when it started,
    counts as another.

    Args:
        wanted: Servers by the field that names them, such as `rollout.engine.urls`.
        error: Raised if two URLs lead to one server: the student's weights or another teacher's in place of a
            teacher's, or verbs of two clients at once, which end it.
        models: By field, what is only asked and never told: two fields of one model may share servers.
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
    seen: dict[str, list[tuple[str, str]]] = {}
    for (where, _, server), identity in zip(_servers(pools), told, strict=True):
        for there, url in seen.setdefault(identity, []):
            if there == where or not _alike(models or {}, there, where):
                raise error(_shared((there, url), (where, server.url)))
        seen[identity].append((where, server.url))


def _alike(models: Mapping[str, str], one: str, other: str) -> bool:
    return one in models and models[one] == models.get(other)


def _shared(one: tuple[str, str], other: tuple[str, str]) -> str:
    (there, url), (where, second) = one, other
    named = "" if there == where else f"{where}: "
    mend = "give every server once" if there == where else "give each of the two servers of its own"
    return f"{there}: {url} and {named}{second} lead to one server; {mend}."


def _servers(pools: Mapping[str, HTTPPool]) -> list[tuple[str, HTTPPool, Server]]:
    return [(where, pool, server) for where, pool in pools.items() for server in pool.servers]


async def _ask_all(servers: list[tuple[str, HTTPPool, Server]]) -> list[str]:
    return await asyncio.gather(*(pool.identity(server) for _, pool, server in servers))
