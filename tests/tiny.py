"""Tiny real models and samples that several test folders use."""

import copy
import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from opd.config import BatchConfig, OptimConfig
from opd.kernels.head import Head
from opd.models.causal_lm import CausalLM
from opd.models.routing import ExpertRouting
from opd.models.tokenizers import character_tokenizer
from opd.train.backend import TrainingSettings
from opd.train.teacher_views import TeacherView
from opd.types import MicroBatch, Sample, Status

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def tokenizer():
    """Digits, "=" and two tags."""
    return character_tokenizer("0123456789=", ["<a>", "<b>"])


_made: dict[str, CausalLM] = {}


def model(seed: int = 0, **changes) -> CausalLM:
    """A random two-layer Llama: a copy of one that was made, and checked, once."""
    asked = repr((seed, sorted(changes.items())))
    if asked not in _made:
        _made[asked] = CausalLM.from_config(LLAMA | changes, tokenizer=tokenizer(), seed=seed)
    return copy.deepcopy(_made[asked])


def training(terms, temperature: float = 1.0, **batch) -> TrainingSettings:
    """How a back end trains by default."""
    return TrainingSettings(OptimConfig(), BatchConfig(**batch), temperature, terms)


def conftest_of(folder: str) -> ModuleType:
    """The `conftest.py` of another folder of tests, loaded from its file: test folders are no packages."""
    path = Path(__file__).parent / folder / "conftest.py"
    spec = importlib.util.spec_from_file_location(f"conftest_of_{folder}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def teacher_views(micro: MicroBatch) -> list[TeacherView]:
    """One teacher's hidden states at the rows of `micro`, and its head."""
    teacher = model(seed=9)
    with torch.no_grad():
        hidden = teacher.hidden(micro.input_ids, micro.position_ids, micro.cu_seqlens)[micro.rows]
    return [TeacherView("t", 1.0, hidden, teacher.head())]


def assert_learnt_alike(ours, theirs, start, share: float = 1e-2) -> None:
    """Require weights of one form that moved away from `start`, and differ by at most `share` of that: what
    rounding can become in a few steps of AdamW.
    """
    assert ours.keys() == theirs.keys()
    moved = max(float((theirs[name] - start[name]).abs().max()) for name in theirs)
    assert moved > 0
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) <= share * moved


def assert_equal(ours: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    """Require the same weights, bit for bit."""
    assert ours.keys() == others.keys()
    assert all(torch.equal(ours[name], others[name]) for name in ours)


def samples(
    lengths: list[tuple[int, int]], *, teachers: list[str] | None = None, seed: int = 0
) -> list[Sample]:
    """Random samples of the given (prompt, response) lengths."""
    rng = np.random.default_rng(seed)
    size = len(tokenizer())
    made = []
    for i, (prompt, response) in enumerate(lengths):
        made.append(
            Sample(
                uid=f"s{i}",
                group_uid=f"g{i}",
                domain=teachers[i] if teachers else "a",
                prompt_ids=rng.integers(0, size, prompt).astype(np.int32),
                response_ids=rng.integers(0, size, response).astype(np.int32),
                rollout_logprobs=np.zeros(response, dtype=np.float32),
                policy_versions=np.zeros(response, dtype=np.int32),
                loss_mask=np.ones(response, dtype=bool),
                teacher=teachers[i] if teachers else None,
                status=Status.COMPLETED,
            )
        )
    return made


def draw_masks(samples: list[Sample], every: bool = False) -> None:
    """Give `samples` random sampling masks of up to five tokens, and unless `every` their last token none."""
    rng = np.random.default_rng(len(samples))
    for sample in samples:
        drawn = sample.response_ids.tolist()
        masks = [sorted({one, *rng.integers(0, len(tokenizer()), 4).tolist()}) for one in drawn]
        masks[-1] = masks[-1] if every else []
        counts = [len(mask) for mask in masks]
        sample.sampling_masks = np.array([*counts, *(one for mask in masks for one in mask)], np.int32)


def draw_choices(routing: ExpertRouting | None, samples: list[Sample], short: int = 1, seed: int = 3) -> None:
    """Give `samples` choices of experts that no router made, of all positions but the last `short` ones."""
    assert routing is not None
    rng = np.random.default_rng(seed)
    for sample in samples:
        scores = rng.random((len(sample.token_ids) - short, routing.layers, routing.experts))
        sample.expert_choices = scores.argsort(-1)[..., : routing.per_token].astype(np.uint8)


def random_teacher(micro: MicroBatch, width: int) -> list[TeacherView]:
    """A random teacher whose hidden states are a function of the sample."""
    rows = [
        torch.randn(len(s.response_ids), width, generator=torch.Generator().manual_seed(int(s.uid[1:])))
        for s in micro.samples
    ]
    weight = torch.randn(len(tokenizer()), width, generator=torch.Generator().manual_seed(99))
    return [TeacherView(micro.samples[0].teacher, 1.0, torch.cat(rows), Head(weight))]
