"""The page that has the algorithm has the training loop's: the same loss and gradient, bit for bit."""

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import tiny
import torch
from recipes import tiny_recipe
from transformers import AutoModelForCausalLM

from opd.config import DistillConfig
from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.teachers.local_teacher import LocalTeacher
from opd.teachers.schedule import Router, TeacherSchedule
from opd.train.distill_terms import build_distill_term
from opd.train.loss_weights import route_scales
from opd.train.torch_backend import TorchBackend
from opd.types import RolloutBatch, TokenTerms

PAGE = Path(__file__).parents[2] / "examples" / "minimal.py"
LENGTHS, DOMAINS = [(5, 7), (6, 4), (3, 9), (4, 8), (2, 1)], ["add3", "add3", "sort", "sort", "sort"]

UNTIED = {"tie_word_embeddings": False}
"""The loop adds a tied embedding's two gradients in another order, which rounds otherwise."""


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PAGE.parent))
    return importlib.import_module("minimal")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    found = {name: root / name for name in ("student", "add3", "sort")}
    for seed, folder in enumerate(found.values()):
        save_checkpoint(tiny.model(seed, **UNTIED), tiny.tokenizer(), folder, {})
    return found


def test_loss_and_gradient_are_those_of_the_loop(page: ModuleType, folders: dict[str, Path]):
    samples = tiny.samples(LENGTHS, teachers=DOMAINS)
    scales = route_scales(tiny_recipe(), samples, [s.trainable_tokens for s in samples], [1] * len(samples))
    terms = [TokenTerms.zeros(len(sample.response_ids)) for sample in samples]
    for sample, term in zip(samples, terms, strict=True):
        term.kl_weight = np.full(len(sample.response_ids), scales[sample.uid], np.float32)
    # A sample a pass, as on the page: several of a pack round otherwise, in the last digits.
    router = Router({name: {name: 1.0} for name in ("add3", "sort")}, "one_hot")
    teachers = {name: LocalTeacher(name, folders[name], max_tokens=1) for name in ("add3", "sort")}
    schedule = TeacherSchedule(teachers, router)
    schedule.assign(samples)
    schedule.score(samples)
    term = build_distill_term(DistillConfig(), schedule)
    backend = TorchBackend(tiny.model(0, **UNTIED), tiny.training([term], max_tokens=1))
    metrics = backend.forward_backward(RolloutBatch(samples, terms))

    models = {
        name: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for name, folder in folders.items()
    }
    student = models.pop("student")
    # Any order of the domains: a step sorts by teacher.
    own = [
        page.Sample(s.domain, torch.from_numpy(s.prompt_ids).long(), torch.from_numpy(s.response_ids).long())
        for s in (samples[2], samples[0], samples[3], samples[1], samples[4])
    ]
    loss = page.accumulate(student, models, own)
    shares = (metrics["kl/add3"] + metrics["kl/sort"]) / 2
    assert loss == pytest.approx(shares, rel=1e-6)
    theirs = dict(backend.model.module.named_parameters())
    for name, parameter in student.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, theirs[name].grad), name


def test_it_learns_from_models_on_disk(page: ModuleType, folders: dict[str, Path], monkeypatch, capsys):
    paths = [str(folders[name]) for name in ("student", "add3", "add3")]
    given = ["--a", "12=", "34=", "--b", "<a>12", "<a>31", "--steps", "30", "--tokens", "6", "--lr", "1e-2"]
    monkeypatch.setattr("sys.argv", ["minimal.py", *paths, *given])
    page.main()
    found = [float(line.split("KL ")[1].split()[0]) for line in capsys.readouterr().out.splitlines()]
    assert len(found) == 30
    assert found[-1] < found[0] / 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["nowhere", "{add3}", "{sort}"], "nowhere is no Hugging Face folder"),
        (["{student}", "{add3}", "{sort}", "--tokens", "0"], "at least 1"),
        (["{student}", "{add3}", "{wide}"], "heads of"),
    ],
)
def test_what_it_cannot_take_is_one_sentence(page, folders, given, said, tmp_path, monkeypatch, capsys):
    wide = CausalLM.from_config(tiny.LLAMA | {"vocab_size": 64}, tokenizer=tiny.tokenizer(), seed=3)
    save_checkpoint(wide, tiny.tokenizer(), tmp_path / "wide", {})
    places = {name: str(folder) for name, folder in folders.items()} | {"wide": str(tmp_path / "wide")}
    monkeypatch.setattr("sys.argv", ["minimal.py", *(one.format(**places) for one in given)])
    with pytest.raises(SystemExit):
        page.main()
    assert said in capsys.readouterr().err


def test_it_is_a_page():
    assert len(PAGE.read_text("utf-8").splitlines()) <= 200
