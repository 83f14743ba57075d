"""Make a vLLM server require its key from everybody, also from those who would give it weights.

vLLM's own `--api-key` guards the paths that write, and none of the developers' verbs. With the folder of this
file on its PYTHONPATH a server takes `--middleware opd_server_key.RequireKey`. Imports the standard library
alone.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

VARIABLE = "OPD_SERVER_KEY"
"""Environment variable with the key: other users cannot read it."""
OPEN = ("/health",)
_App = Callable[[Any, Any, Any], Awaitable[None]]


class RequireKey:
    """ASGI middleware that answers 401 to requests without the key."""

    def __init__(self, app: _App) -> None:
        key = os.environ.get(VARIABLE)
        if not key:
            raise RuntimeError(
                f"{VARIABLE} is not set; have what starts the server pass its environment on, or set key to"
                " false for its group of servers"
            )
        self._app, self._due = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        # A server with a `root-path` has it before every path.
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] not in ("http", "websocket") or path in OPEN:
            return await self._app(scope, receive, send)
        key = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
        if hmac.compare_digest(key, self._due):
            return await self._app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        await send({"type": "http.response.start", "status": 401, "headers": []})
        return await send({"type": "http.response.body", "body": b""})
