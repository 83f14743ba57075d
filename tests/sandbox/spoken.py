"""An agent that a tiny model can be: whatever it writes becomes a command of the shell."""

import dataclasses
from typing import Any

from opd.environments.protocol import Action, Step, Task, ToolCall
from opd.environments.tools import Tools


class Spoken(Tools):
    """Each turn is appended to a file, whose checksum is what the model is told and what it earns."""

    def __init__(self, turns: int = 2, pause: float = 0.0) -> None:
        super().__init__(["shell"], {"disk_mb": 4})
        self._turns, self._pause = turns, pause

    @classmethod
    def schemas(cls, **params: Any) -> list[dict[str, Any]]:
        """The model sees no tools."""
        return []

    def reset(self, task: Task) -> None:
        super().reset(dataclasses.replace(task, messages=()))

    async def step(self, action: Action) -> Step:
        """See `Tools`."""
        line = f"sleep {self._pause}; printf %s '{action.text}' >> said; cksum < said | cut -c1"
        calls = [ToolCall("shell", {"command": line})]
        return await super().step(dataclasses.replace(action, calls=calls))

    async def _run_step(self, action: Action) -> Step:
        step = await super()._run_step(action)
        said = "".join(sign for sign in str(step.observation) if sign.isdigit())[:1] or "0"
        return Step(f"={said}=", int(said) / 10, action.turn + 1 == self._turns)
