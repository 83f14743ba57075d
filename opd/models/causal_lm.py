"""A Hugging Face causal language model with packed attention, a live head, and streamable weights.

Its limits are checked once, at load: an unsupported architecture is refused, and a probe proves that the head
has the form the kernels assume. The identity of named weights is sha256 over their names, shapes, dtypes and
bytes, in order.

Shapes: `T` packed tokens, `B` sequences, `D` hidden size, `V` vocabulary.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from opd.errors import ModelError, reason_of
from opd.kernels.head import Head
from opd.kernels.projection import speed_up
from opd.models.architecture import (
    PROBE_LOGIT,
    check_architecture,
    check_attention,
    check_pieces,
    head_form,
)
from opd.models.attention import ATTENTION_NAME, Attend, PackedAttention, install_attention
from opd.models.hf_folder import check_folder, read_config, scratch_config, weight_states
from opd.models.hf_weights import disable_padding, load_module
from opd.models.long_sequence import (
    WHOLE,
    ChunkedLayers,
    ChunkRunner,
    LayerMemory,
    decoder_of,
    final_norm,
    layers_of,
    recompute_layers,
)
from opd.models.routing import ExpertRouting, RoutedTokens, find_routing, routing_fault
from opd.models.stored_form import StoredForm

_PROBED_ROWS = 1 << 13


def head_of(module: Any, form: tuple[float, float | None], vocab_size: int | None = None) -> Head:
    """Return the head of `module` with scale and softcap `form`, over its first `vocab_size` tokens. It
    shares the module's parameters.

    Raises `ModelError` if the output embedding is missing, is not linear, or is smaller than `vocab_size`.
    """
    linear = module.get_output_embeddings()
    if not isinstance(linear, nn.Linear):
        raise ModelError(
            f"{type(module).__name__} has no linear output head ({type(linear).__name__}); only causal"
            " language models with one linear head can be used."
        )
    if vocab_size is not None and vocab_size > linear.weight.shape[0]:
        raise ModelError(
            f"the head of {type(module).__name__} has {linear.weight.shape[0]} rows, fewer than the"
            f" {vocab_size} tokens asked for; use the tokenizer the model was made for."
        )
    scale, softcap = form
    return Head(linear.weight, bias=linear.bias, scale=scale, softcap=softcap, vocab_size=vocab_size)


@torch.no_grad()
def check_head(model: CausalLM) -> None:
    """Compare the head, all its rows, with the model's own logits on a few tokens.

    The probe scales the last hidden states so that the largest logit is about `PROBE_LOGIT`. A missing or
    extra softcap then shows even at random weights. Raises `ModelError` if they differ.
    """
    head = head_of(model.module, model.head_form)
    ids = torch.arange(8, device=model.device) % model.vocab_size
    positions = torch.arange(8, device=model.device)
    hidden = model.run(ids, positions, PackedAttention([0, 8]))
    rows = head.weight.split(_PROBED_ROWS)  # all in float64 would take twice the weight's memory
    largest = max(float((hidden.double() @ some.double().T).abs().max()) for some in rows)
    gain = PROBE_LOGIT / max(largest * abs(head.scale), 1e-6)

    states: list[Tensor] = []

    def amplify(_module: nn.Module, _args: tuple, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state * gain
        states.append(output.last_hidden_state)
        return output

    handle = model.decoder.register_forward_hook(amplify)
    try:
        expected = model.module(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, attend=PackedAttention([0, 8])
        ).logits[0]
    finally:
        handle.remove()
    ours = head.logits(states[0][0])
    tolerance = 1e-3 if expected.dtype in (torch.float32, torch.float64) else 5e-2
    difference = float((ours - expected.to(ours.dtype)).abs().max())
    if not difference <= tolerance * max(1.0, float(expected.abs().max())):
        raise ModelError(
            f"the head of {type(model.module).__name__} is not of a known form: logits rebuilt from its"
            f" weight, bias, scale {head.scale:g} and softcap {head.softcap} differ from the model's own by"
            f" {difference:.3g}; this architecture cannot be trained exactly."
        )


PART_BYTES = 1 << 18
"""Bytes of a tensor copied and digested at a time, so that source and target fit a core's cache."""
STAGED_BYTES = 1 << 21
"""Bytes of each of two pinned buffers for a tensor on CUDA."""


class WeightsDigest:
    """Running digest of weights: sha256, or with `quick` xxh3-128, which is as fast as memory. The latter
    detects accidents, not tampering.

    The host digests weights on CUDA too. Engines on other machines and without a GPU must get the same
    digest, and devices have no xxh3.
    """

    def __init__(self, *, quick: bool = False) -> None:
        self._hash = xxhash.xxh3_128() if quick else hashlib.sha256()

    def add(self, name: str, tensor: Tensor) -> None:
        self._add_header(name, tensor)
        self._add_content(tensor)

    def add_copied(
        self, name: str, target: Tensor, source: Tensor, source_digest: WeightsDigest | None = None
    ) -> None:
        """Copy `source` into `target` of its shape. Add `target` as the next weight, and `source` to
        `source_digest`.
        """
        self._add_header(name, target)
        if source_digest is not None:
            source_digest._add_header(name, source)
        if target.dtype == source.dtype and _in_order(target) and _in_order(source):
            # Digest both while they are in the cache, so memory is read once, as by a copy.
            into, content = bytes_of(target), bytes_of(source)
            for start in range(0, len(into), PART_BYTES):
                part = slice(start, start + PART_BYTES)
                if source_digest is not None:
                    source_digest._hash.update(content[part])
                into[part] = content[part]
                self._hash.update(into[part])
            return
        if source_digest is not None:
            source_digest._add_content(source)
        target.copy_(source)
        self._add_content(target)

    def _add_header(self, name: str, tensor: Tensor) -> None:
        self._hash.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())

    def _add_content(self, tensor: Tensor) -> None:
        if tensor.device.type == "cuda":
            for part in _staged_chunks(tensor):
                self._hash.update(part)
        else:
            self._hash.update(bytes_of(tensor))

    def hex_digest(self) -> str:
        """Return the digest so far."""
        return self._hash.hexdigest()


class DigestedTensors:
    """An iterator of named tensors that digests each one before it yields it. After `take_digest` the
    consumer digests them, along with a copy.
    """

    def __init__(self, weights: Iterable[tuple[str, Tensor]], digest: WeightsDigest) -> None:
        self._weights = iter(weights)
        self._digest = digest
        self._is_handed_over = False
        self.nbytes = 0
        """Bytes of the tensors yielded so far."""

    def take_digest(self) -> WeightsDigest:
        """Return the digest. The caller adds every tensor from now on."""
        self._is_handed_over = True
        return self._digest

    def __iter__(self) -> DigestedTensors:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        name, tensor = next(self._weights)
        self.nbytes += tensor.nbytes
        if not self._is_handed_over:
            self._digest.add(name, tensor)
        return name, tensor


def weights_digest(weights: Iterable[tuple[str, Tensor]], *, quick: bool = False) -> str:
    """Return the `WeightsDigest` (hex) over names, shapes, dtypes and bytes of `weights`, in order."""
    digest = WeightsDigest(quick=quick)
    for name, tensor in weights:
        digest.add(name, tensor)
    return digest.hex_digest()


def tensors_of(module: nn.Module) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Return current parameters and buffers of `module`, each once. Without names it takes a quarter of
    `parameters()`' time.
    """
    parameters: dict[int, nn.Parameter] = {}
    buffers: dict[int, Tensor] = {}
    parts = [module]
    while parts:
        part = parts.pop()
        for one in part._parameters.values():
            if one is not None:
                parameters[id(one)] = one
        for one in part._buffers.values():
            if one is not None:
                buffers[id(one)] = one
        parts += [one for one in reversed(part._modules.values()) if one is not None]
    return list(parameters.values()), list(buffers.values())


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that ranks share, else the tensor, in the same memory."""
    return getattr(tensor, "_local_tensor", tensor)


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of the storages of `tensors`. Shared memory counts once, a sharded tensor its local shard."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        local = local_shard(tensor)
        if local.layout == torch.strided:
            storage = local.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        else:  # laid out for a library
            sizes[id(local)] = local.numel() * local.element_size()
    return sum(sizes.values())


def raw_bytes(tensor: Tensor) -> Tensor:
    """The bytes of `tensor` as `[nbytes]` uint8 on its device. Memory is shared if it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    # A single number is contiguous at any stride, but a byte view needs a stride of 1.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of `tensor`, without a copy if it is contiguous on the CPU.

    A view by numpy would stop torch from ever freeing the memory.
    """
    raw = raw_bytes(tensor.cpu())
    array = (ctypes.c_ubyte * raw.nbytes).from_address(raw.data_ptr())
    array.keeps = raw  # pyright: ignore[reportAttributeAccessIssue]
    return memoryview(array).cast("B")


def _in_order(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def _staged_chunks(tensor: Tensor) -> Iterator[memoryview]:
    """Yield a CUDA tensor's bytes in order. Each chunk is valid until the next, which is on its way."""
    flat = raw_bytes(tensor)
    parts = flat.split(STAGED_BYTES) if len(flat) else ()
    buffers = [torch.empty(len(part), dtype=torch.uint8, pin_memory=True) for part in parts[:2]]
    done = [torch.cuda.Event() for _ in buffers]

    def start_copy(index: int) -> None:
        buffers[index % 2][: len(parts[index])].copy_(parts[index], non_blocking=True)
        done[index % 2].record()

    for index in range(len(parts)):
        if index == 0:
            start_copy(0)
        if index + 1 < len(parts):
            start_copy(index + 1)
        done[index % 2].synchronize()
        yield buffers[index % 2][: len(parts[index])].numpy().data


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


StoredName = str | list[list[str]]


@dataclass(frozen=True, slots=True)
class UnreadWeights:
    """Location of weights that a model has not read yet."""

    folder: Path
    """A Hugging Face folder, or an adapter's."""
    device: torch.device
    """Device for the weights."""
    stored: dict[str, StoredName]
    """The module's name of each tensor -> its name in the folder's files, or those of each expert's parts."""
    form: StoredForm
    """The form in which these files hold the module's tensors."""


@dataclass(frozen=True, slots=True)
class Borrowed:
    """Weights of a model that others of this process compute with too, and nobody changes."""

    parameters: tuple[nn.Parameter, ...]
    digest: Callable[[], Tensor]
    """[32] uint8: of all weights of the model that has them, as `adapters.digest_tensor` says."""


class CausalLM:
    """Wraps `module`, a Hugging Face `...ForCausalLM` whose attention implementation is "opd".

    It is always in evaluation mode, because dropout would make recomputed log-probabilities differ from the
    policy's.
    """

    def __init__(self, module: Any, unread: UnreadWeights | None = None) -> None:
        """Check `module` on a few tokens, unless its weights are `unread`. Raises `ModelError` for an
        attention or head of unknown form.
        """
        speed_up(module)
        disable_padding(module)
        self.is_recurrent = install_attention(module)
        """True if layers carry a state from token to token."""
        self.module = module.eval()
        self.decoder = decoder_of(module)
        self.config = module.config.get_text_config()
        self.head_form = head_form(self.config)
        self.vocabulary: int | None = None
        """The tokenizer's vocabulary size. Set it if a model pads its head, so that padding is never
        sampled."""
        self.kv_numbers = 0
        """Numbers in the keys and values of a token over all layers, measured by the check."""
        self.state_bytes = 0
        """Bytes of the states of a sequence in layers that carry some, measured by the check."""
        self.pieces_checked = False
        """True after `check_pieces` found equal results in chunks."""
        self.compiled: Callable[[Sequence[nn.Module]], AbstractContextManager[None]] | None = None
        """Lets layers run as compiled code, in training; `compiled_layers.compiled_layers`."""
        self.unread = unread
        """Set while the parameters are on the meta device; see `sharded.fill_shards`."""
        self.borrowed: Borrowed | None = None
        """Those of its parameters that are not its own."""
        self.read_states: list[tuple[int, ...]] | None = None
        """`weight_states` of its folder when it was read, if it is one's."""
        self._vacated: dict[nn.Parameter, torch.Size] = {}
        found = find_routing(self.module)
        self._routing = found if isinstance(found, ExpertRouting) else None
        self._unroutable = found if isinstance(found, str) else None
        self._routing_tried = False
        if unread is None:
            self.check()

    def mark_filled(self) -> None:
        """Mark the weights, or this rank's share, as read. All ranks call it together."""
        self.unread = None

    def check(self) -> None:
        """Check the model on a few tokens. Raises `ModelError` for an attention or head of unknown form."""
        check_attention(self)
        check_head(self)

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, dtype: str = "float32", device: str | torch.device = "cpu"
    ) -> CausalLM:
        """Load a Hugging Face folder of safetensors shards.

        Raises `CheckpointError` naming a file that is missing, truncated or corrupt, if the weights are
        pickles, or if they do not match config.json. Raises `ModelError` if the architecture is unknown or
        cannot be used.
        """
        folder = Path(path)
        states = weight_states(folder)
        check_folder(folder)
        check_architecture(read_config(folder), folder)
        module = load_module(folder, dtype=torch_dtype(dtype))
        model = cls(module.to(torch_device(device)))
        model.read_states = states
        return model

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
        """Build a new model with random weights drawn from `seed`.

        `config` is `model_type` and arguments of that Hugging Face configuration. Vocabulary size and special
        ids come from `tokenizer`. Raises `ModelError` for an unknown `model_type` or argument.
        """
        hf_config = scratch_config(config, tokenizer)
        check_architecture(hf_config, "model.config")
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
            raise ModelError(
                f"model.config does not describe a causal language model: {reason_of(error)}"
            ) from error
        return cls(module.to(torch_device(device)))

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder's layers, empty if the family does not keep them in one list."""
        return layers_of(self.decoder)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device if self.unread is None else self.unread.device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.module.parameters()).dtype

    @property
    def vocab_size(self) -> int:
        """Rows of the head. A padded head has more than the tokenizer's vocabulary."""
        return int(self.module.get_output_embeddings().weight.shape[0])

    @property
    def parameter_count(self) -> int:
        """Number of parameters, tied ones counted once."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def routing(self) -> ExpertRouting | None:
        """Its routed blocks, `None` without experts or if `unroutable` says why. The first use runs a few
        tokens, so all ranks make it together.
        """
        if self._routing is not None and not self._routing_tried:
            self._routing_tried = True
            self._unroutable = routing_fault(self, self._routing)
            if self._unroutable is not None:
                self._routing = None
        return self._routing

    @property
    def unroutable(self) -> str | None:
        """Why choices of its experts cannot be recorded and replayed, as the end of a sentence."""
        return self._unroutable if self.routing is None else None

    def run(self, input_ids: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """The last hidden states after the final norm, [T, D], of `input_ids` [T] at `position_ids` [T].

        `attend` computes every layer's attention. Gradients flow unless the caller disables them.
        """
        if input_ids.numel() == 0:
            return torch.zeros(0, self.config.hidden_size, dtype=self.dtype, device=self.device)
        replayed = {} if self._routing is None else self._routing.arguments(len(input_ids))
        output = self.decoder(
            input_ids=input_ids.unsqueeze(0),
            position_ids=position_ids.unsqueeze(0),
            use_cache=False,
            attend=attend,
            **replayed,
        )
        return output.last_hidden_state[0]

    def run_pieces(self, input_ids: Tensor, position_ids: Tensor, pieces: ChunkRunner) -> Tensor:
        """Return `[T, D]`, `run` with the layers in `pieces`. Without a gradient (a prefill) every layer
        overwrites one `[T, D]`.
        """
        with pieces.install_layers(self.layers, final_norm(self.decoder)):
            return self.run(input_ids, position_ids, pieces)

    def hidden(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor | np.ndarray | Sequence[int],
        memory: LayerMemory = WHOLE,
        routed: RoutedTokens | None = None,
    ) -> Tensor:
        """`[T, D]`, `run` on sequences packed end to end, `cu_seqlens` [B + 1], no attention across them.

        `memory` sets recomputation and the chunk length for long sequences. `routed` tokens go to the experts
        that it names. Raises `ModelError` if the architecture's layers cannot be called in chunks.
        """
        attend = PackedAttention(cu_seqlens)
        if memory.chunk is not None and memory.runs_chunked(input_ids.numel()):
            with nullcontext() if self._routing is None else self._routing.paused():
                check_pieces(self)
            pieces = ChunkedLayers(attend.bounds, memory.chunk)
            with self.replaying(routed), self.layers_as_compiled():
                return self.run_pieces(input_ids, position_ids, pieces)
        with self.replaying(routed), self.layers_as_compiled(recompute=memory.recompute):
            return self.run(input_ids, position_ids, attend)

    def replaying(self, routed: RoutedTokens | None) -> AbstractContextManager[None]:
        """Return `ExpertRouting.replay` of `routed`, or a block that does nothing without. Raises
        `ModelError` if the model's choices of experts cannot be replayed.
        """
        if routed is None:
            return nullcontext()
        if self.routing is None:
            raise ModelError(f"{type(self.module).__name__} {self.unroutable or 'has no experts'}.")
        return self.routing.replay(routed)

    @contextmanager
    def layers_as_compiled(self, recompute: bool = False) -> Iterator[None]:
        """While the block runs, the layers are compiled if they are `compiled` and no choices of experts are
        recorded or replayed. With `recompute` they save only their input for a backward.
        """
        with ExitStack() as undo:
            if self.compiled is not None and not (self._routing is not None and self._routing.is_active):
                undo.enter_context(self.compiled(self.layers))
            if recompute and torch.is_grad_enabled():
                undo.enter_context(recompute_layers(self.layers))
            yield

    def head(self, vocab_size: int | None = None) -> Head:
        """Return the head over the first `vocab_size` tokens (default: `vocabulary`, or all). It is a live
        view, so gradients reach the parameters."""
        return head_of(self.module, self.head_form, vocab_size or self.vocabulary)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the state in the module's order, detached, without copying; tied weights
        once.
        """
        state, yielded = self.module.state_dict(keep_vars=True), set()
        for name, tensor in state.items():
            if isinstance(tensor, nn.Parameter) and id(tensor) not in yielded:
                yielded.add(id(tensor))
                yield name, tensor.detach()
        for name, tensor in state.items():
            if not isinstance(tensor, nn.Parameter):
                yield name, tensor.detach()

    @torch.no_grad()
    def load_weights(
        self, weights: Iterable[tuple[str, Tensor]], digest: WeightsDigest | None = None
    ) -> None:
        """Copy `weights`, named as by `weights()`, in place. `digest` adds the copied weights, each tensor
        while it is in the cache.

        Raises `ModelError` naming a tensor that is unknown, missing or of another shape.
        """
        vacated, self._vacated = self._vacated, {}
        for parameter, shape in vacated.items():
            parameter.data = parameter.new_empty(shape)
        targets = dict(self.weights())
        missing = set(targets)
        source_digest = (
            weights.take_digest() if digest is not None and isinstance(weights, DigestedTensors) else None
        )
        for name, tensor in weights:
            if name not in targets:
                raise ModelError(
                    f"{type(self.module).__name__} has no tensor {name}; the models differ in form."
                )
            if targets[name].shape != tensor.shape:
                raise ModelError(
                    f"tensor {name} has shape {list(tensor.shape)} but the model needs"
                    f" {list(targets[name].shape)}; the models differ in form."
                )
            if digest is None:
                targets[name].copy_(tensor)
            else:
                digest.add_copied(name, targets[name], tensor, source_digest)
            missing.discard(name)
        if missing:
            raise ModelError(
                f"{len(missing)} tensors were not given, among them {min(missing)}; pass all weights."
            )

    def free_weights(self) -> None:
        """Free the memory of the weights, until `load_weights` brings all of them again."""
        for parameter in self._loaded_parameters():
            if parameter not in self._vacated:
                self._vacated[parameter] = parameter.shape
                parameter.data = parameter.new_empty(0)

    def _loaded_parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters that `load_weights` writes."""
        return self.module.parameters()

    @property
    def nbytes(self) -> int:
        """Memory that its weights take now, without those that are not its own."""
        parameters, buffers = tensors_of(self.module)
        return self.own_bytes((*parameters, *buffers))

    def own_bytes(self, tensors: Iterable[Tensor]) -> int:
        """`held_bytes` of those of `tensors` that do not lie where borrowed weights do."""
        if self.borrowed is None:
            return held_bytes(tensors)
        places = {parameter.untyped_storage().data_ptr() for parameter in self.borrowed.parameters}
        return held_bytes(t for t in tensors if t.untyped_storage().data_ptr() not in places)

    def digest(self) -> str:
        """The sha256 (hex) over names, shapes, dtypes and bytes of `weights()`, the model's identity."""
        return weights_digest(self.weights())

    def quick_digest(self) -> str:
        """Return the same digest by xxh3-128, to compare with the sent weights."""
        return weights_digest(self.weights(), quick=True)


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype by name. Raises `ModelError` for a name that is not in `DTYPES`."""
    if name not in DTYPES:
        raise ModelError(f"model.dtype {name!r} is not one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def _is_there(device: torch.device) -> bool:
    if device.type == "cpu":
        return True
    if device.type == "cuda":
        return torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
    try:
        torch.empty(1, device=device)
        return device.type != "meta"
    except (RuntimeError, AssertionError, NotImplementedError):  # errors of torch for an absent device
        return False


def torch_device(device: str | torch.device) -> torch.device:
    """Resolve `auto` to CUDA if there is one. CUDA without an index becomes this thread's current device with
    its index, because another thread may use another. Raises `ModelError` for an absent device.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"model.device {device!r} is not a device; use auto, cpu or cuda.") from error
    if not _is_there(resolved):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        devices = f"{count} CUDA devices" if count else "no CUDA device"
        raise ModelError(
            f"model.device is {str(device)!r}, and this process sees {devices}; use auto or cpu."
        )
    if resolved.type == "cuda" and resolved.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return resolved
