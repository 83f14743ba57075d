"""A Hugging Face causal language model with packed attention, a live head, and weights one can stream.

Shapes: `T` packed tokens, `B` sequences, `D` hidden size, `V` vocabulary.

The identity of named weights: sha256 over their names, shapes, dtypes and bytes, in their order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from opd.errors import ModelError
from opd.kernels.head import Head
from opd.models.attention import ATTENTION_NAME, Attend, PackedAttention
from opd.models.heads import check_attention, check_head, head_of
from opd.models.hf_folder import check_folder, scratch_config
from opd.models.hf_weights import load_module
from opd.models.long_sequence import WHOLE, LayerMemory, hidden_in_pieces, recomputed


class WeightsDigest:
    """The digest of weights that pass by."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """`weights`, as they are."""
        for name, tensor in weights:
            self._sha.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
            self._sha.update(raw_bytes(tensor).numpy().data)
            yield name, tensor

    def hex(self) -> str:
        """Of what has passed so far."""
        return self._sha.hexdigest()


def weights_digest(weights: Iterable[tuple[str, Tensor]]) -> str:
    """sha256 (hex) over the names, shapes, dtypes and bytes of `weights`, in their order."""
    digest = WeightsDigest()
    for _ in digest.watch(weights):
        pass
    return digest.hex()


def raw_bytes(tensor: Tensor) -> Tensor:
    """[nbytes] uint8 on the CPU: the bytes of `tensor`, shared where it lies there in order."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class CausalLM:
    """Wraps `module`, a Hugging Face `...ForCausalLM` whose attention implementation is "opd".

    Always in evaluation mode: dropout would make recomputed log-probabilities differ from the policy's.
    """

    def __init__(self, module: Any) -> None:
        """Check `module` on a few tokens; `ModelError` if its attention or head is of an unknown form."""
        self.module = module.eval()
        self.decoder = module.get_decoder()
        self.config = module.config.get_text_config()
        self.vocabulary: int | None = None
        """Tokens the tokenizer has; set it where a model pads its head, so that padding is never sampled."""
        self.pieces_checked = False
        """Whether it was seen to give the same in pieces as whole; see `long_sequence.check_pieces`."""
        check_attention(self)
        check_head(self)

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, dtype: str = "float32", device: str | torch.device = "cpu"
    ) -> CausalLM:
        """Load a Hugging Face folder of safetensors shards.

        Raises `CheckpointError` naming the file that is missing, truncated or corrupt, if the weights are
        pickles, or if they are not those that config.json describes; `ModelError` if the architecture is
        unknown or cannot be used.
        """
        folder = Path(path)
        check_folder(folder)
        module = load_module(folder, dtype=torch_dtype(dtype))
        return cls(module.to(torch_device(device)))

    @classmethod
    def from_config(
        cls,
        config: dict[str, Any],
        *,
        tokenizer: PreTrainedTokenizerBase,
        dtype: str = "float32",
        device: str | torch.device = "cpu",
        seed: int = 0,
    ) -> CausalLM:
        """A new model with random weights drawn from `seed`.

        `config` is `model_type` and arguments of that Hugging Face configuration; vocabulary size and special
        ids come from `tokenizer`. Raises `ModelError` for an unknown `model_type` or argument.
        """
        hf_config = scratch_config(config, tokenizer)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                module = AutoModelForCausalLM.from_config(
                    hf_config,
                    dtype=torch_dtype(dtype),
                    attn_implementation=ATTENTION_NAME,
                    trust_remote_code=False,
                )
        except (ValueError, RuntimeError, KeyError) as error:
            raise ModelError(f"model.config does not describe a causal language model: {error}") from error
        return cls(module.to(torch_device(device)))

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.module.parameters()).dtype

    @property
    def vocab_size(self) -> int:
        """Rows of the head; may exceed the tokenizer's vocabulary where a model pads it."""
        return int(self.module.get_output_embeddings().weight.shape[0])

    @property
    def parameter_count(self) -> int:
        """Number of parameters, tied ones once."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    def run(self, input_ids: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """Last hidden states after the final norm, [T, D], of `input_ids` [T] at `position_ids` [T].

        `attend` computes every layer's attention. Gradients flow unless the caller disables them.
        """
        if input_ids.numel() == 0:
            return torch.zeros(0, self.config.hidden_size, dtype=self.dtype, device=self.device)
        output = self.decoder(
            input_ids=input_ids.unsqueeze(0),
            position_ids=position_ids.unsqueeze(0),
            use_cache=False,
            attend=attend,
        )
        return output.last_hidden_state[0]

    def hidden(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor | np.ndarray | Sequence[int],
        memory: LayerMemory = WHOLE,
    ) -> Tensor:
        """[T, D]: `run` on sequences packed end to end, `cu_seqlens` [B + 1], no attention across them.

        `memory` says what is kept for a backward, and whether long sequences are run in pieces.
        """
        attend = PackedAttention(cu_seqlens)
        if memory.chunk is not None and memory.cuts(input_ids.numel()):
            return hidden_in_pieces(self, input_ids, position_ids, attend.bounds, memory.chunk)
        if memory.recompute and torch.is_grad_enabled():
            with recomputed(self.decoder.layers):
                return self.run(input_ids, position_ids, attend)
        return self.run(input_ids, position_ids, attend)

    def head(self, vocab_size: int | None = None) -> Head:
        """The head over the first `vocab_size` tokens (default: `vocabulary`, or all): a live view, so
        gradients reach the parameters."""
        return head_of(self.module, self.config, vocab_size or self.vocabulary)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the state in the module's order, detached, without copying; tied weights once."""
        aliases = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        for name, parameter in self.module.named_parameters():
            yield name, parameter.detach()
        for name, tensor in self.module.state_dict().items():
            if name not in aliases:
                yield name, tensor

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy `weights`, named as by `weights()`, in place.

        Raises `ModelError` naming a tensor that is unknown, missing or of another shape.
        """
        own = dict(self.weights())
        missing = set(own)
        for name, tensor in weights:
            if name not in own:
                raise ModelError(
                    f"{type(self.module).__name__} has no tensor {name}; the models differ in form."
                )
            if own[name].shape != tensor.shape:
                raise ModelError(
                    f"tensor {name} has shape {list(tensor.shape)} but the model needs"
                    f" {list(own[name].shape)}; the models differ in form."
                )
            own[name].copy_(tensor)
            missing.discard(name)
        if missing:
            raise ModelError(
                f"{len(missing)} tensors were not given, among them {min(missing)}; pass all weights."
            )

    def digest(self) -> str:
        """sha256 (hex) over the names, shapes, dtypes and bytes of `weights()`."""
        return weights_digest(self.weights())


def torch_dtype(name: str) -> torch.dtype:
    """`ModelError` for a name that is not in `DTYPES`."""
    if name not in DTYPES:
        raise ModelError(f"model.dtype {name!r} is not one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def torch_device(device: str | torch.device) -> torch.device:
    """`auto` is CUDA where there is one. CUDA without a number is the device this thread works on now, by its
    number: another thread works on another. `ModelError` for a device this machine does not have.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"model.device {device!r} is not a device; use auto, cpu or cuda.") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("model.device is cuda but this machine has no CUDA device; use auto or cpu.")
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found
