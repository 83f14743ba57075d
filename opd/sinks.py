"""Trackers that receive a stage's metrics, besides `metrics.jsonl`: TensorBoard, W&B, MLflow and Trackio.

A `Sink` takes rows of numbers. None reaches a network unless its own environment variables say so, and none
stops a run: an error in it is a warning, and it gets no more rows. `sinks.json` of the stage notes the steps
each has got, so that a resumed stage sends no step twice. TensorBoard's files mark from where they are
written again. They write to `sinks/` of the run folder, TensorBoard to the stage's.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from opd.errors import ConfigError, MissingExtraError
from opd.redact import redact
from opd.storage.files import read_plain, write_atomic
from opd.untrusted import read_document, safe_excerpt

_log = logging.getLogger(__name__)

_STATE = "sinks.json"
_PROJECT = "opd"


@dataclass(frozen=True, slots=True)
class MetricsTarget:
    """The stage whose metrics they are, and their folders."""

    stage: Path
    run: Path
    name: str
    id: str
    """Identity of all the stage's attempts: random, and the same after a resume."""

    @property
    def stage_title(self) -> str:
        """Name of the stage in a tracker."""
        return f"{self.name}/{self.stage.name}"

    def sink_folder(self, sink: str) -> Path:
        """Return the folder of a sink, made if it does not exist."""
        folder = self.run / "sinks" / sink
        folder.mkdir(parents=True, exist_ok=True)
        return folder


class Sink(Protocol):
    """A tracker that is open for one stage. Its factory gets a `MetricsTarget` and the first step."""

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Write one step's numbers by name. Steps rise."""
        ...

    def close(self) -> None:
        """Close it: nothing more comes from this process."""
        ...


class TensorBoard:
    """Event files in `tensorboard/` of the stage."""

    def __init__(self, target: MetricsTarget, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Hide events of the first step after a resume, and of later ones.
        self._writer: Any = SummaryWriter(str(target.stage / "tensorboard"), purge_step=step)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of W&B, offline unless `WANDB_MODE` says otherwise: `wandb sync` sends it later. All attempts
    have one id, and so become one run.
    """

    def __init__(self, target: MetricsTarget, step: int) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        wandb: Any = import_module("wandb")
        mode = os.environ.get("WANDB_MODE", "offline")
        settings = wandb.Settings(
            silent=True, console="off", x_disable_stats=True, disable_git=True, save_code=False
        )
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            group=target.name,
            name=target.stage_title,
            id=target.id,
            resume=None if mode == "offline" else "allow",
            mode=mode,
            dir=str(target.sink_folder("wandb")),
            settings=settings,
        )

    def write(self, step: int, row: Mapping[str, float]) -> None:
        self._run.log(dict(row), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow in a file store, or at `MLFLOW_TRACKING_URI`. `.` replaces `/` in names: a name that
    begins another one would be a file where a folder is needed.
    """

    def __init__(self, target: MetricsTarget, step: int) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._mlflow: Any = import_module("mlflow")
        where = os.environ.get("MLFLOW_TRACKING_URI") or target.sink_folder("mlflow").absolute().as_uri()
        self._client = self._mlflow.MlflowClient(tracking_uri=where)
        tags = {"mlflow.runName": target.stage_title, "opd.id": target.id}
        experiment = self._experiment_id(os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT))
        runs = self._client.search_runs([experiment], filter_string=f"tags.`opd.id` = '{target.id}'")
        self._run = runs[0] if runs else self._client.create_run(experiment, tags=tags)

    def _experiment_id(self, name: str) -> str:
        for _ in range(2):
            experiment = self._client.get_experiment_by_name(name)
            if experiment is not None:
                return experiment.experiment_id
            with contextlib.suppress(self._mlflow.exceptions.MlflowException):  # another stage was first
                return self._client.create_experiment(name)
        raise LookupError(f"there is no experiment {name}, and none can be made")

    def write(self, step: int, row: Mapping[str, float]) -> None:
        now = int(row.get("time", 0.0) * 1000)
        values = {re.sub(r"[^\w.\- ]", ".", name): float(value) for name, value in row.items()}
        metric = self._mlflow.entities.Metric
        self._client.log_batch(
            self._run.info.run_id, [metric(name, value, now, step) for name, value in values.items()]
        )

    def close(self) -> None:
        self._client.set_terminated(self._run.info.run_id)


class Trackio:
    """A Trackio run in a local database, or at `TRACKIO_DIR`, `TRACKIO_SPACE_ID` or `TRACKIO_SERVER_URL`."""

    def __init__(self, target: MetricsTarget, step: int) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(target.sink_folder("trackio").absolute()))
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
        with contextlib.redirect_stdout(io.StringIO()):  # it prints much, to where results are printed
            self._trackio: Any = import_module("trackio")
            self._run = self._trackio.init(
                project=_PROJECT,
                group=target.name,
                name=f"{target.stage_title} {target.id}",
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def write(self, step: int, row: Mapping[str, float]) -> None:
        self._run.log(dict(row), step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._trackio.finish()  # the run's own method would ask again when the process ends


@dataclass(frozen=True, slots=True)
class SinkKind:
    """A kind of sink.

    Args:
        open: Makes one.
        module: The module it needs. Its extra has the name of the kind.
        extra: Whether there is an extra. Trackio needs older packages than other kinds do, so it is installed
            by itself.
        forgets: Whether it hides the rows that a resumed stage writes again.
    """

    open: Callable[[MetricsTarget, int], Sink]
    module: str
    extra: bool = True
    forgets: bool = False


KINDS = {
    "tensorboard": SinkKind(TensorBoard, "torch.utils.tensorboard", forgets=True),
    "wandb": SinkKind(WandB, "wandb"),
    "mlflow": SinkKind(MLflow, "mlflow"),
    "trackio": SinkKind(Trackio, "trackio", extra=False),
}


def require_package(name: str) -> None:
    """Raise `MissingExtraError`, or `ConfigError` if there is no extra, if the sink's package is missing."""
    module = KINDS[name].module
    try:
        if name == "tensorboard":  # torch has the module without its requirements
            import_module(module)
        elif find_spec(module) is None:
            raise ImportError(module)
    except (ImportError, ValueError) as error:
        if KINDS[name].extra:
            raise MissingExtraError(f"the sink {name}", name) from error
        raise ConfigError(
            f"the sink {name} needs the package {module}: `pip install {module}`, or leave it out of"
            " runtime.sinks."
        ) from error


class Sinks:
    """A stage's sinks, each opened with its first step. Only the constructor raises, as `require_package`."""

    def __init__(self, names: Sequence[str], stage: Path, run_name: str = "") -> None:
        for name in names:
            require_package(name)
        self._open: dict[str, Sink | None] = dict.fromkeys(names)
        """Sinks that still work, `None` before the first step."""
        self._stage, self._run_name = stage, run_name
        self._state: dict[str, Any] | None = None

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Write a step's numbers to every sink that does not have them."""
        for name in list(self._open):
            with self._warn_on_error(name, "was not given"):
                self._write_sink(name, step, row)

    def close(self) -> None:
        for name, sink in list(self._open.items()):
            with self._warn_on_error(name, "was not closed"):
                if sink is not None:
                    sink.close()
        self._open = dict.fromkeys(self._open)

    def _write_sink(self, name: str, step: int, row: Mapping[str, float]) -> None:
        kind = KINDS[name]
        state = self._load_state()
        if not kind.forgets:
            if step <= state["steps"].get(name, 0):
                return
            # Noted first: a kill in between costs a sink one step, and never gives it one twice.
            state["steps"][name] = step
            write_atomic(self._stage / _STATE, json.dumps(state).encode())
        sink = self._open[name]
        if sink is None:
            run = self._stage.parent.parent
            target = MetricsTarget(self._stage, run, self._run_name or run.name, state["id"])
            sink = self._open[name] = kind.open(target, step)
        sink.write(step, row)

    def _load_state(self) -> dict[str, Any]:
        """Return `id`, and `steps`: sink -> the last step it got."""
        if self._state is None:
            self._state = {"id": secrets.token_hex(6), "steps": {}}
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
                stored = read_document(read_plain(self._stage / _STATE), 1 << 16)
                steps = {str(name): int(step) for name, step in stored["steps"].items()}
                if re.fullmatch("[0-9a-f]{12}", stored["id"]):
                    self._state = {"id": stored["id"], "steps": steps}
        return self._state

    @contextlib.contextmanager
    def _warn_on_error(self, name: str, fault: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # any error of a library
            failed = self._open.pop(name, None)
            message = safe_excerpt(redact(str(error) or type(error).__name__), 300)
            _log.warning("the sink %s %s these metrics, and gets no more: %s", name, fault, message)
            if failed is not None:
                with contextlib.suppress(Exception):
                    failed.close()
