"""The student on vLLM workers: how they are asked to write, and what their messages say.

A stream is of one version throughout: a pause ends it, and what is left is asked for again after what has
arrived. What a server holds is asked for once a stream has begun, and again seen at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from opd.config.teachers import COLDEST
from opd.errors import RolloutError
from opd.foreign import shown
from opd.rollout import served_messages
from opd.rollout.adapter_workers import AdapterPush
from opd.rollout.served_engine import Dialect, ServedEngine, ServedModel, never_sampled
from opd.rollout.served_messages import Told
from opd.rollout.served_workers import Verbs, Workers
from opd.rollout.vllm_adapters import VLLMAdapterVerbs
from opd.rollout.vllm_workers import GENERATE, VLLMVerbs
from opd.served.http_client import PoolOptions, UnavailableError
from opd.types import RolloutRequest, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from opd.rollout.served_workers import Push

Mode = Literal["processed_logprobs", "raw_logprobs"]
"""What a server's log-probabilities are: at the temperature and after top-p and top-k, or at 1 and before."""
_NO_NUMBER = -9999.0
"""Told in place of minus infinity and of what is no number."""
_TOKEN_BYTES, _OTHER_BYTES = 512, 2**16


def is_cut(sampling: SamplingParams) -> bool:
    """Whether some tokens cannot be drawn. Greedy ones are not: the most likely is drawn anyway."""
    return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)


class VLLMMessageReader(served_messages.MessageReader):
    """Messages have the new tokens; the last names the weights that sampled all of them."""

    def _told(self, message: Any) -> Told | None:
        self._refuse_error(message)
        if not message["choices"]:
            return None
        (choice,) = message["choices"]
        ids = list(choice.get("token_ids") or [])
        told = (choice.get("logprobs") or {}).get("content") or []
        if [entry["token_id"] for entry in told] != ids:
            raise UnavailableError(f"{self.uid} got log-probabilities of other tokens", answered=True)
        numbers = [float(entry["logprob"]) for entry in told]
        finished = choice.get("finish_reason")
        named = {span["version"] for span in choice.get("weight_versions") or []}
        if finished != "abort" and named - {self.base or self.weights}:
            raise RolloutError(
                f"{self.uid} was sampled with weights {shown(sorted(map(str, named)))} in its middle, and not"
                " with this run's alone; let nobody else give its servers weights, and --resume."
            )
        entries = [
            (value if value > _NO_NUMBER else np.nan, id) for value, id in zip(numbers, ids, strict=True)
        ]
        return Told(entries, finished, lambda _: self.weights)


class VLLMDialect(Dialect):
    """`POST /inference/v1/generate`: token ids in and out. Noise is the servers' own: with a seed for each
    request vLLM draws row by row, and one on a CPU ends at the first prompt that it prefills in pieces.

    Args:
        model: What the servers serve.
        mode: What their log-probabilities are.
    """

    path, reader = GENERATE, VLLMMessageReader

    def __init__(self, model: ServedModel, mode: Mode) -> None:
        self._mode, self._never = mode, never_sampled(model)
        if self._never and mode == "raw_logprobs":
            raise RolloutError(
                f"the student's head has {len(self._never)} rows beyond its tokens, which vLLM counts in"
                " log-probabilities before top_p and top_k; leave these out, or take engine sglang or torch."
            )

    def check(self, request: RolloutRequest) -> None:
        """See `Dialect`."""
        sampling = request.sampling
        if 0 < sampling.temperature < COLDEST:
            raise RolloutError(
                f"request {request.uid!r}: vLLM takes temperature {COLDEST} in place of"
                f" {sampling.temperature:g}; raise it, or take engine sglang or torch."
            )
        if self._mode == "processed_logprobs" and is_cut(sampling):
            raise RolloutError(
                f"request {request.uid!r}: workers in the mode processed_logprobs tell what is left after"
                " top_p and top_k; leave these out, or set every temperature to 1."
            )
        if self._mode == "raw_logprobs" and sampling.temperature not in (0, 1):
            raise RolloutError(
                f"request {request.uid!r}: workers in the mode raw_logprobs tell log-probabilities at"
                " temperature 1; set it to that, or leave top_p and top_k out everywhere."
            )

    def body(self, request: RolloutRequest, written: Sequence[int]) -> dict[str, Any]:
        """See `Dialect`."""
        sampling = request.sampling
        cut = is_cut(sampling)
        return {
            "token_ids": [*map(int, request.prompt_ids), *written],
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p if cut else 1.0,
                "top_k": sampling.top_k if cut else 0,
                "max_tokens": sampling.max_new_tokens - len(written),
                "stop_token_ids": list(sampling.stop_ids),
                "ignore_eos": True,
                "logprobs": 0,
                "detokenize": False,
                **({"logit_bias": dict(self._never)} if self._never else {}),
            },
            "stream": True,
        }

    def most_bytes(self, request: RolloutRequest) -> int:
        """See `Dialect`."""
        return _OTHER_BYTES + _TOKEN_BYTES * request.sampling.max_new_tokens


class VLLMEngine(ServedEngine):
    """See `ServedEngine`. A pause ends what is being written, which is written on after it.

    Args:
        options: The workers and limits.
        model: What they serve.
        push: How new weights get there; `None` cannot update weights.
        version: Of the weights they hold now; below 0 if they are to be given the first.
        mode: What their log-probabilities are.
        outputs: What new weights say of the probe (`vllm_workers.Outputs`).
    """

    def __init__(
        self,
        options: PoolOptions,
        model: ServedModel,
        push: Push | None = None,
        version: int = 0,
        *,
        mode: Mode = "processed_logprobs",
        outputs: Callable[[Iterable[tuple[str, Tensor]]], np.ndarray] | None = None,
    ) -> None:
        verbs: Verbs = VLLMVerbs(model, mode, outputs)
        if isinstance(push, AdapterPush):
            verbs = VLLMAdapterVerbs(model, verbs, push)
        super().__init__(VLLMDialect(model, mode), Workers(options, push, version, verbs), model)
