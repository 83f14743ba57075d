"""Pushing a model's folder to the Hub, and fetching it back."""

import pytest
import tiny
from hub_server import TOKEN, Repository, files_of

from opd.config.hub_names import HubName
from opd.models.checkpoint import save_checkpoint
from opd.models.hub import fetch_from_hub
from opd.pipelines.cli import main
from opd.retry import Retry

# huggingface_hub uploads in a way that its HTTP library has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("opd.pipelines.commands.publish.RETRY", Retry(attempts=3, pause=0.01, longest=0.02))
    card = {"about": "A test.", "base_model": str(tmp_path / "base")}
    made = save_checkpoint(tiny.model(), tiny.tokenizer(), tmp_path / "mine", card)
    (made / "optimizer.pt").write_bytes(b"of no use to a reader")
    return made


def test_a_model_is_pushed_and_comes_back_the_same(hub, folder, monkeypatch, ends):
    said = ends(0, ["push", str(folder), "me/mine"])
    made = hub.server.repositories["me/mine"]
    assert made.private
    assert f"model: {{path: me/mine@{made.refs['main']}}}" in said.out
    assert "is no name on the Hub; the card is pushed without it" in said.err
    there, here = made.commits[made.refs["main"]], files_of(folder)
    assert "optimizer.pt" not in there
    assert b"\nbase_model:" not in there["README.md"]
    here = {name: data for name, data in here.items() if name not in ("README.md", "optimizer.pt")}
    assert {name: there[name] for name in here} == here
    back = fetch_from_hub(HubName("me/mine"))
    assert {path.name for path in back.path.iterdir()} == set(here)
    monkeypatch.delenv("HF_TOKEN")
    hub.server.asked.clear()
    assert "pushing needs a token that may write" in ends(2, ["push", str(folder), "me/other"]).err
    assert hub.server.asked == []


def test_a_branch_a_public_repository_and_one_that_is_there(hub, folder):
    assert main(["push", str(folder), "me/mine", "--public", "--revision", "v2"]) == 0
    made = hub.server.repositories["me/mine"]
    assert not made.private
    assert "model.safetensors" in made.commits[made.refs["v2"]]
    assert "model.safetensors" not in made.commits[made.refs["main"]]
    assert main(["push", str(folder), "me/mine"]) == 0
    assert "model.safetensors" in made.commits[made.refs["main"]]


def test_a_hub_that_fails_for_a_moment_is_asked_again(hub, folder):
    hub.proxy.inject("status", times=2, status=503, method="POST", path="/api/repos/create")
    hub.proxy.inject("status", times=1, status=500, method="POST", path="/commit/main")
    assert main(["push", str(folder), "me/mine"]) == 0


@pytest.mark.parametrize(
    ("path", "status", "sentence"),
    [("/api/repos/create", 503, "try again later"), ("/commit/", 403, "check the token in HF_TOKEN")],
)
def test_a_hub_that_refuses_is_one_sentence(hub, folder, capsys, path, status, sentence):
    hub.proxy.inject("status", times=99, status=status, method="POST", path=path)
    assert main(["push", str(folder), "me/mine"]) == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("opd: error")]
    assert sentence in said
    assert TOKEN not in said


def test_what_got_there_otherwise_is_found(hub, folder, monkeypatch, ends):
    commit = Repository.commit

    def damaged(self, files, branch="main"):
        return commit(self, {k: v + b"x" if k.endswith("tensors") else v for k, v in files.items()}, branch)

    monkeypatch.setattr(Repository, "commit", damaged)
    assert "model.safetensors is not in me/mine@" in ends(2, ["push", str(folder), "me/mine"]).err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["{folder}/..", "me/mine"], "is the folder above models, and no model's; give one of them"),
        (["{folder}/none", "me/mine"], "is not a folder"),
        (["{folder}", "mine"], "'mine' cannot be a repository"),
        (["{folder}", "me/mine@v1", "--revision", "v1"], "cannot be a repository"),
        (["{folder}", "me/mine", "--revision", "../x"], "--revision ../x: give the name of a branch"),
        (["{folder}", "me/mine", "--revision", "0" * 40], "give the name of a branch"),
        (["{folder}", "me/mine", "--revision", "a", "--revision", "b"], "--revision is given twice"),
        (["{folder}"], "the following arguments are required: REPO"),
        (["{folder}", "me/mine", "--seed", "1"], "opd push takes no --seed"),
    ],
)
def test_what_cannot_be_pushed_is_said_before_anything_is_asked(hub, folder, ends, words, sentence):
    assert sentence in ends(2, ["push", *(word.format(folder=folder) for word in words)]).err
    assert hub.server.asked == []


def test_a_run_folder_and_a_damaged_model_are_refused(hub, folder, tmp_path, ends):
    (tmp_path / "run" / "merged").mkdir(parents=True)
    (tmp_path / "run" / "inputs.json").write_text("{}")
    assert "is a run's folder, and no model's" in ends(2, ["push", str(tmp_path / "run"), "me/mine"]).err
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert "sha256" in ends(2, ["push", str(folder), "me/mine"]).err
    assert hub.server.asked == []
