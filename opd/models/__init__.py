"""Hugging Face causal language models: packed attention, live heads, tokenizers, checkpoints."""
