"""Small synthetic Hugging Face folders, written without torch."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def write_checkpoint(
    folder: Path,
    *,
    layers: int = 2,
    hidden: int = 32,
    vocabulary: int = 50,
    tied: bool = False,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """A decoder's random weights in two safetensors files, with an index, config and tokenizer files.

    Returns the tensors by name. Half of the layers are float16 and half float32, and one has no elements
    that fill its alignment.
    """
    rng = np.random.default_rng(seed)

    def draw(*shape: int, half: bool = False) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float16 if half else np.float32)

    first = {"model.embed_tokens.weight": draw(vocabulary, hidden)}
    second = {"model.norm.weight": draw(hidden)}
    for i in range(layers):
        part = first if i < layers // 2 else second
        part[f"model.layers.{i}.mlp.up_proj.weight"] = draw(2 * hidden, hidden, half=i % 2 == 1)
        part[f"model.layers.{i}.self_attn.q_proj.weight"] = draw(hidden, hidden, half=i % 2 == 1)
        part[f"model.layers.{i}.input_layernorm.weight"] = draw(hidden - 3)
    if not tied:
        second["lm_head.weight"] = draw(vocabulary, hidden)
    folder.mkdir(parents=True, exist_ok=True)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name, tensors in zip(names, (first, second), strict=True):
        save_file(tensors, folder / name)
    where = {key: name for name, part in zip(names, (first, second), strict=True) for key in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    config = {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "tie_word_embeddings": tied,
        "rope_theta": 1e4,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    (folder / "tokenizer.json").write_text('{"version": "1.0", "words": ["a", "b"]}')
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return first | second


def copy_of(model, world: int = 1) -> dict[str, bytes]:
    """Every tensor of a published model, read as `world` ranks do, by name; the tied head under its own."""
    found = {}
    for name, unit in model.manifest.units.items():
        buffer = bytearray(unit.nbytes)
        for rank in range(world):
            start, stop = model.manifest.unit(name).rank_range(rank, world)
            model.read_part(name, rank, world, memoryview(buffer)[start:stop])
        for key, entry in unit.tensors.items():
            found[key] = bytes(buffer[entry.offset : entry.offset + entry.nbytes])
    return found


def expected_bytes(tensors: dict[str, np.ndarray], tied: bool = False) -> dict[str, bytes]:
    """What `copy_of` must return."""
    found = {name: tensor.tobytes() for name, tensor in tensors.items()}
    if tied:
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    return found
