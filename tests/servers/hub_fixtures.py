"""A Hub on localhost with a model on it, and huggingface_hub led there, with a cache of its own."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny
from fault_proxy import FaultProxy, fault_proxy
from hub_server import HubServer, Repository, files_of, hub_server

from opd.models.checkpoint import save_checkpoint

__all__ = ["hub", "hub_model"]


@dataclass
class Hub:
    """What a test asks for and changes."""

    server: HubServer
    proxy: FaultProxy
    """In front of the server: where clients are led."""
    cache: Path

    def add(self, repo: str, files: dict[str, bytes], kind: str = "models") -> Repository:
        """A repository with one commit."""
        made = self.server.repositories[repo] = Repository(kind)
        made.commit(files)
        return made

    def asked(self, part: str) -> list[str]:
        """Requests whose path has `part` in it."""
        return [one for one in self.server.asked if part in one]

    def environment(self) -> dict[str, str]:
        """For processes that are to use it too."""
        return {
            "HF_ENDPOINT": self.proxy.endpoint,
            "HF_HUB_CACHE": str(self.cache),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
        }


@pytest.fixture(scope="session")
def hub_model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A tiny model as a repository holds it, without checksums, beside what is never fetched."""
    folder = save_checkpoint(tiny.model(), tiny.tokenizer(), tmp_path_factory.mktemp("hub") / "m", {})
    files = files_of(folder)
    del files["checksums.json"]
    return files | {
        "pytorch_model.bin": b"\x80\x04never",
        "modeling_own.py": b"raise SystemExit",
        "consolidated.safetensors": b"never",
        "original/model.safetensors": b"never",
        "../../escaped.json": b"{}",
        "tokenizer_config.json/../../escaped.json": b"{}",
    }


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    with hub_server() as server, fault_proxy(server.server_address[:2]) as proxy:
        made = Hub(server, proxy, tmp_path / "cache")
        server.storage = proxy.endpoint.replace("127.0.0.1", "localhost")
        for name, value in made.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(constants, "ENDPOINT", proxy.endpoint)
        template = proxy.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(made.cache))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
        yield made
