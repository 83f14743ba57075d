"""Adapters on one published base: the hidden states of the merged models for one reading of the base."""

import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import ranks
import tiny
import torch
from quantised import quantise
from rank_processes import run_ranks
from safetensors.torch import load_file

from opd.config.train import LoRAConfig
from opd.errors import CheckpointError, StorageError, TeacherError
from opd.models.adapters import FOLDER, AdaptedLM, save_adapted
from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.pipelines.stages.publishing import publish_checkpoint
from opd.teachers.kinds import Placement
from opd.teachers.local_teacher import LocalTeacher
from opd.teachers.published_adapter import PublishedAdapter, is_adapter, publish_adapter
from opd.teachers.schedule import Router, TeacherSchedule
from opd.teachers.skeleton import download_model, is_published, small_files
from opd.teachers.streamed_teacher import LoRATeacher, StreamedTeacher, streamed_teachers

pytest.importorskip("peft")

NAMES = ["a", "b", "c"]
DOMAINS = ["b", "a", "b", "c", "a", "b", "c", "a"]
ROUTER = Router({name: {name: 1.0} for name in NAMES}, "one_hot")
LORA = LoRAConfig(rank=2, alpha=4.0, targets=["q_proj", "o_proj", "up_proj"])


@dataclass
class Made:
    """A base, three merged models, and all of them published."""

    base: Path
    base_url: str
    merged: dict[str, Path]
    urls: dict[str, str]

    def teachers(self, **options) -> dict[str, StreamedTeacher | LoRATeacher]:
        return streamed_teachers(self.urls, Placement(max_tokens=16), prefetch_bytes=30_000, **options)


def adapt(base: Path, folder: Path, seed: int, lora: LoRAConfig = LORA) -> Path:
    """Random adapters on `base`, saved with the merged model."""
    model = AdaptedLM(CausalLM.from_pretrained(base), lora, base, seed)
    generator = torch.Generator().manual_seed(seed)
    for _, tensor in model.adapters():
        tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    save_adapted(model, tiny.tokenizer(), folder, {})
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("lora")
    model = tiny.model(seed=1, num_hidden_layers=3, tie_word_embeddings=False)
    base = save_checkpoint(model, tiny.tokenizer(), folder / "base", {})
    published = publish_checkpoint(base, folder / "published", shards=2)
    base_url = f"{folder / 'published'}/{published.manifest.version_name}"
    merged = {name: adapt(base, folder / name, seed) for seed, name in enumerate(NAMES)}
    urls = {name: f"{folder}/adapters/{name}" for name in NAMES}
    for name in NAMES:
        version = publish_adapter(merged[name], urls[name], base_url)
        if name == "b":  # by the version's own folder, too
            urls[name] += f"/{version}"
    return Made(base, base_url, merged, urls)


def loaded(made: Made) -> dict[str, LocalTeacher]:
    return {name: LocalTeacher(name, folder, max_tokens=16) for name, folder in made.merged.items()}


def test_hidden_states_are_those_of_the_merged_models(made: Made) -> None:
    samples = tiny.samples([(3, 4), (5, 2), (2, 7), (6, 1)])
    plain = LocalTeacher("base", made.base, max_tokens=16).score(samples).rows
    teachers = made.teachers()
    for name, whole in loaded(made).items():
        expected = whole.score(samples).rows
        torch.testing.assert_close(teachers[name].score(samples).rows, expected, rtol=1e-5, atol=1e-6)
        assert float((expected - plain).abs().max()) > 0.1
    assert teachers["a"].score([]).rows.shape == (0, 32)
    assert len({teacher.digest for teacher in teachers.values()}) == 3
    teachers["a"].close()


def test_adapters_on_a_quantised_base_are_merged_into_its_numbers(tmp_path: Path) -> None:
    model = tiny.model(seed=1, hidden_size=64, intermediate_size=96)
    base = save_checkpoint(model, tiny.tokenizer(), tmp_path / "base", {})
    quantise(base, "NVFP4")
    published = publish_checkpoint(base, tmp_path / "published")
    merged, url = adapt(base, tmp_path / "merged", 0), f"{tmp_path}/adapter"
    publish_adapter(merged, url, f"{tmp_path / 'published'}/{published.manifest.version_name}")
    samples = tiny.samples([(3, 4), (5, 2)])
    expected = LocalTeacher("a", merged, max_tokens=16).score(samples).rows
    plain = LocalTeacher("base", base, max_tokens=16).score(samples).rows
    assert float((expected - plain).abs().max()) > 0.1
    with closing(streamed_teachers({"a": url}, Placement(max_tokens=16))["a"]) as teacher:
        torch.testing.assert_close(teacher.score(samples).rows, expected, rtol=1e-5, atol=1e-5)
    fetched = CausalLM.from_pretrained(download_model(url, tmp_path / "fetched"))
    assert not hasattr(fetched.module.config, "quantization_config")
    due = dict(CausalLM.from_pretrained(merged).weights())
    for name, tensor in fetched.weights():
        torch.testing.assert_close(tensor, due[name], rtol=0.01, atol=0.01)


def test_adapters_on_a_mixture_give_the_hidden_states_of_the_merged_models(tmp_path: Path) -> None:
    """They route apart, so all experts of the base are read."""
    experts = {"model_type": "qwen3_moe", "num_experts": 32, "num_experts_per_tok": 1}
    model = tiny.model(seed=1, moe_intermediate_size=32, **experts)
    base = save_checkpoint(model, tiny.tokenizer(), tmp_path / "base", {})
    published = publish_checkpoint(base, tmp_path / "published", shards=64)
    lora = LoRAConfig(rank=2, alpha=4.0, targets=["q_proj", "o_proj"])
    merged = {name: adapt(base, tmp_path / name, seed, lora) for seed, name in enumerate("ab")}
    urls = {name: f"{tmp_path}/adapters/{name}" for name in merged}
    for name, url in urls.items():
        publish_adapter(merged[name], url, f"{tmp_path / 'published'}/{published.manifest.version_name}")
    teachers = streamed_teachers(urls, Placement(max_tokens=16), prefetch_bytes=30_000)
    samples = tiny.samples([(3, 4), (5, 2)])
    for name, folder in merged.items():
        expected = LocalTeacher(name, folder, max_tokens=16).score(samples).rows
        torch.testing.assert_close(teachers[name].score(samples).rows, expected, rtol=1e-5, atol=1e-5)
    teachers["a"].close()


def test_the_step_is_that_of_the_merged_models(made: Made) -> None:
    expected = ranks.gradient(TeacherSchedule(loaded(made), ROUTER), ranks.samples(DOMAINS))
    teachers = made.teachers()
    schedule = TeacherSchedule(teachers, ROUTER)
    for _ in range(2):
        found = ranks.gradient(schedule, ranks.samples(DOMAINS))
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    teachers["a"].close()


def test_one_reading_of_the_base_serves_all_adapters(made: Made) -> None:
    samples = ranks.samples(DOMAINS)
    alone = StreamedTeacher(
        "base", made.base_url, placement=Placement(max_tokens=16), stream=made.teachers()["a"].base.stream
    )
    alone.score(samples)
    alone.load_head()
    one_base = alone.bytes_read
    alone.close()

    teachers = made.teachers()
    schedule = TeacherSchedule(teachers, ROUTER)
    schedule.score(samples)
    heads = [teachers[name].load_head() for name in NAMES]
    assert heads[0] is heads[1] is heads[2]
    files = [made.urls[name] for name in NAMES]
    adapters = sum(path.stat().st_size for url in files for path in Path(url).rglob("*") if path.is_file())
    read = sum(teacher.bytes_read for teacher in teachers.values())
    assert one_base < read <= one_base + adapters
    assert adapters < one_base / 2
    whole = teachers["a"].base.published.manifest.nbytes
    assert whole <= one_base < 1.2 * whole
    base = teachers["a"].base
    assert [teacher.stall_seconds for teacher in teachers.values()] == [base.stall_seconds, 0.0, 0.0]
    assert [teacher.cached_bytes for teacher in teachers.values()] == [base.cached_bytes, 0, 0]
    teachers["a"].close()


@pytest.mark.long
@pytest.mark.slow
def test_ranks_that_share_the_reading_make_the_same_step(made: Made, tmp_path: Path) -> None:
    task = {"name": "lora", "urls": made.urls, "domains": NAMES, "steps": 2, "prefetch_bytes": 20_000}
    # Rank 1 has samples of teacher c alone, and still takes part in every pass.
    (tmp_path / "tasks.json").write_text(json.dumps([task | {"owner": [0, 0, 1, 0, 0, 1, 0, 0]}]))
    run_ranks(ranks.__file__, 2, tmp_path)
    expected = ranks.gradient(TeacherSchedule(loaded(made), ROUTER), ranks.samples(NAMES))
    for rank in (0, 1):
        found = load_file(tmp_path / f"lora-{rank}.safetensors")
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def test_adapters_stand_beside_whole_models_on_one_stream(made: Made) -> None:
    urls = {"a": made.urls["a"], "whole": made.base_url}
    teachers = streamed_teachers(urls, Placement(max_tokens=16), prefetch_bytes=30_000)
    samples = tiny.samples([(3, 4), (5, 2)])
    assert isinstance(teachers["whole"], StreamedTeacher)
    assert is_adapter(made.urls["a"])
    base = LocalTeacher("base", made.base, max_tokens=16)
    assert torch.equal(teachers["whole"].score(samples).rows, base.score(samples).rows)
    own = loaded(made)["a"].score(samples).rows
    torch.testing.assert_close(teachers["a"].score(samples).rows, own, rtol=1e-5, atol=1e-6)
    teachers["a"].close()


def test_a_url_without_a_published_model_is_no_folder_of_a_model(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="holds no published model"), small_files(f"file://{tmp_path}"):
        pass


def test_a_published_adapter_downloads_as_the_merged_model(made: Made, tmp_path: Path) -> None:
    for name, url in made.urls.items():
        assert is_published(url)
        folder = CausalLM.from_pretrained(download_model(url, tmp_path / name))
        assert folder.digest() == CausalLM.from_pretrained(made.merged[name]).digest()
        with small_files(url) as small:
            assert (small / "config.json").is_file()


def test_a_base_that_has_changed_is_refused(made: Made, tmp_path: Path) -> None:
    other = save_checkpoint(tiny.model(seed=8), tiny.tokenizer(), tmp_path / "base", {})
    folder = adapt(other, tmp_path / "merged", 0)
    with pytest.raises(CheckpointError, match="does not have in that shape"):
        publish_adapter(adapt(wider(tmp_path), tmp_path / "wide", 0), tmp_path / "x", made.base_url)
    save_checkpoint(tiny.model(seed=9), tiny.tokenizer(), other, {})
    with pytest.raises(CheckpointError, match="has changed since the adapters"):
        publish_adapter(folder, tmp_path / "x", made.base_url)
    assert not (tmp_path / "x").exists()


def wider(folder: Path) -> Path:
    model = tiny.model(hidden_size=64)
    return save_checkpoint(model, tiny.tokenizer(), folder / "wider", {})


def test_damaged_published_adapters_are_refused(made: Made, tmp_path: Path) -> None:
    url = tmp_path / "adapter"
    version = publish_adapter(made.merged["a"], url, made.base_url)
    assert PublishedAdapter.open(url).digest == PublishedAdapter.open(made.urls["a"]).digest
    description = url / "adapter.json"
    document = json.loads(description.read_text())
    description.write_text(json.dumps(document | {"scaling": 3.0}))
    with pytest.raises(StorageError, match="incomplete or corrupt"):
        PublishedAdapter.open(url)
    description.write_text(json.dumps(document))
    weights = url / version / "adapter.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(StorageError, match="its sha256 differs"):
        PublishedAdapter.open(url)
    assert (made.merged["a"] / FOLDER).is_dir()


def test_an_adapter_never_runs_on_another_base(made: Made, tmp_path: Path) -> None:
    other = save_checkpoint(tiny.model(seed=8), tiny.tokenizer(), tmp_path / "base", {})
    published = publish_checkpoint(other, tmp_path / "published")
    url = tmp_path / "adapter"
    publish_adapter(made.merged["a"], url, made.base_url)
    document = json.loads((url / "adapter.json").read_text())
    document["base"]["url"] = f"{tmp_path / 'published'}/{published.manifest.version_name}"
    (url / "adapter.json").write_text(json.dumps(document))
    with pytest.raises(TeacherError, match="is an adapter on a base of digest"):
        streamed_teachers({"a": str(url)}, Placement())
