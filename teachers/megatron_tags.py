"""Several teachers on one Megatron-Core module: weights by tag, swapped in when their turn comes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from opd.errors import TeacherError
from opd.megatron.layout import HEAD, pieces
from opd.megatron.module import MegatronModule
from opd.teachers.megatron_sources import WeightSource


@dataclass(slots=True)
class _Tag:
    source: WeightSource
    kept: dict[str, Tensor] | None = None
    """This rank's slices in host memory, the head among them; `None` until they were needed."""


class WeightTags:
    """Whose weights `module` has now, and where the others' are.

    Args:
        module: One decoder; all tags are of its form.
        keep: Keep every tag's slices in host memory after they were read. On a CPU the module then uses them
            in place, so that a swap copies nothing; otherwise they are copied to its device. Without `keep`
            a swap reads the tag's source again, and one teacher's weights are in memory.
    """

    def __init__(self, module: MegatronModule, *, keep: bool) -> None:
        self.module = module
        self.keep = keep
        self.active: str | None = None
        self.loads = 0
        """How often weights were swapped in."""
        self._tags: dict[str, _Tag] = {}
        self._pieces = pieces(module.form, module.group.rank(), module.group.size())

    def add(self, tag: str, source: WeightSource) -> None:
        """Make `tag` known. Raises `TeacherError` if it is, or if its form is not the module's."""
        if tag in self._tags:
            raise TeacherError(f"there are two teachers named {tag}; give each its own name.")
        if source.form != self.module.form:
            raise TeacherError(
                f"teacher {tag} has another form than the module it was to share; give it one of its own."
            )
        self._tags[tag] = _Tag(source)

    def activate(self, tag: str) -> MegatronModule:
        """The module with the weights of `tag`; nothing moves if it has them already. On all ranks alike.

        Raises what its source raises; the module then has no teacher's weights.
        """
        if self.active == tag:
            return self.module
        self.active = None
        parameters = dict(self.module.parameters())
        if self.keep:
            tensors = ((name, tensor) for name, tensor in self._kept(tag).items() if name != HEAD)
        else:
            tensors = self._tags[tag].source.read(self._pieces[:-1])
        for name, tensor in tensors:
            self._put(parameters[name], tensor, f"{name} of teacher {tag}")
        self.active = tag
        self.loads += 1
        return self.module

    def head(self, tag: str) -> Tensor:
        """This rank's rows of the head of `tag`, [padded V / ranks, D], on the module's device.

        Read from its source, or from what is kept; the module's own weights stay as they are.
        """
        if self.keep:
            rows = self._kept(tag)[HEAD]
        else:
            _, rows = next(iter(self._tags[tag].source.read(self._pieces[-1:])))
        return rows.to(device=self.module.device, dtype=self.module.dtype)

    @property
    def kept_bytes(self) -> int:
        """Bytes of slices in host memory."""
        tensors = [t for tag in self._tags.values() for t in (tag.kept or {}).values()]
        return sum({t.data_ptr(): t.nbytes for t in tensors}.values())

    def _put(self, parameter: nn.Parameter, tensor: Tensor, what: str) -> None:
        if parameter.shape != tensor.shape:
            raise TeacherError(
                f"{what} has shape {list(tensor.shape)}, but its configuration asks for"
                f" {list(parameter.shape)}; copy or publish the model again."
            )
        if self.keep and tensor.device == parameter.device:
            parameter.data = tensor
        else:
            parameter.data.copy_(tensor, non_blocking=True)

    def _kept(self, tag: str) -> dict[str, Tensor]:
        entry = self._tags[tag]
        if entry.kept is None:
            wanted = self._pieces if not self.module.form.tied else self._pieces[:-1]
            entry.kept = {name: self._host(tensor) for name, tensor in entry.source.read(wanted)}
            if self.module.form.tied:
                entry.kept[HEAD] = entry.kept[_EMBEDDING]
        return entry.kept

    def _host(self, tensor: Tensor) -> Tensor:
        tensor = tensor.to(device="cpu", dtype=self.module.dtype)
        return tensor.pin_memory() if self.module.device.type == "cuda" else tensor


_EMBEDDING = "embedding.word_embeddings.weight"
