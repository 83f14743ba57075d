"""Write a model's twin with shorter tokens: the first merges of its byte-level BPE, and its embedding's rows.

Usage: python examples/other_tokenizer/shorter_tokens.py MODEL FOLDER [TOKENS]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(source: Path, folder: Path, tokens: int) -> None:
    """Write the twin of `source` with `tokens` tokens to `folder`."""
    part = folder.with_name(f"{folder.name}.part")  # so that a folder is whole, or not there
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, trust_remote_code=False)
    model.resize_token_embeddings(tokens)  # keeps the first rows, and ties the head to them
    model.save_pretrained(part)
    AutoTokenizer.from_pretrained(source, trust_remote_code=False).save_pretrained(part)
    file = part / "tokenizer.json"
    written = json.loads(file.read_text())
    vocabulary = {token: place for token, place in written["model"]["vocab"].items() if place < tokens}
    merges = [pair for pair in written["model"]["merges"] if "".join(pair) in vocabulary]
    written["model"].update(vocab=vocabulary, merges=merges)
    file.write_text(json.dumps(written, ensure_ascii=False))
    part.rename(folder)
    print(f"{tokens} tokens, {len(merges)} merges, {model.num_parameters():,} parameters in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 4096)
