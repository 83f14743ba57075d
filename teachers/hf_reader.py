"""A Hugging Face folder read in its future published form: unit by unit, one layer in memory."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from opd.errors import ModelError, StorageError, TeacherError
from opd.kernels.head import Head
from opd.models.architecture import empty_model, head_form
from opd.models.hf_folder import described_in, read_config, read_object
from opd.models.quantisation import quantisation_of
from opd.models.stored_form import StoredForm
from opd.storage.manifest import Unit
from opd.storage.publish import ModelForm, UnitSource, units_of
from opd.storage.weight_folder import TensorSource, read_headers
from opd.teachers.skeleton import UNIT, Skeleton, check_streams, unit_tensors


def stream_fault(folder: Path) -> ModelError | TeacherError | StorageError | None:
    """Return the reason why the model in `folder` cannot be streamed once it is published, or `None` if it
    can.

    Raises `StorageError` or `CheckpointError` if the folder cannot be read.
    """
    headers = read_headers(described_in(folder))
    shapes = {name: source.shape for name, source in headers.items()}
    config = read_config(folder)
    try:
        others = _left_out(config, folder, shapes)
        tensors = {name: shape for name, shape in shapes.items() if name not in others}
        check_streams(config, folder, tensors, {name: headers[name].dtype for name in tensors})
    except (ModelError, TeacherError, StorageError) as error:
        return error
    return None


def tensors_left_out(folder: Path) -> frozenset[str]:
    """Names of the folder's tensors that transformers does not load, as `StoredForm.left_out`, and of scales
    of quantised activations.
    """
    return _left_out(read_config(folder), folder, read_headers(folder))


def _left_out(config: PreTrainedConfig, folder: Path, names: Collection[str]) -> frozenset[str]:
    form = quantisation_of(config, folder)
    scales = form.activation_scales(names) if form is not None else frozenset()
    return StoredForm(empty_model(config, folder)).left_out(names) | scales


def folder_units(folder: Path, form: ModelForm) -> tuple[dict[str, Unit], dict[str, TensorSource]]:
    """`units_of` that raises the error of `stream_fault` if a tensor has no place."""
    try:
        return units_of(folder, form)
    except StorageError as error:
        raise stream_fault(folder) or error from None


class HFFolderReader:
    """Weights in float32 on the CPU.

    Raises `StorageError` or `CheckpointError` if the folder cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        config = read_config(folder).get_text_config()
        self._scale, self._softcap = head_form(config)
        tied = bool(getattr(config, "tie_word_embeddings", False))
        form = ModelForm(tied=tied, layers=config.num_hidden_layers, left_out=tensors_left_out(folder))
        self._units, self._sources = folder_units(folder, form)

    @torch.no_grad()
    def hidden_states(self, ids: Tensor) -> Tensor:
        """Return [T, D]: last hidden states of the sequence `ids` [T] int64. Raises `ModelError` or
        `TeacherError` for an architecture that is not read layer by layer.
        """
        if (fault := stream_fault(self._folder)) is not None:
            raise fault
        skeleton = Skeleton(read_object(self._folder / "config.json"), torch.float32, torch.device("cpu"))
        work = skeleton.pack_sequences(ids, torch.arange(len(ids)), [0, len(ids)])
        read = partial(self._layer_tensors, skeleton=skeleton)
        skeleton.run_embedding(read("embedding"), work)
        for index in range(len(skeleton.layers)):
            skeleton.run_layer(index, read(f"layer.{index}"), [work])
        skeleton.run_norm(read("norm"), [work])
        return work.last_hidden()

    def read_head(self) -> Head:
        """Return the head over all of its rows."""
        tensors = self._layer_tensors(UNIT)
        weight = next(tensor for name, tensor in tensors.items() if name.endswith(".weight"))
        bias = next((tensor for name, tensor in tensors.items() if name.endswith(".bias")), None)
        return Head(weight, bias=bias, scale=self._scale, softcap=self._softcap)

    def _layer_tensors(self, name: str, skeleton: Skeleton | None = None) -> dict[str, Tensor]:
        unit = self._units[name]
        with UnitSource(unit.tensors, self._sources, unit.nbytes) as source:
            flat = torch.frombuffer(source.read(0, unit.nbytes) or bytearray(1), dtype=torch.uint8)
        if skeleton is not None:
            return skeleton.unit_tensors(unit, flat)
        stored = unit_tensors(unit, flat)
        return {
            name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in stored.items()
        }
