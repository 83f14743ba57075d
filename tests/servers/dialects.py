"""What differs between the programs behind a URL: one object each, over which tests are parametrised.

A test takes the fixture `server` by `on(...)`: a little server of a dialect in this process, or a real one.
"""

import functools
import json
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from little_models import LittleServer, LittleSGLang, LittleVLLM
from real_servers import control, load_folder
from served_models import MODEL, PADDED, QWEN3

from opd.config.teachers import SGLangTeacherConfig, VLLMTeacherConfig
from opd.models.causal_lm import CausalLM
from opd.retry import Retry
from opd.rollout import sglang_engine, vllm_engine
from opd.rollout.adapted_student import AdaptedStudent
from opd.rollout.adapter_workers import AdapterPush
from opd.rollout.served_engine import ServedEngine, ServedModel
from opd.rollout.served_workers import FolderPush, Push, Read
from opd.rollout.sglang_engine import SGLangEngine, TensorPush
from opd.rollout.vllm_engine import LOADS, Outputs, VLLMEngine
from opd.rollout.weight_proof import Proof
from opd.rollout.weight_sync import WeightFolder
from opd.served.http_client import Patience, PoolOptions
from opd.teachers.kinds import Placement
from opd.teachers.served_teacher import ServedTeacher, SignalNeeds
from opd.teachers.sglang_teacher import SGLangTeacher
from opd.teachers.vllm_teacher import VLLMTeacher

ALL_ROWS = ServedModel(PADDED, 250)


def _vllm_engine(options: PoolOptions, model: ServedModel, push: Push, folder: Path, **more: Any):
    return VLLMEngine(options, model, push, outputs=Outputs(folder, "float32"), **more)


def _sglang_engine(options: PoolOptions, model: ServedModel, push: Push, folder: Path, **more: Any):
    return SGLangEngine(options, model, push, **more)


def _take_sglang(url: str, folder: Path, version: str) -> None:
    load_folder(url, folder, version)


def _take_vllm(url: str, folder: Path, version: str) -> None:
    control(url, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
    control(url, "/update_weight_version", {"new_version": version})


@dataclass(frozen=True)
class Dialect:
    """A program. `first` is the version of an engine's weights before it has given any, `loads` begins the
    paths by which adapters come, `reads` has a server take a folder of weights.
    """

    name: str
    little: type[LittleServer]
    teacher: type[ServedTeacher]
    config: type[SGLangTeacherConfig | VLLMTeacherConfig]
    engine: Callable[..., ServedEngine]
    reads: Read
    first: int
    take: Callable[[str, Path, str], None]
    """`take(url, folder, version)`: have a server hold other weights, unnoticed."""
    loads: str = ""
    lora: dict[str, Any] = field(default_factory=dict)
    """What a server for adapters says of them."""

    def make_engine(
        self,
        urls: Sequence[str],
        folder: Path,
        push: Push,
        model: ServedModel = ALL_ROWS,
        patience: Patience | None = None,
        **settings: Any,
    ) -> ServedEngine:
        """An engine whose workers are at `urls`, for a student of the form in `folder`."""
        room = {"max_in_flight_tokens": settings.pop("room")} if "room" in settings else {}
        if "ranks" in settings:
            room |= {"rank": settings["ranks"].rank, "ranks": settings["ranks"].size}
        options = PoolOptions(list(urls), patience=patience or LITTLE, **room)
        return self.engine(options, model, push, folder, **{"version": self.first} | settings)

    def adapters_alone(self, root: Path, folder: Path, lora: Any) -> AdapterPush:
        """A push of adapters below `root`."""
        base = FolderPush(WeightFolder(root / "base", folder), self.reads)
        return AdapterPush(root, AdaptedStudent(folder, lora, "float32"), base, self.loads)

    def make_teacher(
        self,
        path: str,
        urls: Sequence[str],
        *,
        asked: SignalNeeds | None = None,
        vocabulary: int,
        **settings: Any,
    ) -> ServedTeacher:
        """A teacher named `a` that is published at `path`."""
        config = self.config(path=path, urls=list(urls), **settings)
        placement = Placement(vocabulary=vocabulary)
        return self.teacher("a", path, config, needs=asked or SignalNeeds(), placement=placement)


SGLANG = Dialect(
    "sglang",
    LittleSGLang,
    SGLangTeacher,
    SGLangTeacherConfig,
    _sglang_engine,
    sglang_engine.read_folder,
    0,
    _take_sglang,
    lora={"max_lora_rank": 8, "lora_target_modules": ["all"]},
)
VLLM = Dialect(
    "vllm",
    LittleVLLM,
    VLLMTeacher,
    VLLMTeacherConfig,
    _vllm_engine,
    vllm_engine.read_folder,
    -1,
    _take_vllm,
    LOADS,
    {"max_lora_rank": 8, "target_modules": None},
)
DIALECTS = {dialect.name: dialect for dialect in (SGLANG, VLLM)}
LITTLE = Patience(timeout=30.0, unreachable=30.0, retry=Retry(attempts=3, pause=0.01))
PATIENT = Patience(timeout=120.0, unreachable=60.0, retry=Retry(attempts=3))
"""With real ones."""


@dataclass
class Served:
    """A server of model `a`, of those in `folders`."""

    dialect: Dialect
    folders: dict[str, Path]
    own: Any
    """The `LittleServer`, or the `RealServer`."""
    real: bool = False

    @property
    def url(self) -> str:
        return self.own.url

    @property
    def tokens(self) -> int:
        """A long response: a little server computes all of it anew for each token."""
        return 200 if self.real else 50

    @property
    def form(self) -> dict[str, Any]:
        """Of its models, but for the rows of the head."""
        return QWEN3 if self.real and self.dialect is SGLANG else MODEL

    @property
    def patience(self) -> Patience:
        return PATIENT if self.real else LITTLE

    def unreachable(self, seconds: float) -> Patience:
        """Patience with a server that is started again, which takes a real one so long."""
        return replace(self.patience, unreachable=seconds if self.real else 30.0)

    def restart(self) -> None:
        """Kill it, and start it again at its port."""
        self.own.kill()
        self.start()

    def start(self) -> None:
        """After it was killed; a real one is ready later."""
        if self.real:
            self.own.launch()
        else:
            lora, self.own = self.own.lora, self.dialect.little(self.folders["a"], self.own.port)
            self.own.lora = lora

    def model(self, name: str) -> CausalLM:
        """One of its `folders`, as the trainer has it."""
        return _model(self.folders[name])

    def control(self, path: str, **body: Any) -> dict[str, Any]:
        """The answer to one of its own verbs."""
        return control(self.url, path, body)

    def take(self, name: str = "a", version: str = "default") -> None:
        """Hold other weights; by default as a server that was started again."""
        self.dialect.take(self.url, self.folders[name], version)

    def holds(self, model: CausalLM) -> None:
        """`RolloutError` unless it holds the model's weights, where it says which."""
        if self.dialect is SGLANG:
            ranks = self.control("/weights_checker", action="checksum")["ranks"]
            Proof(model.weights()).check(self.url, ranks, {})
        elif not self.real:
            assert self.own.model.quick_digest() == model.quick_digest()

    def adapters(self) -> list[str]:
        """Names of those it has."""
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=60) as answer:
            return [entry["id"] for entry in json.load(answer)["data"] if entry.get("parent")]


@functools.cache
def _model(folder: Path) -> CausalLM:
    return CausalLM.from_pretrained(folder)


MARKS = {
    "little-sglang": [],
    "little-vllm": [],
    "real-sglang": [pytest.mark.slow],
    "real-vllm": [pytest.mark.long, pytest.mark.timeout(3000)],
}
EVERY = tuple(MARKS)
LITTLES, REALS = EVERY[:2], EVERY[2:]
SGLANGS, VLLMS = EVERY[::2], EVERY[1::2]
SYNCS = {"sglang": {"disk": None, "tensors": lambda: TensorPush(bucket_bytes=4096)}, "vllm": {"disk": None}}
"""The ways in which weights come."""


def on(*names: str, real: Sequence[pytest.MarkDecorator] = ()) -> pytest.MarkDecorator:
    """Run a test on the servers of those names; `real` marks the real ones further."""
    cases = [pytest.param(name, marks=_marks(name, real)) for name in names]
    return pytest.mark.parametrize("server", cases, indirect=True)


def on_syncs(*names: str) -> pytest.MarkDecorator:
    """The same, by every way in which weights come."""
    cases = [
        pytest.param(name, sync, marks=MARKS[name], id=f"{name}-{sync}")
        for name in names
        for sync in SYNCS[name.partition("-")[2]]
    ]
    return pytest.mark.parametrize(("server", "sync"), cases, indirect=["server"])


def _marks(name: str, real: Sequence[pytest.MarkDecorator]) -> list[pytest.MarkDecorator]:
    return [*MARKS[name], *(real if name in REALS else ())]
