"""Run by Python at the start of every process of the server.

torchvision's wheel links CUDA, so its operators do not load beside a CPU build of torch, and importing it
fails where it describes two of them. They are declared here; nothing calls them.
"""

import sys

if "torch" not in sys.modules:
    import torch

    _declared = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _declared.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
