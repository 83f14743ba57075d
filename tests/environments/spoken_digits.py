"""An environment of the library verifiers: a digit is to be said, in as many turns as its program asks for.

It is loaded by the library in a process that has it, and by nothing else.
"""

from __future__ import annotations

import verifiers.v1 as vf
from openai import AsyncOpenAI


class DigitData(vf.TaskData):
    wanted: str


class DigitTask(vf.Task[DigitData]):
    @vf.reward(weight=0.5)
    async def says(self, trace: vf.Trace) -> float:
        print("what is printed is no answer")
        return float(self.data.wanted in trace.last_reply)

    @vf.reward
    async def always(self, trace: vf.Trace) -> float:
        return 0.25

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class DigitTaskset(vf.Taskset[DigitTask]):
    def load(self):
        for digit in "0123456789":
            yield DigitTask(DigitData(prompt=f"say {digit}", wanted=digit), self.config.task)


class DigitHarnessConfig(vf.HarnessConfig):
    turns: int = 2
    fails: str = ""
    """What the program raises."""


class DigitHarness(vf.Harness[DigitHarnessConfig]):
    """Runs no program, and nothing that the model writes."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        if self.config.fails:
            raise RuntimeError(self.config.fails)
        messages = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for turn in range(self.config.turns):
                answer = await client.chat.completions.create(
                    model=ctx.model, messages=messages, max_tokens=6
                )
                said = answer.choices[0].message.content or ""
                messages += [
                    {"role": "assistant", "content": said},
                    {"role": "user", "content": f"again {turn}"},
                ]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["DigitHarness", "DigitTaskset"]
