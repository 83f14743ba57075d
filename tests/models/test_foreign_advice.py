"""What transformers says of itself while models are used here: faults of a model are told, advice is not."""

import logging
from pathlib import Path

import pytest
from test_architectures import _EXPERTS, _GPT, _MAMBA, _SHAPE, saved

from opd.models.hf_folder import read_config
from opd.pipelines.cli import main

_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
_FEWER = {"original_max_position_embeddings": 24}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 12}
ADVISED = {
    "gpt2": _GPT,  # that its ids may be padded
    "phi3": _SHAPE | _FEWER | {"rope_parameters": _LONG | _FEWER},  # to write another field
    "granitemoehybrid": _EXPERTS  # to install faster kernels, before it is refused
    | _MAMBA
    | {"layer_types": ["mamba", "attention"], "num_local_experts": 0},
}


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings of transformers so far."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("transformers") and record.levelno >= logging.WARNING
    ]


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every warning, also one that this process has said already."""
    monkeypatch.setattr(logging.Logger, "warning_once", logging.Logger.warning, raising=False)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)


@pytest.mark.parametrize("family", ADVISED)
def test_advice_to_others_is_not_printed(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = saved(family, ADVISED[family], tmp_path / "m")
    caplog.clear()
    main(["sample", str(folder), "--prompt", "0=", "--max-tokens", "2"])
    main(["publish", str(folder), str(tmp_path / "store")])
    assert told(caplog) == []


def test_what_is_wrong_with_a_configuration_is_still_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = saved("llama", _SHAPE | {"rope_parameters": _YARN}, tmp_path / "m")
    caplog.clear()
    read_config(folder)
    assert any("does not match the ratio" in one for one in told(caplog))
