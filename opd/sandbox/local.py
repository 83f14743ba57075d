"""Sandboxes of this machine: a folder each, and a substrate and a few threads for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import TypeVar

from opd.errors import StorageError
from opd.sandbox.containers import Workspace
from opd.sandbox.home import Home, Node, changed_names
from opd.sandbox.protocol import HomeEntry, Limits, Outcome, SandboxError
from opd.sandbox.snapshots import SnapshotStore
from opd.sandbox.substrates import Substrate, find_substrate, run_command
from opd.storage.files import remove_tree

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Sandboxes:
    """Makes sandboxes. A limited number of commands run at a time, in threads of their own. Commands wait
    only for one another, never for the event loop, nor it for them.
    """

    def __init__(
        self,
        folder: Path,
        store: SnapshotStore,
        limits: Limits,
        *,
        substrate: Substrate | None = None,
        reads: Sequence[str] = (),
        at_once: int | None = None,
    ) -> None:
        """`folder`: of the homes. `reads`: paths that commands can read besides the system. Raises
        `SandboxError` if no substrate works.
        """
        self.substrate = substrate or find_substrate()
        self.store, self.limits = store, limits
        self._folder, self.reads = folder, tuple(map(str, reads))
        self._threads = ThreadPoolExecutor(at_once or 2 * (os.cpu_count() or 1) + 2, "opd-sandbox")

    def open(self, name: str) -> LocalSandbox:
        """Return a sandbox with an empty home. `name` is a unique folder name."""
        folder = self._folder / name
        if folder.exists():
            remove_tree(folder)
        container = self.substrate.container
        workspace = Workspace(folder / "home", folder / "tmp", self.limits, self.reads, container)
        for path in (workspace.home, workspace.temporary):
            path.mkdir(parents=True)
        return LocalSandbox(folder, workspace, self.substrate, self.store, self._threads)

    def close(self) -> None:
        """Stop the threads, after every sandbox has been closed."""
        self._threads.shutdown()


class LocalSandbox:
    """A `Sandbox` in a folder of this machine."""

    def __init__(
        self,
        folder: Path,
        workspace: Workspace,
        substrate: Substrate,
        store: SnapshotStore,
        threads: ThreadPoolExecutor,
    ) -> None:
        self.spent: str | None = None
        self._folder, self._workspace, self._substrate = folder, workspace, substrate
        self._store, self._threads = store, threads
        self._home = Home(workspace.home, workspace.limits)
        self._nodes: dict[str, Node] | None = {}
        self._lock = asyncio.Lock()

    async def exec(self, command: Sequence[str], stdin: bytes = b"", timeout: float | None = None) -> Outcome:
        most = self._workspace.limits.seconds
        seconds = most if timeout is None else min(most, timeout)
        cancelled = Event()
        return await self._in_turn(lambda: self._run_command(command, stdin, seconds, cancelled), cancelled)

    def _run_command(self, command: Sequence[str], stdin: bytes, seconds: float, cancelled: Event) -> Outcome:
        before = self._current_nodes()
        self._nodes = None
        outcome = run_command(self._substrate.kind, self._workspace, command, stdin, seconds, cancelled)
        self._workspace.home.mkdir(exist_ok=True)  # a command may remove it if nothing prevents that
        if outcome.killed_by == "disk":
            self.spent = "its home holds more than its quota"
            return outcome
        try:
            after = self._current_nodes()
        except SandboxError as error:  # written in the last moment
            self.spent = str(error)
            return replace(outcome, exit=None, killed_by="disk")
        return replace(outcome, files_changed=changed_names(before, after))

    def _current_nodes(self) -> dict[str, Node]:
        if self._nodes is None:
            self._nodes = self._home.scan_nodes()
        return self._nodes

    async def read(self, path: str, most: int = 1 << 20) -> bytes:
        return await self._in_turn(lambda: self._home.read(path, most))

    async def write(self, path: str, data: bytes) -> None:

        def write() -> None:
            size = sum(node.size for node in self._current_nodes().values())
            if size + len(data) > self._workspace.limits.disk:
                raise SandboxError(
                    f"a sandbox's home has no room for {len(data)} bytes more; raise its quota"
                )
            self._nodes = None
            self._home.write(path, data)

        await self._in_turn(write)

    async def list(self, path: str = "") -> list[HomeEntry]:
        return await self._in_turn(lambda: self._home.list(path))

    async def snapshot(self) -> str:
        return await self._in_turn(lambda: self._store.store_snapshot(self._home, self._current_nodes()))

    async def restore(self, digest: str) -> None:

        def restore() -> None:
            self._nodes = self._store.restore(digest, self._home, self._workspace.limits)
            self.spent = None

        await self._in_turn(restore, spent=True)

    async def close(self) -> None:

        def close() -> None:
            self.spent = "it has been closed"
            if self._folder.exists():
                remove_tree(self._folder)

        with contextlib.suppress(StorageError):
            await self._in_turn(close, spent=True)

    async def _in_turn(
        self, work: Callable[[], T], cancelled: Event | None = None, *, spent: bool = False
    ) -> T:
        """Return the result of `work`, run in a thread while nothing else uses this sandbox. A cancelled
        caller waits for its end, because a command may still write files.
        """
        async with self._lock:
            if self.spent and not spent:
                raise SandboxError(f"nothing more can be done in this sandbox: {self.spent}")
            future = asyncio.get_running_loop().run_in_executor(self._threads, work)
            try:
                return await asyncio.shield(future)
            except asyncio.CancelledError:
                if cancelled is not None:
                    cancelled.set()
                await asyncio.wait([future])
                raise
            except OSError as error:
                if isinstance(error, SandboxError | StorageError):
                    raise
                raise SandboxError(
                    f"a sandbox in {self._folder} cannot be used ({error.strerror or error})"
                ) from error
