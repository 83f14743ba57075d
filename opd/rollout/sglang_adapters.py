"""SGLang workers that are given adapters alone: how they are started, told and asked."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from functools import partial
from typing import Any

import numpy as np

from opd.config.train import USUAL_TARGETS, LoRAConfig
from opd.rollout.adapter_workers import AdapterPush, AdapterVerbs, fits
from opd.rollout.served_engine import ServedModel
from opd.rollout.served_workers import RETRY
from opd.rollout.sglang_workers import SGLangVerbs
from opd.rollout.weight_proof import FUSED
from opd.served.http_client import HTTPClient, RefusedError, Server
from opd.served.sglang_answers import PROBE, Question, check_finished, logprob_body, logprobs_of, most_bytes
from opd.served.vllm_server import tolerance

LEAVES = 0.05
"""Seconds in which what is aborted has left, mostly."""
ALL = "all"
"""In place of names: every layer that can be adapted."""


async def lacks(pool: HTTPClient, server: Server, lora: LoRAConfig) -> str | None:
    """What `server` was not started with that adapters of this form need; `None` if it will do. Raises
    `UnavailableError` and `RefusedError`.
    """
    told = await pool.ask(server, "GET", "/server_info") or {}
    targets = lora.targets or USUAL_TARGETS
    if told.get("enable_lora") is not True or not fits(told, "max_lora_rank", lora.rank):
        return f"--enable-lora --max-lora-rank {lora.rank} --lora-target-modules {' '.join(targets)}"
    there = told.get("lora_target_modules")
    there = [str(name) for name in there] if isinstance(there, list) else []
    if ALL not in there and not _fused(targets) <= _fused(there):
        return f"--lora-target-modules {' '.join(targets)}"
    return None if told.get("dp_size") in (None, 1) else "--dp-size 1"


class SGLangAdapterVerbs(AdapterVerbs):
    """See `AdapterVerbs`."""

    def __init__(self, model: ServedModel, push: AdapterPush) -> None:
        super().__init__(SGLangVerbs(model), push)
        self._rows = model.rows or model.vocabulary

    async def pause(self, server: Server) -> None:
        """See `Verbs`: what is being written is aborted: it would go on with the adapter it began with."""
        # A server that finds anything at work when it is told to pause looks again after a second.
        await self.ask(server, "POST", "/abort_request", {"abort_all": True})
        await asyncio.sleep(LEAVES)
        await self.ask(server, "POST", "/pause_generation", {"mode": "abort"})

    async def flush(self, server: Server) -> None:
        """See `Verbs`: it declines until what was aborted has left."""
        await RETRY.call_async(partial(super().flush, server), RefusedError)

    async def lacks(self, server: Server) -> str | None:
        """See `AdapterVerbs`."""
        return await lacks(self.pool, server, self._push.student.lora)

    async def tolerance(self, server: Server) -> float:
        """See `AdapterVerbs`."""
        return tolerance(await self.pool.ask(server, "GET", "/server_info"))

    async def score(self, server: Server, name: str) -> np.ndarray:
        """See `AdapterVerbs`."""
        body = logprob_body(Question("probe", PROBE, 0)) | self.named(name)
        answer = await self.pool.ask(server, "POST", "/generate", body, most_bytes(body))
        check_finished(answer)
        return logprobs_of(answer, PROBE, 0, self._rows)

    def named(self, name: str) -> dict[str, Any]:
        """See `AdapterVerbs`."""
        return {"lora_path": name}


def _fused(names: Collection[str]) -> set[str]:
    """Names of layers as a server keeps them."""
    whole = {part: fused for fused, parts in FUSED.items() for part in parts}
    return {whole.get(name, name) for name in names}
