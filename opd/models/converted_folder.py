"""A model's weights in another form: a folder written anew in a dtype or as FP8 in blocks, and `FP8Weights`.

FP8 is what DeepSeek and Qwen publish and transformers reads: codes in e4m3 and a scale for each block of 128
x 128, here always a power of two. So MXFP4 becomes FP8 without loss, unless the numbers of a block lie
further apart than e4m3 reaches.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedConfig

from opd.errors import CheckpointError, ModelError, TrainingError
from opd.models.architecture import empty_model
from opd.models.hf_folder import LOADED, read_config, read_object
from opd.models.long_sequence import decoder_of
from opd.models.quantisation import KEYS, quantisation_of
from opd.models.quantised_weights import folder_parts, matrix_of
from opd.models.stored_form import StoredForm
from opd.storage.tensors import save_tensors
from opd.storage.weight_folder import INDEX, SINGLE
from opd.untrusted import safe_excerpt

FP8 = "fp8"
BLOCK = 128
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FORMS = (*_DTYPES, FP8)
"""What a folder can be written in."""
_SETTINGS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
"""What config.json says of FP8 in blocks."""
_BLOCKS = quantisation_of({KEYS[0]: _SETTINGS}, FP8)
_TOO_LARGE = 248 * 2.0**120
"""Between the largest codes of the largest scale that is used, 240 and 256: the latter is no float32."""
_FILE_BYTES = 1 << 30
"""Of tensors in memory before they are written to a file."""


@dataclass(slots=True)
class ConvertedWeights:
    """What a conversion did to the matrices that it changed."""

    numbers: int = 0
    """Of them."""
    rounded: int = 0
    """Those of the numbers that changed."""


def to_fp8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes in e4m3 of `matrix` [..., R, C] and scales [..., blocks of R, blocks of C] float32.

    A scale is the least power of two with which the largest number of its block is in reach. Raises
    `ValueError` for numbers that are not finite.
    """
    numbers = matrix.float()
    if not bool((numbers.abs() < _TOO_LARGE).all()):  # NaN is not
        raise ValueError("it holds NaN, infinity, or a number that FP8 makes infinite")
    rows, columns = numbers.shape[-2:]
    blocks = pad(numbers, (0, -columns % BLOCK, 0, -rows % BLOCK)).unflatten(-1, (-1, BLOCK))
    blocks = blocks.unflatten(-3, (-1, BLOCK))  # [..., blocks of R, BLOCK, blocks of C, BLOCK]
    largest = blocks.abs().amax(dim=(-3, -1))
    mantissa, exponent = torch.frexp(largest)  # in [0.5, 1), and 448 is 0.875 * 2 ** 9
    power = torch.where(largest > 0, exponent - 9 + (mantissa > 0.875).int(), 0).clamp(min=-126)
    half = power // 2  # in two factors, because numbers may need more than float32 has
    codes = blocks * _spread(_exp2(-half)) * _spread(_exp2(half - power))
    codes = codes.flatten(-2)[..., :columns].flatten(-3, -2)[..., :rows, :].to(torch.float8_e4m3fn)
    return codes, _exp2(power)


def fp8_numbers(matrix: Tensor) -> Tensor:
    """Return the numbers that `to_fp8` makes of `matrix`, [..., R, C] float32. Rounded again they stay. In
    bfloat16 they are exact unless a block's largest number is below 2 ** -115. Raises as `to_fp8` does.
    """
    assert _BLOCKS is not None
    return matrix_of(_BLOCKS, to_fp8(matrix), torch.float32)


def _exp2(exponents: Tensor) -> Tensor:
    """Two to the power of `exponents` int32 in -126 ... 127, exactly, in float32."""
    return (exponents + 127 << 23).view(torch.float32)


def _spread(factors: Tensor) -> Tensor:
    """One factor for each block, [..., blocks of R, 1, blocks of C, 1]."""
    return factors[..., :, None, :, None]


def convert_folder(source: Path, out: Path, form: str, progress: Callable[[str], None]) -> ConvertedWeights:
    """Write the model of `source` to the empty folder `out` in `form`, one of `FORMS`, tensor by tensor.

    In FP8 these are the matrices of layers, but not what chooses experts. Vectors stay as they are. Raises
    `CheckpointError` for a number that is not finite or a model without such matrices, and the errors of
    `read_config` and of reading weights.
    """
    converted, config = ConvertedWeights(), read_object(source / "config.json")
    config.pop(KEYS[0], None)
    if form != FP8:
        config.pop("torch_dtype", None)
        config["dtype"] = form
    files, module = _Files(out), empty_model(read_config(source), source)
    head = module.get_output_embeddings()  # files may not have it, if it is tied
    apart = [name for name, part in module.named_modules() if head is not None and part is head]
    assert _BLOCKS is not None
    for name, tensor, in_layer in _matrices(source, module):
        progress(name)
        if form == FP8 and in_layer:
            try:
                codes, scales = to_fp8(tensor)
            except ValueError as error:
                raise CheckpointError(f"{source}: {safe_excerpt(name)} cannot become FP8: {error}.") from None
            converted.numbers += tensor.numel()
            converted.rounded += int((matrix_of(_BLOCKS, [codes, scales], torch.float32) != tensor).sum())
            files.add({name: codes, f"{name}_scale_inv": scales})
            continue
        if tensor.ndim > 1 and tensor.is_floating_point():
            apart.append(name.removesuffix(".weight"))
            tensor = tensor.to(_DTYPES.get(form, tensor.dtype))
        files.add({name: tensor})
    if form == FP8:
        if not converted.numbers:
            raise CheckpointError(f"{source} {_NOTHING}")
        config[KEYS[0]] = _SETTINGS | {"modules_to_not_convert": sorted(set(apart))}
    files.close()
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    for name in sorted(LOADED - {"config.json", SINGLE, INDEX}):
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
    return converted


def _matrices(source: Path, module: Any) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield the tensors of `module`, the model in `source`, as numbers, and whether FP8 is for them."""
    form, parts, layers = StoredForm(module), folder_parts(source), _layers_of(module)
    left_out = form.left_out(parts)
    for name in parts:
        if name in left_out:
            continue
        target = form.place(name)
        inside = target.startswith(layers) and len(parts.shape(name)) > 1
        yield name, parts[name], inside and _is_linear(module, target)


def _layers_of(module: Any) -> str:
    """Return how the names of tensors of the module's layers begin."""
    decoder = decoder_of(module)
    return f"{next(name for name, part in module.named_modules() if part is decoder)}.layers."


_NOTHING = "has no matrix in its layers that FP8 is for (linear layers and experts); leave FP8 out."


class FP8Weights:
    """The weights of a module that `convert_folder` writes as FP8, and their numbers then.

    Blocks are those of the files' tensors, of which a module may have put several together. Raises
    `ModelError` for a model without such weights.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        module = empty_model(config, config.model_type)
        layers = _layers_of(module)
        self._form = StoredForm(module)
        self.names = frozenset(
            name for name in module.state_dict() if name.startswith(layers) and _is_linear(module, name)
        )
        """The module's names of them."""
        if not self.names:
            raise ModelError(f"a model of type {config.model_type} {_NOTHING}")

    def of_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the `weights` of a module, with the `numbers` of those that FP8 is for."""
        for name, tensor in weights:
            yield name, self.numbers(name, tensor) if name in self.names else tensor

    def numbers(self, name: str, tensor: Tensor) -> Tensor:
        """Return the `fp8_numbers` of the module's weight `name`, of all experts or some. Raises
        `TrainingError` for numbers that are not finite.
        """
        try:
            stored = self._form.of_files(name, tensor)
            parts = {part: fp8_numbers(one) for part, one in stored.items()}
        except ValueError as error:
            raise TrainingError(
                f"{name} cannot become FP8: {error}; lower the learning rate, or resume from a checkpoint."
            ) from None
        return parts[name] if parts.keys() == {name} else self._form.of_module(parts)[name]


_CHOOSERS = ("gate", "router", "classifier")
"""How the names of modules end that choose experts, which rounding would change."""


def _is_linear(module: Any, target: str) -> bool:
    """Return whether the module's tensor `target` multiplies tokens: a projection, or experts' ones."""
    path, _, last = target.rpartition(".")
    part = module.get_submodule(path)
    if isinstance(part, nn.Linear):
        return last == "weight" and not any(name.endswith(_CHOOSERS) for name in path.split("."))
    return hasattr(part, "num_experts") and last.endswith("proj")


class _Files:
    """The files of a folder's weights, each written once it is large enough."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, Tensor] = {}
        self._places: dict[str, str] = {}
        self._count = 0

    def add(self, tensors: dict[str, Tensor]) -> None:
        self._tensors |= tensors
        if sum(tensor.nbytes for tensor in self._tensors.values()) >= _FILE_BYTES:
            self._write()

    def close(self) -> None:
        """Write the last file, and the index."""
        self._write()
        index = {"metadata": {}, "weight_map": self._places}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")

    def _write(self) -> None:
        if not self._tensors:
            return
        self._count += 1
        name = f"model-{self._count:05d}.safetensors"
        save_tensors(self._folder / name, {key: one.contiguous() for key, one in self._tensors.items()})
        self._places |= dict.fromkeys(self._tensors, name)
        self._tensors = {}
