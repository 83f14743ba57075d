"""`environment: {type: tools}`: an agent whose tools run in a sandbox, until it answers without a call."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ValidationError

from opd.config.environments import SandboxConfig
from opd.config.schema import explain_errors
from opd.environments.protocol import Action, Message, Observation, Step, Task, ToolCall
from opd.environments.recorded import RecordedSandbox, sandbox_opener, settings_of
from opd.environments.trajectory import Command, LoggedStep, TrajectoryLog
from opd.errors import ConfigError
from opd.sandbox.isolation import is_left, process_name
from opd.sandbox.local import Sandboxes
from opd.sandbox.protocol import Limits, Outcome, Sandbox, SandboxError
from opd.sandbox.snapshots import SnapshotStore
from opd.sandbox.substrates import find_substrate
from opd.storage.files import remove_tree
from opd.untrusted import safe_excerpt

MOST_CALLS = 4
"""Calls of a turn. The model gets an error for those beyond."""
_FILES_BYTES = 1 << 20
_LONGEST = (1 << 16) - 1
"""Characters of an argument."""

_CALCULATE = """
import ast, operator, sys
DO = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
      ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.USub: operator.neg, ast.UAdd: operator.pos}
def value(node):
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in DO:
        return DO[type(node.op)](value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in DO:
        return DO[type(node.op)](value(node.left), value(node.right))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        base, power = value(node.left), value(node.right)
        if abs(power) <= 1000:
            return base ** power
    sys.exit("numbers, + - * / // % ** and brackets are understood")
try:
    print(value(ast.parse(sys.argv[1].strip(), mode="eval").body))
except (SyntaxError, ArithmeticError, RecursionError, MemoryError, TypeError, ValueError) as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""
_LOOK_UP = """
import csv, sys
file, column, wanted = sys.argv[1:]
try:
    with open(file, newline="", encoding="utf-8") as opened:
        rows = csv.DictReader(opened)
        if column not in (rows.fieldnames or []):
            sys.exit(f"columns are {', '.join(rows.fieldnames or [])}")
        found = [row for row in rows if (row[column] or "").strip().lower() == wanted.strip().lower()]
except (OSError, csv.Error, UnicodeDecodeError) as error:
    sys.exit(f"{file}: {error}")
for row in found[:20]:
    print("; ".join(f"{name}: {value}" for name, value in row.items()))
print(f"{len(found)} rows")
"""


def schema(name: str, description: str, /, **arguments: str) -> dict[str, Any]:
    """JSON schema of a tool, for chat templates. All `arguments` are texts; their values are descriptions."""
    properties = {key: {"type": "string", "description": text} for key, text in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


SCHEMAS = {
    "python": schema("python", "Run a Python program; what it prints comes back.", code="The program"),
    "shell": schema("shell", "Run a command of the shell.", command="The command"),
    "calculator": schema(
        "calculator", "The value of an expression of numbers.", expression="Such as 2*(3+4)"
    ),
    "table": schema(
        "table",
        "Rows of a CSV file whose column has a value.",
        file="Name of the file",
        column="Name of the column",
        value="What it has",
    ),
}
_PYTHON = ("python3", "-I", "-S", "-c")


def limits_of(config: SandboxConfig) -> Limits:
    """Convert a recipe's sandbox settings to limits."""
    return Limits(
        config.seconds,
        config.cpu_seconds,
        config.memory_mb << 20,
        config.processes,
        config.disk_mb << 20,
        output=config.output,
    )


class Tools:
    """Calls are answered by their commands' output. A turn without a call is the answer, right (reward 1) if
    it ends with the prompt's label. A row's `files`, text by path, are in the home when an episode begins.

    A class of your own adds tools to `known`, by `schema`, and defines their `command`.
    """

    known: ClassVar[Mapping[str, dict[str, Any]]] = SCHEMAS
    """Tools by name. `params.tools` chooses from them."""
    log: TrajectoryLog | None = None
    """The stage's log, if it logs its rollouts."""

    def __init__(self, tools: Sequence[str] = ("python",), sandbox: Mapping[str, Any] | None = None) -> None:
        self._names, self.sandbox = _check_params(self.known, tools, sandbox)
        self._boxes: Sandboxes | None = None
        self._recorded: RecordedSandbox | None = None
        self._box: Sandbox | None = None

    @classmethod
    def schemas(
        cls, tools: Sequence[str] = ("python",), sandbox: Mapping[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Return the schemas for the chat template. Raises `ConfigError` for an unknown tool or setting."""
        return [cls.known[name] for name in _check_params(cls.known, tools, sandbox)[0]]

    def reset(self, task: Task) -> Observation:
        """See `Environment`."""
        files = task.metadata.get("files") or {}
        if not isinstance(files, Mapping) or not all(
            isinstance(key, str) and isinstance(text, str) for key, text in files.items()
        ):
            raise ConfigError(
                f"files of prompt {safe_excerpt(task.uid)} are no object of texts by path; mend the data"
            )
        if sum(len(text.encode()) for text in files.values()) > _FILES_BYTES:
            raise ConfigError(
                f"files of prompt {safe_excerpt(task.uid)} have more than {_FILES_BYTES >> 20} MiB; use reads"
            )
        self._task, self._files = task, dict(files)
        self._boxes = shared_sandboxes(self.sandbox, self.log)
        confined = not self._boxes.substrate.allowed_attempts
        self._repeat = confined if self.sandbox.repeat is None else self.sandbox.repeat
        opened = sandbox_opener(self._boxes, f"{next(_numbers)}", self._files)
        if self.log is not None:
            # The other inputs of rewards, besides tools, limits and files.
            inputs = [type(self).__qualname__, task.prompt, list(task.messages), task.label, task.seed]
            digest = hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()
            settings = {"type": "tools", "tools": self._names, "task": digest}
            settings |= settings_of(self._boxes, self._files)
            self._recorded = RecordedSandbox(self.log, task.uid, settings, opened)
        self._open = opened
        return None

    async def step(self, action: Action) -> Step:
        """See `Environment`."""
        wrote = hashlib.sha256(action.text.encode(errors="surrogatepass")).hexdigest()
        recorded, log = self._recorded, self.log
        if recorded is None or log is None:
            return await self._run_step(action)
        logged = recorded.logged_episode.steps[action.turn : action.turn + 1]
        if logged and logged[0].action == wrote:
            recorded.skip_commands(action.turn)
            return Step(logged[0].observation, logged[0].reward, logged[0].done, logged[0].info)
        step = await self._run_step(action)
        logged_step = LoggedStep(
            action.turn, 0, wrote, step.observation, float(step.reward), step.done, dict(step.info)
        )
        log.log_step(self._task.uid, logged_step)
        return step

    async def _run_step(self, action: Action) -> Step:
        if not action.calls and not action.broken:
            label = self._task.label
            right = label is not None and _ends_with(action.text, str(label))
            return Step(reward=float(right), done=True)
        answers: list[Message] = [{"role": "tool", "content": f"error: {why}"} for why in action.broken]
        for number, call in enumerate(action.calls):
            if number >= MOST_CALLS:
                answer = f"error: only {MOST_CALLS} calls of a turn are answered"
            else:
                try:
                    answer = await self._answer_call(call, action.turn)
                except SandboxError as error:
                    box = self._recorded or self._box
                    if box is None or box.spent is None:
                        raise  # not the model's fault
                    return Step(done=True, info={"ended": str(error)})
            answers.append({"role": "tool", "name": call.name, "content": answer})
        if self._task.messages:
            return Step(answers)
        return Step("\n" + "\n".join(one["content"] for one in answers) + "\n")

    async def _answer_call(self, call: ToolCall, turn: int) -> str:
        """Return what the model reads of a call: its command's output, or an error."""
        if call.name not in self._names:
            return f"error: there is no tool {safe_excerpt(call.name)}; there are {', '.join(self._names)}"
        wanted = self.known[call.name]["function"]["parameters"]["required"]
        values = [call.arguments.get(name) for name in wanted]
        texts = [str(one) if isinstance(one, int | float) else one for one in values]
        if not all(isinstance(one, str) for one in texts):
            return f"error: {call.name} takes {' and '.join(wanted)}, each a text"
        if not all("\0" not in str(one) and len(str(one)) <= _LONGEST for one in texts):
            return f"error: {call.name} takes texts of at most {_LONGEST:,} characters, and no NUL among them"
        try:
            arguments = [str(one) for one in texts]
            b"".join(one.encode() for one in arguments)
        except UnicodeEncodeError:
            return f"error: the arguments of {call.name} are no text"
        words = tuple(self.command(call.name, arguments))
        fixed = call.name in self.sandbox.deterministic
        return _render_outcome(
            await self._run_command(
                Command(words, repeatable=self._repeat or fixed, deterministic=fixed), turn
            )
        )

    async def _run_command(self, command: Command, turn: int) -> Outcome:
        if self._recorded is not None:
            return await self._recorded.run(command, turn)
        if self._box is None:
            self._box = await self._open(None)
        return await self._box.exec(command.words, command.stdin, command.timeout)

    def command(self, tool: str, arguments: Sequence[str]) -> Sequence[str]:
        """Return a program and its arguments, whose output answers a call. `arguments`: those of the tool's
        schema, in its order.
        """
        return {
            "python": ("python3", "-c", *arguments),
            "shell": ("/bin/sh", "-c", *arguments),
            "calculator": (*_PYTHON, _CALCULATE, *arguments),
            "table": (*_PYTHON, _LOOK_UP, *arguments),
        }[tool]

    async def missing_programs(self) -> dict[str, list[str]]:
        """Return programs that its tools run and the sandbox lacks -> those tools. Raises `ConfigError` if
        its limits let no command run.
        """
        wanted: dict[str, list[str]] = {}
        for name in self._names:
            arguments = [""] * len(self.known[name]["function"]["parameters"]["required"])
            wanted.setdefault(self.command(name, arguments)[0], []).append(name)
        box = await sandbox_opener(shared_sandboxes(self.sandbox, None), f"{next(_numbers)}", {})(None)
        try:
            outcome = await box.exec(("/bin/sh", "-c", ":"))
            if outcome.exit != 0:
                reason = outcome.killed_by or outcome.stderr.decode(errors="replace").strip()
                raise ConfigError(
                    f"environment tools: not even an empty command of the shell runs within params.sandbox"
                    f" ({safe_excerpt(reason or f'exit status {outcome.exit}')}); raise its memory_mb,"
                    " processes or seconds"
                )
            lookups = {one: await box.exec(("/bin/sh", "-c", 'command -v "$0"', one)) for one in wanted}
        finally:
            await box.close()
        return {one: wanted[one] for one, lookup in lookups.items() if lookup.exit not in (0, None)}

    async def close(self) -> None:
        """See `Environment`."""
        for one in (self._recorded, self._box):
            if one is not None:
                await one.close()
        self._box = None


def _render_outcome(outcome: Outcome) -> str:
    """Return the outcome as text for the model."""
    if outcome.interrupted:
        return "error: the command was interrupted; files are as before it"
    text = outcome.stdout.decode(errors="replace")
    if outcome.stderr:
        text += outcome.stderr.decode(errors="replace")
    if outcome.cut:
        text += f"\n[{outcome.cut} bytes more]"
    if outcome.killed_by:
        return f"{text}\nerror: the command was ended: {outcome.killed_by}"
    return text if outcome.exit == 0 else f"{text}\nerror: exit status {outcome.exit}"


def _ends_with(text: str, label: str) -> bool:
    answer, label = text.strip().rstrip("."), label.strip()
    if not label or not answer.endswith(label):
        return False
    before = answer[: -len(label)]
    if label[0].isdigit() and re.search(r"\d[,/:]$", before):  # the end of 1,456 or of 1/2
        return False
    return not before[-1:].isalnum() and before[-1:] not in ("-", ".")


def _check_params(
    schemas: Mapping[str, Any], tools: Sequence[str], sandbox: Mapping[str, Any] | None
) -> tuple[list[str], SandboxConfig]:
    listed = isinstance(tools, list | tuple) and bool(tools) and all(isinstance(name, str) for name in tools)
    unknown = next((name for name in tools if name not in schemas), None) if listed else None
    if not listed or unknown is not None:
        wrong = f"there is no tool {safe_excerpt(unknown)}" if listed else "a list of tools is needed"
        raise ConfigError(f"environment tools: {wrong}; give some of {', '.join(schemas)} as params.tools")
    settings = {} if sandbox is None else sandbox
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"environment tools: params.sandbox is {safe_excerpt(settings)}, but takes a mapping; write"
            " its settings, such as {substrate: process}"
        )
    try:
        config = SandboxConfig.model_validate(settings)
    except ValidationError as error:
        faults = explain_errors(error, SandboxConfig, settings, {(): "params.sandbox"})
        raise ConfigError(f"environment tools: {faults}") from None
    unknown = next((name for name in config.deterministic if name not in tools), None)
    if unknown is not None:
        raise ConfigError(
            f"environment tools: params.sandbox.deterministic names {safe_excerpt(unknown)}, which is none of"
            f" params.tools; give some of {', '.join(tools)}"
        )
    return list(dict.fromkeys(tools)), config


_numbers = itertools.count()
_shared: dict[tuple[str, int], Sandboxes] = {}
_lock = threading.Lock()
_FOLDER = "opd-sandboxes-"


def shared_sandboxes(config: SandboxConfig, log: TrajectoryLog | None) -> Sandboxes:
    """The sandboxes of all episodes of this process with these settings, and their threads. Snapshots are
    stored next to `log`. Homes are in a folder for temporary files and are removed with the process.
    """
    key = json.dumps(config.model_dump(), sort_keys=True), 0 if log is None else id(log.store)
    with _lock:
        if key not in _shared:
            _remove_left()
            folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{process_name()}-"))
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            store = log.store if log is not None else SnapshotStore(folder / "snapshots")
            substrate = find_substrate(config.substrate, config.image)
            _shared[key] = Sandboxes(
                folder / "homes", store, limits_of(config), substrate=substrate, reads=config.reads
            )
        return _shared[key]


def _remove_left() -> None:
    """Remove homes of this user's killed processes."""
    for path in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*-*"):
        if is_left(path.name.removeprefix(_FOLDER).rpartition("-")[0]):
            with contextlib.suppress(OSError):
                if path.stat().st_uid == os.getuid():
                    remove_tree(path)
