"""vLLM workers: their verbs, how they read new weights, and how they prove that they hold them.

They tell checksums of the tensors that they hold as they were given. On a CPU they pack linear layers away:
what is in those is proved by outputs, the log-probabilities of a probe, which must be those that the new
weights give here. A worker calls weights by their name once they are proved, and not before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from opd.config.teachers import SPECULATES
from opd.errors import RolloutError
from opd.foreign import decoding, shown
from opd.models.sharded import Root, open_empty
from opd.rollout import served_workers
from opd.rollout.adapted_student import probe_logprobs
from opd.rollout.served_engine import ServedModel
from opd.rollout.served_workers import Ask, ExpectedAnswers, Newest, Verbs
from opd.rollout.weight_proof import apart_at_most, check_config, check_form
from opd.served.http_client import RefusedError, Server, UnavailableError
from opd.served.vllm_answers import model_of
from opd.served.vllm_server import OF_NOTHING, checksums, model_settings, probe, server_settings, tolerance

if TYPE_CHECKING:
    from torch import Tensor

GENERATE = "/inference/v1/generate"
_READING = ".reading"
"""Ends the name of weights that are not proved yet."""


async def read_folder(ask: Ask, server: Server, name: str, folder: Path) -> None:
    """Have `server`, which ends if it cannot, take the weights in a folder that it sees. See `Push.load`."""
    await ask(server, "POST", "/update_weight_version", {"new_version": name + _READING})
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    done = await ask(server, "POST", "/collective_rpc", body)
    if not isinstance(done, dict) or "results" not in done:
        raise RolloutError(f"{server.url} did not take the weights {name}; look at its log.")
    await _drop_cache(ask, server)


class VLLMFolderPush(served_workers.FolderPush):
    """See `served_workers.FolderPush`."""

    async def _read(self, ask: Ask, server: Server, name: str, folder: Path) -> None:
        await read_folder(ask, server, name, folder)


async def _drop_cache(ask: Ask, server: Server) -> None:
    done = await ask(server, "POST", "/reset_prefix_cache?reset_running_requests=true", {})
    if not (done or {}).get("success"):
        raise UnavailableError(f"{server.url} has not dropped its cache", answered=True)


class Outputs:
    """What a model of the student's form says of the probe, with any weights.

    Args:
        model: A Hugging Face folder of that form, of which no weights are read.
        dtype: Of the weights.
    """

    def __init__(self, model: Path, dtype: str) -> None:
        self._model = open_empty(model, dtype=dtype)

    def __call__(self, weights: Iterable[tuple[str, Tensor]]) -> np.ndarray:
        """[len(PROBE) - 1] float32: log-probabilities of its tokens, one forward pass on the CPU."""
        compute = partial(probe_logprobs, self._model)
        with torch.no_grad():
            given = {f"module.{name}": tensor for name, tensor in weights}
            return torch.func.functional_call(Root(self._model.module), given, (compute,)).float().numpy()


class VLLMVerbs(Verbs):
    """See `Verbs`.

    Args:
        model: What they serve.
        mode: The `--logprobs-mode` they have to be started with.
        outputs: See `Outputs`; `None` cannot prove new weights.
    """

    pause_ends_streams = True

    def __init__(
        self,
        model: ServedModel,
        mode: str,
        outputs: Callable[[Iterable[tuple[str, Tensor]]], np.ndarray] | None = None,
    ) -> None:
        super().__init__(model.config)
        self._model, self._mode = model, mode
        self._expected = None if outputs is None else ExpectedAnswers(outputs)
        self._asked: dict[str, asyncio.Task[str]] = {}
        """By URL, who will ask what a server holds, and has not yet."""
        self._asking: dict[str, asyncio.Lock] = {}

    async def pause(self, server: Server) -> None:
        """See `Verbs`: what is being written is aborted, and every cached key and value dropped."""
        await self.ask(server, "POST", "/pause?mode=abort", {})

    async def flush(self, server: Server) -> None:
        """See `Verbs`."""
        await _drop_cache(self.pool.ask, server)

    async def go_on(self, server: Server) -> None:
        """See `Verbs`."""
        await self.ask(server, "POST", "/resume", {})

    async def held(self, server: Server) -> str:
        """See `Verbs`."""
        return str((await self.pool.ask(server, "GET", "/weight_info")).get("weight_version"))

    async def weights_of(self, server: Server) -> str:
        """See `Verbs`: `held`, asked after this call; who calls meanwhile shares the next answer."""
        waiting = self._asked.get(server.url)
        if waiting is None:
            waiting = self._asked[server.url] = asyncio.create_task(self._held_in_turn(server))
            waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(waiting)

    async def _held_in_turn(self, server: Server) -> str:
        async with self._asking.setdefault(server.url, asyncio.Lock()):
            del self._asked[server.url]
            return await self.held(server)

    async def settle(self, server: Server, name: str) -> None:
        """See `Verbs`."""
        await self.ask(server, "POST", "/update_weight_version", {"new_version": name})

    async def release(self, server: Server, parts: list[str]) -> None:
        """See `Verbs`."""
        raise RolloutError("vLLM workers do not sleep; leave runtime.offload.engine out.")

    take = release

    async def check_settings(self, server: Server) -> None:
        """Whether it tells what it holds, as many tokens as a request may have, and log-probabilities as they
        are needed.
        """
        config = await server_settings(self.pool, server)
        if config is None:
            raise RolloutError(
                f"{server.url} tells nothing of its settings and takes no weights; start it with"
                " VLLM_SERVER_DEV_MODE=1 in its environment."
            )
        if config.get("speculative_config") is not None:
            raise RolloutError(
                f"{server.url} speculates: {SPECULATES}; start it without --speculative-config."
            )
        told = config["model_config"]
        if (mode := told.get("logprobs_mode")) != self._mode:
            raise RolloutError(
                f"{server.url} tells {shown(mode)}, and the recipe's temperature, top_p and top_k need"
                f" {self._mode}; start it with --logprobs-mode {self._mode}."
            )
        most = told.get("max_model_len")
        if not isinstance(most, int) or most < self._model.max_sequence:
            raise RolloutError(
                f"{server.url} takes {shown(most)} tokens a request, and responses may need"
                f" {self._model.max_sequence}; start it with --max-model-len {self._model.max_sequence}."
            )
        try:
            await self.pool.ask(server, "POST", GENERATE, {})
        except RefusedError as refusal:
            if refusal.status == 401:
                raise RolloutError(f"{server.url} does not take the key; check api_key_env.") from None
            if refusal.status in (403, 404):
                raise RolloutError(
                    f"{server.url} does not take token ids ({refusal}); start it with --enable-scale-out,"
                    " as vLLM 0.32 has it."
                ) from None

    async def check_form(self, server: Server, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Verbs`."""
        path, _ = model_of(await self.pool.ask(server, "GET", "/v1/models"))
        info: Mapping[str, Any] = {"model_path": path}
        check_config(server.url, info, self.config)
        ranks, packed = await self._ranks(server)
        if len(ranks) == 1:
            check_form(server.url, info, [*ranks[0]["checksums"], *packed], weights)

    async def verify(self, server: Server, newest: Newest) -> None:
        """Compare checksums where there are any, and the outputs."""
        settings = await model_settings(self.pool, server) or {}
        ranks, packed = await self._ranks(server)
        dtype = str(settings.get("dtype")).removeprefix("torch.")
        with decoding(lambda cause: RolloutError(f"{server.url}/weight_checker answered {cause}.")):
            await asyncio.to_thread(
                newest.proof.check, server.url, ranks, {"dtype": dtype, "device": "cpu"}, packed
            )
        due = await asyncio.to_thread(self._due, newest)
        await self.go_on(server)  # paused it scores nothing; nobody asks it for anything else meanwhile
        try:
            said = await probe(self.pool, server, 0, self._model.rows or self._model.vocabulary)
        finally:
            await self.pause(server)
        apart = float(np.abs(said - due).max())
        if not apart <= apart_at_most(tolerance(settings), newest.prepared.weights):
            raise RolloutError(
                f"after the push {server.url} holds other weights than the trainer: its log-probabilities of"
                f" a few tokens differ by up to {apart:.3g} nats; restart it and --resume."
            )

    def _due(self, newest: Newest) -> np.ndarray:
        if self._expected is None:
            raise RolloutError("the engine cannot prove new weights; make it with Outputs.")
        return self._expected.of(newest)

    async def _ranks(self, server: Server) -> tuple[list[dict[str, Any]], set[str]]:
        """Of each rank its place and its tensors' checksums, and the names of what is packed away."""
        told = await checksums(self.pool, server) or {}
        ranks: dict[tuple[str, int], dict[str, str]] = {}
        packed: set[str] = set()
        with decoding(lambda cause: RolloutError(f"{server.url}/weight_checker answered {cause}.")):
            for key, checksum in told.items():
                data, *_, tensor, name = key.split(":", 4)
                name = name.replace(".base_layer.", ".")  # of one that adapters are applied to
                if checksum == OF_NOTHING:
                    packed.add(name)
                else:
                    ranks.setdefault((data, int(tensor.removeprefix("tp"))), {})[name] = checksum
        size = 1 + max((rank for _, rank in ranks), default=0)
        found = [
            {"checksums": own, "parallelism_info": [{"tp_rank": rank, "tp_size": size}]}
            for (_, rank), own in sorted(ranks.items())
        ]
        return found, packed
