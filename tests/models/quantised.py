"""Quantised folders, made here from plain ones: codes, scales and numbers of every format that is read.

The numbers are computed by other means than those of the code: by tables of each format's definition.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FILE = "model.safetensors"
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1_CODES = torch.cat([E2M1, -E2M1]).double()
"""[16] float64: what each code of four bits is."""
Stored = dict[str, Tensor]
Made = tuple[Stored, Tensor]
"""The tensors of a matrix by name, and its numbers [R, C] float64."""


def e4m3_codes() -> Tensor:
    """[256] float64: what each code of eight bits is, by its sign, exponent and mantissa."""
    codes = torch.arange(256)
    sign, exponent, mantissa = codes >> 7, codes >> 3 & 15, (codes & 7).double()
    normal = (1 + mantissa / 8) * torch.exp2(exponent.double() - 7)
    values = torch.where(exponent == 0, mantissa / 8 * 2.0**-6, normal) * (1 - 2 * sign.double())
    values[codes & 127 == 127] = float("nan")
    return values


E4M3_CODES = e4m3_codes()


def blocks_of(weight: Tensor, rows: int, columns: int) -> Tensor:
    """[blocks of rows, blocks of columns]: the largest size in each block of `weight` [R, C]."""
    high, wide = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
    room = torch.zeros(high * rows, wide * columns)
    room[: weight.shape[0], : weight.shape[1]] = weight.abs()
    return room.view(high, rows, wide, columns).amax(dim=(1, 3))


def spread(scales: Tensor, rows: int, columns: int, shape: tuple[int, ...]) -> Tensor:
    """[R, C]: each scale at all places of its block."""
    return scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]


def fp8(
    weight: Tensor, rows: int, columns: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales (in e8m0 powers of two) and numbers."""
    scales = (blocks_of(weight, rows, columns) / 448).clamp(min=1e-12)
    scales = scales.log2().ceil().exp2() if dtype == torch.float8_e8m0fnu else scales
    scales = scales.to(dtype)
    whole = spread(scales.double(), rows, columns, tuple(weight.shape))
    codes = (weight / whole.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, scales, E4M3_CODES[codes.view(torch.uint8).int()] * whole


def nibbles(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """[R, C / 2] uint8: the nearest e2m1 of each number, two in a byte, the first below; and values."""
    nearest = (scaled.abs()[..., None] - E2M1).abs().argmin(dim=-1) + 8 * (scaled < 0)
    return (nearest[..., 0::2] | nearest[..., 1::2] << 4).to(torch.uint8), E2M1_CODES[nearest]


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, exponents of two for blocks of 32, and numbers."""
    exponents = (blocks_of(weight, 1, 32) / 6).clamp(min=2.0**-126).log2().ceil()
    whole = spread(exponents.double().exp2(), 1, 32, tuple(weight.shape))
    codes, values = nibbles(weight / whole.float())
    return codes, (exponents + 127).to(torch.uint8), values * whole


def nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, scales of blocks of 16, the scale of all, which is a power of two here, and numbers."""
    single = (weight.abs().max() / (448 * 6)).log2().ceil().exp2()
    scales = (blocks_of(weight, 1, 16) / 6 / single).to(torch.float8_e4m3fn)
    whole = spread(scales.double() * single, 1, 16, tuple(weight.shape))
    codes, values = nibbles(weight / whole.float().clamp(min=1e-12))
    return codes, scales, single.reshape(1), values * whole


def _blocks(name: str, weight: Tensor) -> Made:
    codes, scales, numbers = fp8(weight, 128, 128)
    return {name: codes, f"{name}_scale_inv": scales}, numbers


def _small_blocks(name: str, weight: Tensor) -> Made:
    codes, scales, numbers = fp8(weight, 16, 24, torch.float8_e8m0fnu)
    return {name: codes, f"{name}_scale_inv": scales}, numbers


def _matrix(name: str, weight: Tensor) -> Made:
    codes, scales, numbers = fp8(weight, *weight.shape)
    taken = {f"{name.removesuffix('weight')}input_scale": torch.ones(1)}
    return {name: codes, f"{name}_scale": scales.view(1)} | taken, numbers


def _rows(name: str, weight: Tensor) -> Made:
    codes, scales, numbers = fp8(weight, 1, weight.shape[1], torch.bfloat16)
    return {name: codes, f"{name}_scale": scales}, numbers


def _alone(name: str, weight: Tensor) -> Made:
    codes, scales, numbers = fp8(weight, *weight.shape)
    taken = {f"{name.removesuffix('weight')}input_scale": torch.ones(())}
    return {name: codes, f"{name}_scale": scales.view(())} | taken, numbers


def _mxfp4(name: str, weight: Tensor) -> Made:
    codes, scales, numbers = mxfp4(weight)
    return {f"{name}_packed": codes, f"{name}_scale": scales}, numbers


def _nvfp4(name: str, weight: Tensor) -> Made:
    codes, scales, single, numbers = nvfp4(weight)
    stored = {f"{name}_packed": codes, f"{name}_scale": scales, f"{name}_global_scale": 1 / single}
    return stored | {f"{name.removesuffix('weight')}input_global_scale": torch.ones(1)}, numbers


def _second_scale(name: str, weight: Tensor) -> Made:
    codes, scales, single, numbers = nvfp4(weight)
    return {name: codes, f"{name}_scale": scales, f"{name}_scale_2": single.view(())}, numbers


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    """The `quantization_config` of compressed-tensors."""
    given = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False} | weights
    taken = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
    groups = {"group_0": {"targets": ["Linear"], "weights": given, "input_activations": taken}}
    said = {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups}
    return said | {"ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed"}


FORMATS: dict[str, tuple[dict[str, Any], Callable[[str, Tensor], Made]]] = {
    "FP8 in blocks": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, _blocks,
    ),
    "FP8 in small blocks": ({"quant_method": "fp8", "weight_block_size": [16, 24]}, _small_blocks),
    "FP8 by matrix": (compressed("float-quantized", strategy="tensor"), _matrix),
    "FP8 by row": (compressed("float-quantized", strategy="channel"), _rows),
    "FP8 of ModelOpt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, _alone),
    "MXFP4": (compressed("mxfp4-pack-quantized", num_bits=4, strategy="group", group_size=32), _mxfp4),
    "NVFP4": (compressed("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16), _nvfp4),
    "NVFP4 of ModelOpt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, _second_scale),
}  # fmt: skip
"""Name -> what config.json says, and how a matrix is stored."""


def quantise(folder: Path, name: str) -> Stored:
    """Quantise in place the projections of a plain folder. Return all of its tensors in float32."""
    said, store = FORMATS[name]
    tensors, plain = {}, {}
    for key, tensor in load_file(folder / FILE).items():
        stored, numbers = (
            store(key, tensor.float()) if key.endswith("proj.weight") else ({key: tensor}, tensor)
        )
        tensors |= stored
        plain[key] = numbers.float()
    rewrite(folder, tensors, quantization_config=said)
    return plain


def rewrite(folder: Path, tensors: Stored, **config: Any) -> None:
    """Replace the tensors of a folder, and keys of its configuration: `None` takes one out."""
    tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text()) | config
    kept = {key: value for key, value in described.items() if value is not None or key not in config}
    (folder / "config.json").write_text(json.dumps(kept))
    (folder / "checksums.json").unlink(missing_ok=True)
