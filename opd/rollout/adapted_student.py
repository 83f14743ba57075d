"""The student with adapters, as the process that sends adapters alone holds it.

Servers apply adapters by names of their own, to layers they have fused. They silently ignore a tensor whose
name they do not know. So a server is tried once, with an adapter that changes every layer much. Trained
adapters change little in a step. They are verified by their outputs.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from opd.config.train import LoRAConfig
from opd.kernels.ops import linear_logprobs
from opd.models.adapters import BASE_DIGEST, AdaptedLM
from opd.models.causal_lm import CausalLM
from opd.models.hf_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from opd.models.peft_folder import LORA_A, LORA_B, PREFIX
from opd.models.stored_form import StoredForm
from opd.rollout.weight_proof import FUSED
from opd.rollout.weight_sync import WeightFolder, Weights
from opd.served.scoring import PROBE
from opd.storage.files import permit_as

TRIED = 0.5
"""Size of the trial adapter's change, relative to the standard deviation of each weight."""


def probe_logprobs(model: CausalLM) -> Tensor:
    """[len(PROBE) - 1] float32: `model`'s log-probabilities of the probe's tokens, at temperature 1."""
    ids = torch.from_numpy(PROBE.astype(np.int64))
    hidden = model.hidden(ids, torch.arange(len(ids)), [0, len(ids)])
    return linear_logprobs(hidden[:-1], model.head(), ids[1:])


class AdaptedStudent:
    """A base in the host's memory, to which any adapters can be applied. It is read when it is first needed.

    Args:
        folder: The base, a Hugging Face folder.
    """

    def __init__(self, folder: Path, lora: LoRAConfig, dtype: str) -> None:
        self._folder, self.lora, self._dtype = folder, lora, dtype
        self._lock = threading.Lock()

    @cached_property
    def _opened(self) -> tuple[AdaptedLM, StoredForm]:
        base = CausalLM.from_pretrained(self._folder, dtype=self._dtype, device="cpu")
        files = StoredForm(base.module)
        return AdaptedLM(base, self.lora, self._folder), files

    @property
    def _model(self) -> AdaptedLM:
        return self._opened[0]

    @cached_property
    def base_tensors(self) -> list[tuple[str, Tensor]]:
        """The base's own tensors, as its files hold them."""
        model, form = self._opened
        files = (form.of_files(*named) for named in model.base_weights())
        return [named for tensors in files for named in tensors.items()]

    def compute_logprobs(self, adapters: Weights) -> np.ndarray:
        """[len(PROBE) - 1] float32: log-probabilities of the probe's tokens with these `adapters`, by one
        forward pass on the CPU. Raises `ModelError` if the adapters belong to another base or have another
        form.
        """
        with self._lock, torch.no_grad():
            self._model.load_weights(adapters)
            return probe_logprobs(self._model).float().numpy()

    @cached_property
    def trial_adapters(self) -> list[tuple[str, Tensor]]:
        """Adapters that change every layer they are for by half of the spread of its weights. They are the
        same in every process.
        """
        noise, base = torch.Generator().manual_seed(0), dict(self._model.base_weights())
        trials = []
        for name, tensor in self._model.weights():
            if name != BASE_DIGEST:
                width = tensor.shape[1]  # the layer's for `A`, the rank for `B`
                size = width**-0.5
                if name.endswith(LORA_B):
                    weight = base[name.removesuffix(LORA_B) + ".weight"]
                    spread = float(weight.float().std())
                    size *= TRIED * spread * weight.shape[1] ** 0.5 / self.lora.scaling
                tensor = (torch.randn(tensor.shape, generator=noise) * size).to(tensor.dtype)
            trials.append((name, tensor))
        return trials

    @cached_property
    def on_trial(self) -> tuple[np.ndarray, float]:
        """`compute_logprobs` of `trial_adapters`, and their greatest distance from the base's, in nats."""
        none = [(name, t if name == BASE_DIGEST else torch.zeros_like(t)) for name, t in self.trial_adapters]
        due = self.compute_logprobs(self.trial_adapters)
        return due, float(np.abs(due - self.compute_logprobs(none)).max())

    @cached_property
    def zero_tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of zero tensors that servers need besides the adapters. A server fuses their
        layers with adapted ones. SGLang ends at keys and values without queries.
        """
        shapes = {name: tensor.shape for name, tensor in self.base_tensors}
        adapted = [name.removesuffix(LORA_A) for name, _ in self._model.adapters() if name.endswith(LORA_A)]
        tensors = {}
        for layer in adapted:
            prefix, _, last = layer.rpartition(".")
            for parts in FUSED.values():
                for part in parts if last in parts else ():
                    name = f"{prefix}.{part}"
                    if name not in adapted and f"{name}.weight" in shapes:
                        rows, columns = shapes[f"{name}.weight"]
                        tensors[name + LORA_A] = (self.lora.rank, columns)
                        tensors[name + LORA_B] = (rows, self.lora.rank)
        return tensors


class AdapterFolder(WeightFolder):
    """Folders of successive adapters in peft's form; see `WeightFolder`.

    Args:
        root: On a disk that every receiver sees under the same path.
    """

    # A vLLM server reads an unloaded adapter again for a late request, and ends if it is gone.
    behind: ClassVar[int] = 1

    def __init__(self, root: str | Path, student: AdaptedStudent) -> None:
        super().__init__(root)
        self._student = student

    def _write_files(self, folder: Path, weights: Weights) -> None:
        tensors = {PREFIX + name: tensor.contiguous() for name, tensor in weights if name != BASE_DIGEST}
        dtype = next(iter(tensors.values())).dtype
        tensors |= {PREFIX + n: torch.zeros(s, dtype=dtype) for n, s in self._student.zero_tensors.items()}
        safetensors.torch.save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        lora = self._student.lora
        described = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted(set(_layer_names(tensors))),
            "inference_mode": True,
        }
        (folder / ADAPTER_CONFIG).write_text(json.dumps(described), "utf-8")
        permit_as(folder / ADAPTER_CONFIG, folder)  # a server may be another user's


def _layer_names(names: Iterable[str]) -> Iterator[str]:
    """Last names of the layers that tensors of these names belong to."""
    for name in names:
        yield name.removesuffix(LORA_A).removesuffix(LORA_B).rpartition(".")[2]
