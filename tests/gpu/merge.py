"""A whole step of the merge, as `opd distill` takes it: seconds by phase, tokens a second, operations."""

import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import LlamaConfig, PreTrainedTokenizerFast

from opd.metrics import read_metrics
from opd.models.checkpoint import save_checkpoint
from tests.gpu import models
from tests.gpu.clock import Place
from tests.gpu.rows import Bound, Sheet
from tests.gpu.runs import room, run

PROMPT, NEW, SAMPLES, STEPS = 256, 1024, 128, 5
"""Tokens of a prompt and of a response, responses a step, steps, of which the first two are not looked at: in
them the engine captures its graphs."""
TOKENS = 16384
"""Of a micro-batch."""
PRECISIONS = {"bfloat16 over float32": "mixed", "bfloat16": "pure"}
PHASES = ("rollout", "score", "train", "sync")


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer of as many words as the model has tokens, apart by spaces."""
    words = {"<pad>": 0, "<end>": 1, **{f"w{i}": i for i in range(2, vocabulary)}}
    made = Tokenizer(tokenizer_models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")


def write_models(folder: Path, name: str, place: Place) -> int:
    """Write a student and a teacher of this size, which differ, below `folder`; returns their vocabulary."""
    for number, which in enumerate(("student", "teacher")):
        model = models.model(name, place, torch.float32 if place.dry else torch.bfloat16)
        with torch.no_grad():
            for parameter in model.module.parameters() if number else ():
                parameter.mul_(1.01)
        vocabulary = model.vocab_size
        save_checkpoint(model, word_tokenizer(vocabulary), folder / which, {})
        del model
        place.clear()
    return vocabulary


def write_recipe(folder: Path, precision: str, sizes: tuple[int, int, int], place: Place) -> Path:
    """A merge of one teacher; `sizes` are tokens of a prompt and of a response, and responses a step."""
    prompt, new, samples = sizes
    recipe: dict[str, Any] = {
        "name": "merge-step",
        "model": {
            "path": str(folder / "student"),
            "device": place.device.type,
            "dtype": "float32" if place.dry else "bfloat16",
        },
        "teachers": {"teacher": {"path": str(folder / "teacher")}},
        "domains": {"d": {"source": str(folder / "prompts.jsonl"), "reward": "exact", "teacher": "teacher"}},
        "rollout": {"max_new_tokens": new, "max_sequence": prompt + new},
        "distill": {
            "steps": STEPS,
            "prompts_per_domain": samples,
            "checkpoint_every": 1_000_000,
            "batch": {"max_tokens": TOKENS},
            "optim": {"lr": 1e-6},
        },
        "train": {"precision": precision},
        "baselines": {"methods": []},
    }
    path = folder / f"{precision}.yaml"
    path.write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML
    return path


def write_prompts(path: Path, vocabulary: int, prompt: int, count: int) -> None:
    """Write `count` prompts of random words."""
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            text = " ".join(f"w{draw.randrange(2, vocabulary)}" for _ in range(prompt))
            file.write(json.dumps({"prompt": text, "label": "w2"}) + "\n")


def teraflop(config: LlamaConfig, sizes: tuple[int, int, int]) -> dict[str, float]:
    """What a step's phases compute at least, in 1e12 operations: two a weight and token forward, four
    backward; causal attention, 2.5 times as much backward; four products of the response's rows with a head
    (student, teacher, two gradients).
    """
    prompt, new, samples = sizes
    length, width = prompt + new, config.hidden_size
    queries = config.num_attention_heads * (config.head_dim or width // config.num_attention_heads)
    body = 2.0 * models.layer_weights(config) * samples * length
    attention = 2.0 * config.num_hidden_layers * queries * length**2 * samples
    rows = 2.0 * samples * new * width * config.vocab_size
    found = {"rollout": body + attention + rows, "score": body + attention}
    found["train"] = 3 * body + 3.5 * attention + 4 * rows
    return {phase: size / 1e12 for phase, size in found.items()}


def step_numbers(
    rows: Sequence[dict[str, Any]], flop: dict[str, float], sizes: tuple[int, int, int], peak: float
) -> dict[str, Any]:
    """Of the steps after the first two the median seconds, and by phase seconds, share and share of `peak`,
    the 1e12 operations a second of one product; tokens a second of all, and of responses while they are
    written.
    """
    prompt, new, samples = sizes
    whole = statistics.median(after["time"] - before["time"] for before, after in pairwise(rows[1:]))
    numbers: dict[str, Any] = {"step s": whole, "tokens/s": samples * (prompt + new) / whole}
    left = whole
    for phase in PHASES:
        took = statistics.median(row[f"time/{phase}"] for row in rows[2:])
        left -= took
        numbers[f"{phase} s"], numbers[f"{phase} share"] = took, took / whole
        if phase in flop:
            numbers[f"{phase} of the product"] = flop[phase] / took / peak
    numbers["elsewhere share"] = left / whole
    numbers["written tokens/s"] = samples * new / numbers["rollout s"]
    numbers["of the product"] = sum(flop.values()) / whole / peak
    return numbers


def product_peak(place: Place) -> float:
    """1e12 operations a second of one large product here."""
    width, dtype = (64, torch.float32) if place.dry else (8192, torch.bfloat16)
    left, right = (torch.randn(width, width, device=place.device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * width**3 / place.milliseconds(lambda: torch.mm(left, right, out=out)) / 1e9


def one(
    folder: Path, precision: str, sizes: tuple[int, int, int], place: Place, peak: float
) -> dict[str, Any]:
    """Run the merge; exit status, and if that is 0 what its steps say."""
    out = folder / f"run-{precision}"
    recipe = write_recipe(folder, precision, sizes, place)
    status, _ = run("-m", "opd.pipelines.cli", "distill", str(recipe), "--out", str(out))
    if status:
        return {"status": status}
    rows = read_metrics(out / "stages" / "merge" / "metrics.jsonl")
    numbers = step_numbers(rows, teraflop(models.config("0.6B", place), sizes), sizes, peak)
    written = rows[-1]["tokens/student"] / (STEPS * sizes[1] * sizes[2])
    return {"status": 0, "written": written, **numbers}


def merge_step(sheet: Sheet, place: Place) -> None:
    """Measure a step of a 0.6B student with a teacher of its size, over float32 weights and without them."""
    sizes = (6, 4, 4) if place.dry else (PROMPT, NEW, SAMPLES)
    with tempfile.TemporaryDirectory(dir=room(place)) as temporary:
        folder = Path(temporary)
        vocabulary = write_models(folder, "0.6B", place)
        write_prompts(folder / "prompts.jsonl", vocabulary, sizes[0], max(64, 4 * sizes[2]))
        peak = product_peak(place)
        place.clear()
        for name, precision in list(PRECISIONS.items())[: 1 if place.dry else None]:
            row = f"0.6B, {name}, {sizes[2]} x ({sizes[0]} + {sizes[1]})"
            with sheet.ours(row):
                numbers = one(folder, precision, sizes, place, peak)
                ended = Bound("status", most=0, timed=False)
                # A response of random weights may end by itself, once in as many tokens as there are.
                sheet.row(row, numbers, ended, Bound("written", least=0.9, timed=False))
