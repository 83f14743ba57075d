"""The two forwards of the engine: prefill of whole prompts, decode of one token per running request.

Shapes: `B` running requests, `R` slots to prefill, `P` distinct sequences among them, `T` packed tokens, `D`
hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from opd.errors import ModelError
from opd.models.causal_lm import CausalLM
from opd.rollout import lean_decoder
from opd.rollout.batch import RunningBatch
from opd.rollout.cached_attention import DecodeAttention, PrefillAttention
from opd.rollout.kv_cache import KVCache, PromptKV

PREFILL_TOKENS = 4096
"""Packed tokens of one prefill forward (a longer single sequence gets one of its own)."""


@dataclass(slots=True)
class KeptPrompt:
    """A computed prompt whose next requests still wait for a slot."""

    tokens: bytes
    length: int
    kv: PromptKV
    hidden: Tensor
    """[D] last hidden state of its last token."""


class Runner:
    """Runs the model against the cache. Everything happens under `torch.inference_mode`."""

    def __init__(self, model: CausalLM, *, lean: bool | None = None) -> None:
        """`lean`: use the lean decoder; `None` uses it where it knows the model."""
        self.model = model
        self.cache = KVCache()
        self.prefilled_tokens = 0
        """Tokens that went through a prefill forward; a prompt shared by several requests counts once."""
        use_lean = lean_decoder.supports(model) if lean is None else lean
        self.lean = lean_decoder.LeanDecoder(model) if use_lean else None
        self._kept: KeptPrompt | None = None

    def refresh(self) -> None:
        """Take over new weights; nothing computed with the old ones is used again."""
        self.clear()
        if self.lean is not None:
            self.lean.refresh()

    def clear(self) -> None:
        """Drop every cached key and value."""
        self.cache.clear()
        self._kept = None

    def release(self) -> None:
        """Drop the cache and its memory."""
        self.cache = KVCache()
        self._kept = None

    def start(self, slots: int) -> None:
        """Lay the cache out for a new call."""
        self.cache.reset(slots)
        self._kept = None

    def decode(self, batch: RunningBatch, rows: int) -> Tensor:
        """[rows, D]: feed the newest token of each of the first `rows` slots."""
        ids, positions = batch.last_tokens(rows), batch.length[:rows] - 1
        attention = DecodeAttention(self.cache, positions, self.model.device)
        if self.lean is not None:
            return self.lean.step(ids, positions, self.cache, attention)
        return self.model.run(self._tensor(ids), self._tensor(positions), attention)

    def prefill(self, batch: RunningBatch, start: int, upcoming: bytes | None) -> Tensor:
        """[R, D]: compute all known tokens of the slots `start ... batch.size`; one row per slot.

        `upcoming`: the tokens of the next waiting request; if it shares the last slot's, they are kept for
        it.
        """
        sequences = [batch.known(row) for row in range(start, batch.size)]
        names = [sequence.tobytes() for sequence in sequences]
        shared = self._reuse(names, start)
        hidden = [] if shared is None else [shared]
        first = 0 if shared is None else len(shared)
        while first < len(sequences):
            first, computed = self._prefill_chunk(sequences, names, first, start)
            hidden.append(computed)
        rows = torch.cat(hidden)
        if upcoming is not None and upcoming == names[-1]:
            length = len(sequences[-1])
            self._kept = KeptPrompt(upcoming, length, self.cache.read(batch.size - 1, length), rows[-1])
        else:
            self._kept = None
        return rows

    def _reuse(self, names: list[bytes], start: int) -> Tensor | None:
        """Serve the leading slots that share the kept prompt from it: [r, D]; `None` if none is kept."""
        kept = self._kept
        if kept is None:
            return None
        count = next((i for i, name in enumerate(names) if name != kept.tokens), len(names))
        self.cache.write(slice(start, start + count), kept.kv)
        return kept.hidden.expand(count, -1)

    def _prefill_chunk(
        self, sequences: list[np.ndarray], names: list[bytes], first: int, start: int
    ) -> tuple[int, Tensor]:
        """Prefill from sequence `first` on, up to `PREFILL_TOKENS`; returns where it stopped and [r, D]."""
        distinct: dict[bytes, int] = {}
        source, chosen, tokens, stop = [], [], 0, first
        while stop < len(sequences):
            name, length = names[stop], len(sequences[stop])
            if name not in distinct:
                if chosen and tokens + length > PREFILL_TOKENS:
                    break
                distinct[name] = len(chosen)
                chosen.append(sequences[stop])
                tokens += length
            source.append(distinct[name])
            stop += 1
        lengths = np.array([len(ids) for ids in chosen], dtype=np.int64)
        places = np.array(source, dtype=np.int64)
        order = None if self.lean is None else self.lean.key_order
        attention = PrefillAttention(self.cache, lengths, places, start + first, order)
        positions = np.concatenate([np.arange(length) for length in lengths])
        hidden = self.model.run(self._tensor(np.concatenate(chosen)), self._tensor(positions), attention)
        self.prefilled_tokens += tokens
        self._check_layers()
        last = np.cumsum(lengths) - 1
        return stop, hidden[self._tensor(last[places])]

    def _check_layers(self) -> None:
        expected = self.model.config.get_text_config().num_hidden_layers
        if self.cache.layers != list(range(expected)):
            raise ModelError(
                f"{len(self.cache.layers)} of the {expected} layers of {self.model.config.model_type} have"
                " keys and values of their own; the embedded engine needs all of them to."
            )

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self.model.device)
