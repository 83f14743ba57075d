"""Random faults of real SGLang servers, one after another, while a teacher scores on them.

`python tests/crash/served_loop.py --faults 100 --seed 0` starts two servers of one model as a run does and
lets `SGLangTeacher` score known samples without end. Each round does something to a server or to its answers.
Every row must then be the local teacher's, or the round end with one sentence, after which a new teacher goes
on, as `--resume` would; every sample is scored once; at the end nothing of the servers is left. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

if __name__ == "__main__":
    here = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(here / name) for name in (".", "pipelines", "servers")]

from fault_proxy import FaultProxy, fault_proxy
from real_servers import CPU_SERVER, install

from opd.config.servers import ServerGroupConfig
from opd.config.teachers import SGLangTeacherConfig
from opd.errors import OpdError
from opd.pipelines.launch.servers import StartedGroup
from opd.pipelines.launch.started_server import StartedServer
from opd.pipelines.stages.publishing import publish_checkpoint
from opd.teachers.kinds import Placement
from opd.teachers.local_teacher import LocalTeacher
from opd.teachers.served_teacher import SignalNeeds
from opd.teachers.sglang_teacher import SGLangTeacher
from opd.types import Sample

CHEAP = {
    "status": 3,
    "reset": 3,
    "short": 3,
    "stall": 1,
    "slow": 2,
    "stop": 3,
    "disk": 2,
    "damage": 2,
    "weights": 2,
    "lost": 2,
}
"""Faults that end no process, and how often each is drawn."""
ALL = CHEAP | {"kill_server": 1, "kill_scheduler": 1, "hang": 1}
"""Those that end with a new start, too, which takes most of a minute."""
ANSWERS = ("status", "reset", "short", "stall", "slow")
"""Those that are done to answers on their way."""
TOLERANCE = 1e-5
ROUND = 900.0
"""Seconds that one round may take: a server's new start among them."""


@dataclass
class Target:
    """Servers of one model, and what the rounds need to know of it."""

    servers: Sequence[StartedServer]
    models: dict[str, Path]
    """The model that is served, `a`; `b`, another of its form, and `zero`, one that has lost its weights."""
    published: str
    vocabulary: int
    proxies: list[FaultProxy] = field(default_factory=list)
    """In front of each."""
    given_up: Callable[[], OpdError | None] = lambda: None

    @contextlib.contextmanager
    def reached(self) -> Iterator[Target]:
        """Behind proxies while the block runs."""
        with contextlib.ExitStack() as stack:
            self.proxies = [stack.enter_context(fault_proxy(("127.0.0.1", s.port))) for s in self.servers]
            yield self


def zeroed(model: Path, folder: Path) -> Path:
    """A copy of `model` whose weights are all zero."""
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    save_file({n: torch.zeros_like(w) for n, w in weights.items()}, folder / "model.safetensors")
    return folder


class Rounds:
    """See the module. `wrong` holds what must not be."""

    def __init__(self, target: Target, seed: int) -> None:
        self.target, self.rng = target, random.Random(seed)
        self.drawn: Counter[str] = Counter()
        self.right = self.sentences = self.scored = self.retries = 0
        self.wrong: list[str] = []
        self._local = LocalTeacher("a", target.models["a"], vocabulary=target.vocabulary)
        self._teacher: SGLangTeacher | None = None
        self._number = 0

    def run(self, faults: int, kinds: dict[str, int]) -> None:
        """As many rounds; every kind is drawn by its weight."""
        for _ in range(faults):
            [kind] = self.rng.choices(list(kinds), list(kinds.values()))
            self.drawn[kind] += 1
            self._round(kind)
        self._round("")  # all is well again
        self._close()

    def _round(self, kind: str) -> None:
        samples = self._samples()
        due = self._local.score(samples).rows
        server = self.rng.randrange(len(self.target.servers))
        undo: list[Callable[[], object]] = []
        done = threading.Event()

        def disturb() -> None:
            if kind:
                time.sleep(self.rng.random() * 0.3)
                undo.append(getattr(self, f"_{kind}")(server, done))

        try:
            teacher = self._open()
            acting = threading.Thread(target=disturb)
            if kind in ANSWERS:  # before anything is asked: these wait for what they are done to
                acting.run()
            else:
                acting.start()
            try:
                rows = teacher.score(samples).rows
            finally:
                done.set()
                if acting.ident is not None:
                    acting.join(ROUND)
            self._compare(kind, rows, due, samples)
        except OpdError as error:
            self._sentence(kind, str(error))
        finally:
            for step in reversed(undo):
                step()
            for proxy in self.target.proxies:
                proxy.faults.clear()
                proxy.bytes_per_second = None
        print(
            f"{self.drawn.total()} {kind or 'end'}: right {self.right}, sentences {self.sentences}",
            flush=True,
        )

    def _compare(self, kind: str, rows: torch.Tensor, due: torch.Tensor, samples: Sequence[Sample]) -> None:
        assert self._teacher is not None
        if rows.shape != due.shape or self._teacher._begun:
            self.wrong.append(f"{kind}: {tuple(rows.shape)} rows of {tuple(due.shape)}")
        elif (apart := float((rows - due).abs().max())) > TOLERANCE:
            self.wrong.append(f"{kind}: rows are {apart} apart")
        else:
            self.right += 1
            self.scored += len(samples)

    def _sentence(self, kind: str, said: str) -> None:
        self.sentences += 1
        if not said or "\n" in said or not kind:
            self.wrong.append(f"{kind or 'nothing was done'}: {said!r}")
        print(f"  {kind}: {said[:300]}", flush=True)
        self._close()

    def _samples(self) -> list[Sample]:
        """New ones, under names that nobody has used."""
        found = []
        for _ in range(6):
            self._number += 1
            prompt, response = self.rng.randint(1, 20), self.rng.randint(1, 40)
            ids = [self.rng.randrange(3, self.target.vocabulary) for _ in range(prompt + response)]
            tokens, name = np.array(ids, dtype=np.int32), f"s{self._number}"
            found.append(Sample(name, name, "d", prompt_ids=tokens[:prompt], response_ids=tokens[prompt:]))
        return found

    def _open(self) -> SGLangTeacher:
        if self._teacher is None:
            settings = SGLangTeacherConfig(
                path=self.target.published,
                urls=[proxy.endpoint for proxy in self.target.proxies],
                weight_version="default",
                timeout=20.0,
                patience=ROUND,
                attempts=10,
            )
            placement = Placement(vocabulary=self.target.vocabulary)
            self._teacher = SGLangTeacher(
                "a", self.target.published, settings, needs=SignalNeeds(), placement=placement
            )
            pool = self._teacher.pool
            pool.options = replace(pool.options, max_in_flight_tokens=256, given_up=self.target.given_up)
        return self._teacher

    def _close(self) -> None:
        if self._teacher is not None:
            self.retries += self._teacher.pool.counters.retries
            self._teacher.close()
            self._teacher = None

    # What is done to one server or its answers; each returns what takes it back.

    def _inject(self, server: int, kind: str, **options: object) -> Callable[[], object]:
        times = self.rng.randint(1, 4)
        self.target.proxies[server].inject(kind, times=times, method="POST", path="/generate", **options)
        return _nothing

    def _status(self, server: int, _: threading.Event) -> Callable[[], object]:
        return self._inject(server, "status", status=self.rng.choice([500, 502, 503, 429]))

    def _reset(self, server: int, _: threading.Event) -> Callable[[], object]:
        return self._inject(server, "reset", after=self.rng.randrange(200))

    def _short(self, server: int, _: threading.Event) -> Callable[[], object]:
        return self._inject(server, "short", after=self.rng.randrange(200))

    def _stall(self, server: int, _: threading.Event) -> Callable[[], object]:
        self.target.proxies[server].inject("stall", method="POST", path="/generate")
        return _nothing

    def _slow(self, server: int, _: threading.Event) -> Callable[[], object]:
        self.target.proxies[server].bytes_per_second = 20_000.0
        return _nothing

    def _stop(self, server: int, _: threading.Event) -> Callable[[], object]:
        seconds = 0.5 + 3 * self.rng.random()
        pids = self._schedulers(server)
        _signal(pids, signal.SIGSTOP)
        time.sleep(seconds)
        _signal(pids, signal.SIGCONT)
        return _nothing

    def _hang(self, server: int, _: threading.Event) -> Callable[[], object]:
        back = self._waiting(server)
        _signal(self._schedulers(server), signal.SIGSTOP)
        return back

    def _kill_server(self, server: int, _: threading.Event) -> Callable[[], object]:
        back = self._waiting(server)
        found = _processes(self.target.servers[server])  # in no order: process ids begin anew
        _signal([pid for pid, command in found.items() if "launch_server" in command], signal.SIGKILL)
        return back

    def _kill_scheduler(self, server: int, _: threading.Event) -> Callable[[], object]:
        back = self._waiting(server)
        _signal(self._schedulers(server), signal.SIGKILL)
        return back

    def _disk(self, server: int, done: threading.Event) -> Callable[[], object]:
        """No file may grow beyond a few bytes: as on a disk that is full."""
        before = []
        for pid in self._schedulers(server):
            with contextlib.suppress(ProcessLookupError):
                before.append((pid, resource.prlimit(pid, resource.RLIMIT_FSIZE)))
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (64, before[-1][1][1]))
        done.wait(2.0)

        def restore() -> None:
            for pid, limits in before:
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)

        restore()
        return _nothing

    def _damage(self, server: int, done: threading.Event) -> Callable[[], object]:
        """Flip a bit of every segment that can be caught before it is read."""
        folder, until = Path(self.target.servers[server]._hidden), time.monotonic() + 3.0
        while not done.is_set() and time.monotonic() < until:
            with contextlib.suppress(OSError):
                for file in folder.iterdir():
                    if len(file.name) == 32:
                        with file.open("r+b") as opened:
                            opened.seek(-1, os.SEEK_END)
                            last = opened.read(1)[0]
                            opened.seek(-1, os.SEEK_END)
                            opened.write(bytes([last ^ 1]))
            time.sleep(0.001)
        return _nothing

    def _weights(self, server: int, _: threading.Event) -> Callable[[], object]:
        """Other ones under another version."""
        _load(self.target.servers[server], self.target.models["b"], "2")
        return partial(_load, self.target.servers[server], self.target.models["a"], "default")

    def _lost(self, server: int, _: threading.Event) -> Callable[[], object]:
        """None at all, under the version that is due: nobody has told the server."""
        _load(self.target.servers[server], self.target.models["zero"], "default")
        return partial(_load, self.target.servers[server], self.target.models["a"], "default")

    def _schedulers(self, server: int) -> list[int]:
        found = _processes(self.target.servers[server])
        return [pid for pid, name in found.items() if "scheduler" in name]

    def _waiting(self, server: int) -> Callable[[], object]:
        """To be called before it is ended: what waits until it was started again and serves."""
        one = self.target.servers[server]
        before = one._guard

        def wait() -> None:
            until = time.monotonic() + ROUND
            while one._guard in (None, before) or not one.served or not _answers(one):
                if time.monotonic() > until or self.target.given_up() is not None:
                    self.wrong.append(f"{one.name} did not come back")
                    return
                time.sleep(0.5)

        return wait


def _nothing() -> None:
    pass


def _processes(server: StartedServer) -> dict[int, str]:
    """Names of a server's processes, by id; its first is the server itself."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            own = (folder / "environ").read_bytes().split(b"\0")
            name = (folder / "cmdline").read_bytes().decode(errors="replace")
            if f"OPD_HIDDEN_FOLDER={server._hidden}".encode() in own and "server_guard" not in name:
                found[int(folder.name)] = name
    return found


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _load(server: StartedServer, model: Path, version: str) -> None:
    """Have it serve other weights; refused while requests run, and in vain while it is away."""
    body = json.dumps({"model_path": str(model), "weight_version": version}).encode()
    headers, until = {"Content-Type": "application/json"}, time.monotonic() + 120
    while time.monotonic() < until:
        request = urllib.request.Request(f"{server.url}/update_weights_from_disk", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                answer.read()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)


def _answers(server: StartedServer) -> bool:
    """Whether what computes in it answers."""
    try:
        with urllib.request.urlopen(f"{server.url}/server_info", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def main() -> int:
    from served_models import recipe_tokenizer, write_served_models

    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--faults", type=int, default=100)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--cheap", action="store_true", help="only faults that end no process")
    told = options.parse_args()
    if (reason := install()) is not None:
        print(f"no SGLang server: {reason}")
        return 2
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        models = write_served_models(root)
        models["zero"] = zeroed(models["a"], root / "zero")
        publish_checkpoint(models["a"], root / "published")
        config = ServerGroupConfig(
            count=2,
            command=["bash", str(CPU_SERVER / "serve.sh")],
            arguments={"context-length": 256},
            environment={"PYTHON": sys.executable, "SGLANG_PLUGINS": "opd_hidden_states"},
            start_seconds=1500.0,
            silence_seconds=30.0,
            restarts=told.faults,
            key=False,  # what is asked here goes through a proxy, and is the same with one
        )
        group = StartedGroup.start_servers("served", config, models["a"], root / "logs")
        hidden = {Path(server._hidden) for server in group.servers}
        try:
            group.wait()
            target = Target(
                group.servers,
                models,
                str(root / "published"),
                len(recipe_tokenizer()),
                given_up=lambda: group.trouble,
            )
            with target.reached():
                rounds = Rounds(target, told.seed)
                rounds.run(told.faults, CHEAP if told.cheap else ALL)
        finally:
            hidden |= {Path(server._hidden) for server in group.servers}
            own = [pid for server in group.servers for pid in _processes(server)]
            group.close()
    left = [str(folder) for folder in hidden if folder.exists()]
    left += [str(pid) for pid in own if Path(f"/proc/{pid}").exists()]
    found = {
        "faults": dict(sorted(rounds.drawn.items())),
        "seed": told.seed,
        "right": rounds.right,
        "sentences": rounds.sentences,
        "scored": rounds.scored,
        "retries": rounds.retries,
        "restarts": group.restarts,
        "wrong": rounds.wrong,
        "left": left,
        "seconds": round(time.perf_counter() - begun),
    }
    print(json.dumps(found))
    return 1 if rounds.wrong or left else 0


if __name__ == "__main__":
    sys.exit(main())
