"""Checkpoints and adapters that lead elsewhere or make no sense: one sentence each."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import NAMES
from safetensors.torch import save_file

from opd.errors import CheckpointError, OpdError
from opd.models.hf_folder import adapter_base
from opd.models.hf_weights import read_peft
from opd.storage.checkpoints import CheckpointStore
from opd.storage.sealed import write_sealed

DEEP = b'{"a":' * 10**5
TEXTS = [b"", b"[]", b"1", b"{", b"\xff", DEEP, b'{"a": NaN}', b"1" * 5000]
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


def test_manifests_of_checkpoints_are_skipped_with_a_sentence(checkpoint):
    told: list[str] = []
    store = CheckpointStore(checkpoint.parents[1], on_warning=told.append)
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
    assert len(told) == len(documents) + len(TEXTS)


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
