"""vLLM workers that are given adapters alone: how they are started, told and asked."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import numpy as np

from opd.config.teachers import least_rank
from opd.config.train import LoRAConfig
from opd.rollout.adapter_workers import AdapterPush, AdapterVerbs, fits
from opd.rollout.served_engine import ServedModel
from opd.rollout.served_workers import Verbs
from opd.rollout.vllm_workers import GENERATE
from opd.served.http_client import HTTPClient, RefusedError, Server
from opd.served.vllm_server import model_settings, probe, server_settings, tolerance

LOADS = "/v1"
"""Begins the paths by which adapters come and go."""
_OF_NOBODY = {"model": "opd-nobody", "token_ids": [2**31 - 1], "sampling_params": {"max_tokens": 1}}
"""Names an adapter that there is not, and a token that no model has: nothing is written of it."""


async def lacks(pool: HTTPClient, server: Server, lora: LoRAConfig) -> str | None:
    """What `server` was not started with that adapters of this form need; `None` if it will do. Raises
    `UnavailableError` and `RefusedError`.
    """
    told = (await server_settings(pool, server) or {}).get("lora_config")
    config = told if isinstance(told, dict) else {}
    if not fits(config, "max_lora_rank", lora.rank):
        return f"--enable-lora --max-lora-rank {least_rank(lora)}"
    if config.get("target_modules") is not None:
        return "no --lora-target-modules"
    try:
        await pool.ask(server, "POST", f"{LOADS}/load_lora_adapter", {})
    except RefusedError as refusal:
        if refusal.status in (403, 404, 405):
            return "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
    try:
        await pool.ask(server, "POST", GENERATE, _OF_NOBODY)
    except RefusedError as refusal:
        if refusal.status == HTTPStatus.NOT_FOUND:
            return None
    # It writes with the base alone what names an adapter that it has not.
    return "VLLM_SKIP_MODEL_NAME_VALIDATION=0 in its environment"


class VLLMAdapterVerbs(AdapterVerbs):
    """See `AdapterVerbs`."""

    def __init__(self, model: ServedModel, plain: Verbs, push: AdapterPush) -> None:
        super().__init__(plain, push)
        self._rows = model.rows or model.vocabulary

    async def pause(self, server: Server) -> None:
        """See `Verbs`."""
        await self.plain.pause(server)

    async def lacks(self, server: Server) -> str | None:
        """See `AdapterVerbs`."""
        return await lacks(self.pool, server, self._push.student.lora)

    async def tolerance(self, server: Server) -> float:
        """See `AdapterVerbs`."""
        return tolerance(await model_settings(self.pool, server))

    async def score(self, server: Server, name: str) -> np.ndarray:
        """See `AdapterVerbs`."""
        return await probe(self.pool, server, 0, self._rows, name)

    def named(self, name: str) -> dict[str, Any]:
        """See `AdapterVerbs`."""
        return {"model": name}
