"""Run by Python at the start of every process of the server.

torchvision's wheel links CUDA, so its operators do not load beside a CPU build of torch, and importing it
fails where it describes two of them. They are declared here; nothing calls them.

Adapters are applied with numbers in pinned memory, which is there for a device alone: here it is any memory.
"""

import sys

if "torch" not in sys.modules:
    import torch

    _declared = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _declared.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

    def _anywhere(make):
        def call(*given, pin_memory=False, **others):
            return make(*given, **others)

        return call

    for _name in ("tensor", "zeros"):
        _made = _anywhere(getattr(torch, _name))
        torch.jit._builtins._register_builtin(_made, f"aten::{_name}")
        setattr(torch, _name, _made)
    torch.Tensor.pin_memory = lambda self, *_: self
