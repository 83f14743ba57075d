"""Classes of tokens: what the next tokens of two tokenizers can be compared by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TokenClasses:
    """The tokens of a vocabulary that have a class. Tokens of no class take no probability."""

    ids: Tensor
    """[K] int64: first one of each class, in the order of classes, then all others."""
    classes: Tensor
    """[K] int64: their classes, from 0 to `count - 1`."""
    count: int
    """Number of classes `C`."""

    def to(self, device: torch.device | None) -> TokenClasses:
        """Copy the classes to `device`."""
        return TokenClasses(self.ids.to(device), self.classes.to(device), self.count)

    def group_logits(self, logits: Tensor) -> Tensor:
        """Return the classes' logits `[R, C]` of tokens' logits `[R, V]`: the log of summed exponentials."""
        grouped, others = logits[:, self.ids[: self.count]], logits[:, self.ids[self.count :]]
        if others.shape[1] == 0:
            return grouped
        classes = self.classes[self.count :].expand(len(logits), -1)
        largest = grouped.scatter_reduce(1, classes, others, "amax")
        total = grouped.sub_(largest).exp_()
        total.scatter_add_(1, classes, others.sub_(largest.gather(1, classes)).exp_())
        return largest.add_(total.log_())

    def spread_gradient_(self, logits: Tensor, grouped: Tensor, gradient: Tensor) -> None:
        """Replace tokens' `logits` `[R, V]` by their gradient, given the classes' logits and `gradient`, each
        `[R, C]`. A class shares its gradient out by its tokens' probabilities.
        """
        shares = logits[:, self.ids].sub_(grouped[:, self.classes]).exp_().mul_(gradient[:, self.classes])
        logits.zero_().index_copy_(1, self.ids, shares)

    def classes_of(self, ids: Tensor) -> Tensor:
        """Return the classes of tokens `ids` `[M]`, which all have one."""
        found = torch.sort(self.ids)
        return self.classes[found.indices[torch.searchsorted(found.values, ids)]]

    def members(self, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens of `classes` `[M]`: ids `[M, K]`, and `[M, K]` bool whether a column is one."""
        order = torch.sort(self.classes).indices
        counts = torch.bincount(self.classes, minlength=self.count)
        columns = torch.arange(int(counts[classes].max()), device=classes.device)
        is_member = columns < counts[classes].unsqueeze(1)
        first = (counts.cumsum(0) - counts)[classes].unsqueeze(1)
        return self.ids[order[first + torch.where(is_member, columns, 0)]], is_member
