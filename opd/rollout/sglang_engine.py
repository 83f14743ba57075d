"""The student on SGLang workers: how they are asked to write, and what their messages say."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opd.rollout import served_messages
from opd.rollout.adapter_workers import AdapterPush
from opd.rollout.served_engine import Dialect, ServedEngine, ServedModel, never_sampled
from opd.rollout.served_messages import Told
from opd.rollout.served_workers import Workers
from opd.rollout.sglang_adapters import SGLangAdapterVerbs
from opd.rollout.sglang_workers import SGLangVerbs
from opd.served.http_client import PoolOptions, UnavailableError
from opd.served.sglang_answers import most_bytes
from opd.types import RolloutRequest

if TYPE_CHECKING:
    from opd.rollout.served_workers import Push


class SGLangMessageReader(served_messages.MessageReader):
    """Messages may be cumulative or not, and say which version sampled each token."""

    def _told(self, message: Any) -> Told:
        self._refuse_error(message)
        meta: dict[str, Any] = message["meta_info"]
        entries = meta.get("output_token_logprobs") or []
        total = int(meta.get("completion_tokens", len(entries)))
        fresh = entries[self.seen :] if len(entries) == total else entries
        if self.seen + len(fresh) != total:
            raise UnavailableError(f"tokens of {self.uid} are missing", answered=True)
        self.cached_tokens = int(meta.get("cached_tokens") or 0)
        spans: Sequence[Mapping[str, Any]] = meta.get("weight_versions") or []

        def weights(place: int) -> Any:
            named = (s["version"] for s in spans if s["start"] <= place < s["end"])
            told = next(named, meta.get("weight_version"))
            return self.weights if self.base is not None and told == self.base else told

        finished = (meta.get("finish_reason") or {}).get("type", "")
        return Told([(entry[0], entry[1]) for entry in fresh], finished, weights)


class SGLangDialect(Dialect):
    """`POST /generate`."""

    path, reader = "/generate", SGLangMessageReader

    def __init__(self, model: ServedModel) -> None:
        self._never = never_sampled(model)

    def check(self, request: RolloutRequest) -> None:
        """They write everything: log-probabilities are at the temperature and before any cut."""

    def body(self, request: RolloutRequest, written: Sequence[int]) -> dict[str, Any]:
        """See `Dialect`."""
        sampling, named = request.sampling, f"{request.seed}/{request.uid}".encode()
        seed = int.from_bytes(hashlib.blake2b(named, digest_size=4).digest(), "big") >> 1
        return {
            "input_ids": [*map(int, request.prompt_ids), *written],
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "max_new_tokens": sampling.max_new_tokens - len(written),
                "stop_token_ids": list(sampling.stop_ids),
                "sampling_seed": seed,
                "skip_special_tokens": False,
                "no_stop_trim": True,
                **({"logit_bias": dict(self._never)} if self._never else {}),
            },
            "return_logprob": True,
            "stream": True,
        }

    def most_bytes(self, request: RolloutRequest) -> int:
        """See `Dialect`."""
        return most_bytes(self.body(request, []))


class SGLangEngine(ServedEngine):
    """See `ServedEngine`. Paused requests give their cache back and rebuild it with the new weights; with an
    `AdapterPush` they are ended, and written on after it.

    Args:
        options: The workers and limits.
        model: What they serve.
        push: How new weights get there; `None` cannot update weights.
        version: Of the weights they hold now; below 0 if they are to be given the first.
    """

    def __init__(
        self, options: PoolOptions, model: ServedModel, push: Push | None = None, version: int = 0
    ) -> None:
        alone = isinstance(push, AdapterPush)
        verbs = SGLangAdapterVerbs(model, push) if alone else SGLangVerbs(model)
        super().__init__(SGLangDialect(model), Workers(options, push, version, verbs), model)
