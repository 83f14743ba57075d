"""Checkpoints and adapters that lead elsewhere or make no sense: one sentence each."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hostile import NAMES
from safetensors.torch import save_file
from tokenizers import Regex, pre_tokenizers

from opd.config.recipe import DomainConfig, RolloutConfig
from opd.data.load import load_file
from opd.errors import CheckpointError, DataError, OpdError
from opd.metrics import read_metrics
from opd.models.hf_folder import adapter_base
from opd.models.peft_folder import read_peft
from opd.models.tokenizers import after_answer, end_of_turn, load_tokenizer
from opd.pipelines.check.models import _check_sampling
from opd.rollout.kv_cache import unpack_kv
from opd.rollout.prompts import Prompt, encode_prompt
from opd.rollout.weight_proof import check_config
from opd.storage.checkpoints import CheckpointStore
from opd.storage.files import write_sealed

DEEP = b'{"a":' * 10**5
TEXTS = [b"", b"[]", b"1", b"{", b"\xff", DEEP, b'{"a": NaN}', b"1" * 5000]
NESTED = b'{"step": 1, "prompt": "a", "label": ' + b"[" * 70 + b"]" * 70 + b"}"
VALUES: list[Any] = [None, [], {}, 1, -1, True, "x", "\x1b[2J" * 999, [[1]], {"a": []}, 10**400, 1.5]


def refused(use: Callable[[], Any], kind: type[OpdError]) -> None:
    with pytest.raises(kind) as caught:
        use()
    assert len(str(caught.value)) < 800


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    CheckpointStore(tmp_path).save(1, {"model": {"w": torch.ones(2)}}, {"a": 1})
    return tmp_path / "step_1" / "manifest.json"


def manifest(step: Any = 1, **more: Any) -> dict[str, Any]:
    return {"step": step, "owner": "", "state": {}, "files": {}} | more


def test_manifests_of_checkpoints_are_skipped_with_a_sentence(checkpoint, caplog):
    store = CheckpointStore(checkpoint.parents[1])
    assert store.latest() is not None
    documents = [manifest(files={name: "0" * 64}) for name in NAMES if "\ud800" not in name]
    documents += [manifest(**{key: value}) for key in ("files", "state") for value in VALUES[3:8]]
    documents += [manifest(files={"model": value}) for value in VALUES]
    for document in documents:
        write_sealed(checkpoint, document)
        assert store.latest() is None, document
    for text in TEXTS:
        checkpoint.write_bytes(text)
        assert store.latest() is None, text[:20]
    assert len(caplog.messages) == len(documents) + len(TEXTS)


def test_a_pipe_in_the_place_of_a_checkpoints_file_is_not_waited_for(checkpoint):
    for path in (checkpoint.parent / "model.safetensors", checkpoint):
        path.unlink()
        os.mkfifo(path)
        assert CheckpointStore(checkpoint.parents[1]).latest() is None


ADAPTER: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "base"}


def test_adapters_that_make_no_sense_are_refused(tmp_path):
    config, weights = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    name = "base_model.model.l.q_proj.lora_"
    save_file({f"{name}A.weight": torch.ones(2, 3), f"{name}B.weight": torch.ones(3, 2)}, weights)
    config.write_text(json.dumps(ADAPTER))
    read_peft(tmp_path)
    for key, values in {
        "r": [0, -1, 2**62, 10**400, 1.5, "2", True, None, [], {}],
        "lora_alpha": ["x", None, [], {}, float("nan"), float("inf"), 10**400],
        "peft_type": [None, [], {}, "\x1b[2J" * 999], "init_lora_weights": ["pissa", "\x1b[2J" * 999, [], {}],
        "bias": ["all", [], None],
    }.items():  # fmt: skip
        for value in values:
            config.write_text(json.dumps(ADAPTER | {key: value}))
            refused(lambda: read_peft(tmp_path), CheckpointError)
    for text in (*TEXTS, b'{"peft_type": "LORA", "r": 2, "lora_alpha": 1e999}'):
        config.write_bytes(text)
        refused(lambda: read_peft(tmp_path), CheckpointError)
    config.write_text(json.dumps(ADAPTER))
    for a, b in (([3], [3, 2]), ([2, 3], [3, 3]), ([2, 3, 1], [3, 2]), ([], [])):
        save_file({f"{name}A.weight": torch.ones(a), f"{name}B.weight": torch.ones(b)}, weights)
        refused(lambda: read_peft(tmp_path), CheckpointError)


def test_bases_that_are_no_models_are_refused(tmp_path):
    config = tmp_path / "adapter_config.json"
    (tmp_path / "config.json").write_text("{}")  # an adapter that names itself would lead here for ever
    for named in (*NAMES, ".", str(tmp_path), "a" * 10**5, "a/" * 10**4, *VALUES):
        config.write_text(json.dumps(ADAPTER | {"base_model_name_or_path": named}))
        refused(lambda: adapter_base(tmp_path), CheckpointError)


def kept(text: bytes) -> dict[str, torch.Tensor]:
    origin = torch.frombuffer(bytearray(text or b" "), dtype=torch.uint8)
    return {"origin": origin, "tokens": torch.zeros(1, dtype=torch.int32), "lengths": torch.ones(1)}


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "tokenizer": ("tokenizer_config.json", lambda path: load_tokenizer(path.parent)),
    "worker": ("config.json", lambda path: check_config("a worker", {"model_path": path.parent}, {})),
    "metrics": ("metrics.jsonl", read_metrics),
    "data": (
        "data.jsonl",
        lambda path: load_file("a", DomainConfig(source=str(path), reward="a:b"), held_out_prompts=1),
    ),
    "keys and values": ("kept", lambda path: unpack_kv(kept(path.read_bytes()), torch.device("cpu"))),
}


@pytest.mark.parametrize("kind", READERS)
def test_no_reader_follows_a_document_of_any_depth(tmp_path, kind):
    """Whatever reads it later walks through it: what comes back whole may still end a run hours later."""
    name, read = READERS[kind]
    end = b"\n" if name.endswith(".jsonl") else b""
    for text in (DEEP, b"{", b"1", b"\xff", b"[]", NESTED):
        (tmp_path / name).write_bytes(text + end)
        refused(lambda: read(tmp_path / name), OpdError)
    with pytest.raises(OpdError, match="nested deeper than 64"):
        read(tmp_path / name)


def test_a_temperature_that_cannot_be_read_is_a_warning(tmp_path):
    for text in (NESTED, *TEXTS):
        (tmp_path / "generation_config.json").write_bytes(text)
        (finding,) = _check_sampling("model", str(tmp_path), RolloutConfig())
        assert finding.level == "warning"
        assert "is not readable JSON" in finding.detail


def splitting(pattern: str) -> Any:
    """A tokenizer that cuts text by `pattern`, as a folder's `tokenizer.json` may say."""
    made = tiny.tokenizer()
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    made.chat_template = "{% for m in messages %}{{ m.content }}" + "a" * 60 + "b{% endfor %}"
    return made


@pytest.mark.filterwarnings("ignore")
def test_a_tokenizer_whose_pattern_has_no_end_is_one_sentence():
    """Its library panics, which is no `Exception`."""
    tokenizer = splitting("(a+)+$")
    with pytest.raises(DataError, match="cannot encode the prompt") as caught:
        encode_prompt(Prompt.from_content("a" * 60 + "b", "x", "math"), tokenizer)
    assert len(str(caught.value)) < 800
    assert end_of_turn(tokenizer, {}) is None


def test_what_the_machine_refuses_a_library_is_not_the_prompts_fault(monkeypatch):
    class Refusing:
        bos_token = None

        def num_special_tokens_to_add(self, pair: bool) -> int:
            return 1

        def __call__(self, *_: object, **__: object) -> None:
            raise MemoryError

    with pytest.raises(MemoryError):
        encode_prompt(Prompt.from_content("a", "x", "math"), Refusing())  # pyright: ignore[reportArgumentType]
    tokenizer = splitting("a")
    monkeypatch.setattr(type(tokenizer), "__call__", Refusing.__call__)
    for read in (end_of_turn, after_answer):
        with pytest.raises(MemoryError):
            read(tokenizer, {})
