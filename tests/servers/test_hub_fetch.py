"""Fetching from the Hub: what is asked for, what is refused, and what becomes of damage on the way."""

import json
import sys

import pytest
import tiny
import yaml
from hub_server import TOKEN, is_large
from huggingface_hub.errors import HfHubHTTPError

from opd.config.hub_names import HubName, cached_name, hub_name
from opd.errors import CheckpointError, ModelError, OpdError, StorageError
from opd.models import hub as fetching
from opd.models.causal_lm import CausalLM
from opd.models.hub import fetch_from_hub, is_transient, was_retried
from opd.models.tokenizers import load_tokenizer
from opd.retry import Retry

NAME = HubName("org/tiny")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(fetching, "RETRY", Retry(attempts=3, pause=0.01, longest=0.02))
    monkeypatch.setattr(fetching, "SECONDS", 1.0)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", HubName("org/name")),
        ("org/na.me-2@v1.0", HubName("org/na.me-2", "v1.0")),
        ("org/name@refs/pr/7", HubName("org/name", "refs/pr/7")),
        ("hf://org/name@abc", HubName("org/name", "abc")),
        ("hf://models/org/name", HubName("org/name")),
        ("hf://datasets/org/set@v2/a/b.jsonl", HubName("org/set", "v2", "a/b.jsonl")),
        ("gpt2", None),
        ("a/b/c", None),
        ("/org/name", None),
        ("./name", None),
        ("~/name", None),
        ("../name", None),
        ("runs/merged", None),
        ("runs/none/merged", None),
        ("hf://runs/merged", HubName("runs/merged")),
        ("org/..", None),
        ("org--x/name", None),
        ("org/name@../x", None),
        ("templates/chat.jinja", None),
        ("s3://bucket/name", None),
        ("hf://datasets/org/set/../../x.jsonl", None),
        ("org/name\n", None),
        ("", None),
    ],
)
def test_what_names_something_on_the_hub(text, name):
    assert hub_name(text) == name


def test_a_local_folder_of_that_name_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub_name("org/name") is not None
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert hub_name("org/name") is None
    assert hub_name("hf://org/name") == HubName("org/name")


def test_a_model_comes_whole_and_nothing_else_with_it(hub, hub_model):
    commit = hub.add("org/tiny", hub_model).refs["main"]
    seen: list[tuple[int, int]] = []
    found = fetch_from_hub(NAME, report=lambda done, total: seen.append((done, total)))
    assert found.commit == commit
    assert cached_name(found.path) == NAME.at_revision(commit)
    model = CausalLM.from_pretrained(found.path)
    assert model.digest() == tiny.model().digest()
    assert load_tokenizer(found.path).get_vocab() == tiny.tokenizer().get_vocab()
    assert seen[-1][0] == seen[-1][1] == sum(path.stat().st_size for path in found.path.iterdir())
    assert {path.name for path in found.path.iterdir()} <= fetching._SMALL | {"model.safetensors"}
    assert not hub.asked("escaped") + hub.asked(".bin") + hub.asked(".py") + hub.asked("consolidated")
    assert not [path for path in hub.cache.parent.rglob("*escaped*")]


def test_what_is_in_the_cache_is_not_downloaded_again(hub, hub_model):
    hub.add("org/tiny", hub_model)
    first = fetch_from_hub(NAME)
    hub.server.asked.clear()
    assert fetch_from_hub(NAME) == first
    assert hub.server.asked == ["GET /api/models/org/tiny/revision/main"]


def test_a_tokenizer_alone_brings_no_weights(hub, hub_model):
    hub.add("org/tiny", hub_model)
    found = fetch_from_hub(NAME, weights=False)
    assert load_tokenizer(found.path).get_vocab() == tiny.tokenizer().get_vocab()
    assert not hub.asked("model.safetensors")


def test_a_branch_a_tag_and_a_commit(hub, hub_model):
    made = hub.add("org/tiny", hub_model)
    old = made.refs["main"]
    made.refs["v1"] = old
    new = made.commit({**hub_model, "generation_config.json": b'{"eos_token_id": 1}'})
    assert [fetch_from_hub(NAME.at_revision(at)).commit for at in ("v1", old, "main", new)] == [
        old,
        old,
        new,
        new,
    ]
    files = [path.name for path in fetch_from_hub(NAME).path.iterdir()]
    hub.server.asked.clear()
    assert fetch_from_hub(NAME, old, files=files).commit == old  # of a run that goes on
    assert hub.server.asked == []


def test_sharded_weights_by_their_index(hub, hub_model):
    files = dict(hub_model)
    files["model-00001-of-00001.safetensors"] = files.pop("model.safetensors")
    names = dict.fromkeys(tiny.model().module.state_dict(), "model-00001-of-00001.safetensors")
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": names}).encode()
    hub.add("org/tiny", files)
    assert (fetch_from_hub(NAME).path / "model-00001-of-00001.safetensors").is_file()
    files["model.safetensors.index.json"] = json.dumps(
        {"metadata": {}, "weight_map": {"a": "../../x.safetensors"}}
    ).encode()
    hub.add("org/evil", files)
    with pytest.raises(CheckpointError, match=r"org/evil@main.*names '../../x.safetensors'"):
        fetch_from_hub(HubName("org/evil"))


def test_a_file_of_a_data_set(hub):
    hub.add("org/set", {"a/train.jsonl": b'{"prompt": "1="}\n', "load.py": b""}, "datasets")
    name = hub_name("hf://datasets/org/set/a/train.jsonl")
    assert name is not None
    found = fetch_from_hub(name)
    assert found.path.read_bytes() == b'{"prompt": "1="}\n'
    assert cached_name(found.path) == name.at_revision(found.commit)
    with pytest.raises(StorageError, match=r"org/set has no file a/test\.jsonl at main"):
        fetch_from_hub(HubName("org/set", file="a/test.jsonl"))


REFUSED = {
    "auto_map": ({"config.json": b'{"auto_map": {"AutoConfig": "a.B"}}'}, "names Python code of its own"),
    "pickles": ({"model.safetensors": None}, "pytorch_model.bin, a pickle"),
    "gguf": ({"model.safetensors": None, "pytorch_model.bin": None, "m.gguf": b""}, "holds GGUF files"),
    "an adapter": ({"model.safetensors": None, "adapter_config.json": b"{}"}, "is an adapter"),
    "no config": ({"config.json": None}, "no config.json"),
    "nothing": (dict.fromkeys(["model.safetensors", "pytorch_model.bin"]), "neither model.safetensors nor"),
    "a lost shard": ({"checksums.json": b'{"more.safetensors": "00"}'}, "has no more.safetensors"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_repositories_that_are_refused_before_their_weights_come(hub, hub_model, what):
    changes, sentence = REFUSED[what]
    hub.add("org/tiny", {k: v for k, v in (hub_model | changes).items() if v is not None})
    with pytest.raises(OpdError, match=sentence):
        fetch_from_hub(NAME)
    assert not hub.asked("/storage/")


def test_a_file_of_impossible_size_is_not_begun(hub, hub_model):
    hub.add("org/tiny", hub_model).claimed["tokenizer.json"] = 10**12
    with pytest.raises(StorageError, match=r"tokenizer.json has 1000000000000 bytes"):
        fetch_from_hub(NAME)
    assert not hub.asked("GET /org/tiny/resolve")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"private": True}, "no folder org/tiny here and no model of the name org/tiny"),
        ({"gated": True}, "org/tiny is gated: ask for access"),
        ({"kind": "datasets"}, "no model of the name org/tiny"),
        ({"refs": {"other": "0" * 40}}, "org/tiny has no revision main"),
    ],
)
def test_repositories_that_may_not_be_read(hub, hub_model, change, sentence):
    made = hub.add("org/tiny", hub_model)
    for name, value in change.items():
        setattr(made, name, value)
    with pytest.raises(StorageError, match=sentence):
        fetch_from_hub(NAME)


def test_a_token_is_sent_and_never_shown(hub, hub_model, monkeypatch):
    hub.add("org/tiny", hub_model).private = True
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert fetch_from_hub(NAME).path.is_dir()
    assert hub.server.leaked == []
    assert TOKEN not in str(StorageError(f"it said {TOKEN}"))


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_hub_that_fails_for_a_moment_is_asked_again(hub, hub_model, status):
    hub.add("org/tiny", hub_model)
    hub.proxy.inject("status", times=2, status=status, path="/api/")
    hub.proxy.inject("status", times=1, status=500, path="/storage/")
    assert CausalLM.from_pretrained(fetch_from_hub(NAME).path).digest() == tiny.model().digest()


@pytest.mark.parametrize(
    ("status", "passes", "asked"),
    [
        *((status, False, False) for status in (403, 404, 409, 499)),
        *((status, True, True) for status in (408, 429)),
        *((status, True, False) for status in (500, 503)),
    ],
)
def test_which_answers_of_the_hub_pass_and_which_its_library_asked_for_again(status, passes, asked):
    library = sys.modules[HfHubHTTPError.__mro__[1].__module__.partition(".")[0]]  # its name changes
    response = library.Response(status, request=library.Request("GET", "http://hub"))
    error = HfHubHTTPError("no", response=response)
    assert (is_transient(error), was_retried(error)) == (passes, asked)


@pytest.mark.parametrize(("status", "mend"), [(500, "HF_HUB_OFFLINE"), (403, "HF_TOKEN"), (404, "try again")])
def test_a_hub_that_keeps_failing_is_one_sentence(hub, hub_model, status, mend):
    hub.add("org/tiny", hub_model)
    hub.proxy.inject("status", times=99, status=status, path="/storage/")
    with pytest.raises(StorageError, match=rf"(?s)^[^\n]*{status}[^\n]*{mend}[^\n]*$"):
        fetch_from_hub(NAME)


@pytest.mark.parametrize("kind", ["short", "reset", "stall"])
def test_a_download_that_is_cut_goes_on(hub, hub_model, kind):
    hub.add("org/tiny", hub_model)
    hub.proxy.inject(kind, after=1000, path="/storage/")
    assert CausalLM.from_pretrained(fetch_from_hub(NAME).path).digest() == tiny.model().digest()


@pytest.mark.slow
def test_a_download_that_never_ends_is_given_up(hub, hub_model):
    hub.add("org/tiny", hub_model)
    hub.proxy.inject("short", times=99, after=1000, path="/storage/")
    with pytest.raises(StorageError, match=r"model.safetensors of org/tiny@\w{40} cannot be had"):
        fetch_from_hub(NAME)
    assert not list(hub.cache.rglob("*.incomplete"))


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_flipped_bits_are_found_and_not_kept(hub, hub_model, file):
    hub.add("org/tiny", hub_model)
    hub.proxy.inject("flip", after=40, path="/storage/" if is_large(file) else file)
    with pytest.raises(StorageError, match=rf"{file} of org/tiny@\w{{40}} did not come as the Hub says"):
        fetch_from_hub(NAME)
    assert CausalLM.from_pretrained(fetch_from_hub(NAME).path).digest() == tiny.model().digest()


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("more", [-7, 7])
def test_another_size_than_the_hub_says(hub, hub_model, file, more):
    made = hub.add("org/tiny", hub_model)
    made.claimed[file] = len(hub_model[file]) + more
    with pytest.raises(StorageError, match=rf"{file} of org/tiny@\w{{40}} did not come"):
        fetch_from_hub(NAME)


def test_weights_of_another_repository_in_place_of_its_own(hub, hub_model):
    swapped = bytearray(hub_model["model.safetensors"])
    swapped[-1] ^= 1
    hub.add("org/tiny", hub_model).swapped["model.safetensors"] = bytes(swapped)
    with pytest.raises(StorageError, match="another digest"):
        fetch_from_hub(NAME)


def test_without_network_the_cache_is_taken_and_said(hub, hub_model, caplog):
    hub.add("org/tiny", hub_model)
    first = fetch_from_hub(NAME)
    hub.proxy.stop()
    assert fetch_from_hub(NAME) == first
    assert "going on with the cached commit" in caplog.text
    with pytest.raises(StorageError, match=r"org/other@main is not in the cache .* no folder org/other here"):
        fetch_from_hub(HubName("org/other"))


def test_offline_nobody_is_asked(hub, hub_model, monkeypatch):
    from huggingface_hub import constants

    hub.add("org/tiny", hub_model)
    first = fetch_from_hub(NAME)
    hub.server.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch_from_hub(NAME) == first == fetch_from_hub(NAME.at_revision(first.commit))
    with pytest.raises(StorageError, match=r"not in the cache .*HF_HUB_OFFLINE is set"):
        fetch_from_hub(NAME.at_revision("v2"))
    (first.path / "model.safetensors").unlink()
    with pytest.raises(StorageError, match="not whole in the cache"):
        fetch_from_hub(NAME)
    assert hub.server.asked == []


def test_a_server_that_says_nothing_is_given_up(hub, hub_model):
    hub.add("org/tiny", hub_model)
    hub.proxy.inject("stall", times=99, path="/api/")
    with pytest.raises(StorageError, match="not in the cache"):
        fetch_from_hub(NAME)


def test_what_is_no_hub_is_said(hub, hub_model):
    hub.add("org/tiny", hub_model)
    hub.server.repositories["org/tiny"].refs["main"] = "short"
    hub.server.repositories["org/tiny"].commits["short"] = hub_model
    with pytest.raises(StorageError, match="names no commit; check HF_ENDPOINT"):
        fetch_from_hub(NAME)


def test_a_reference_in_the_cache_that_names_no_commit(hub, hub_model, monkeypatch):
    from huggingface_hub import constants

    hub.add("org/tiny", hub_model)
    fetch_from_hub(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for damage in (b"\xba\xff", b"../../../etc", b""):
        (hub.cache / "models--org--tiny" / "refs" / "main").write_bytes(damage)
        with pytest.raises(StorageError, match="not in the cache"):
            fetch_from_hub(NAME)


def test_refused_models_are_refused_again_from_the_cache(hub, hub_model):
    hub.add("org/tiny", hub_model | {"tokenizer_config.json": b'{"auto_map": {"AutoTokenizer": ["a.B"]}}'})
    for _ in range(2):
        with pytest.raises(ModelError, match="never run"):
            fetch_from_hub(NAME)


def test_a_plan_brings_no_weights(hub, hub_model, tmp_path, ends):
    hub.add("org/model", hub_model)
    rows = "".join(f'{{"prompt": "{number}=", "label": "1"}}\n' for number in range(50))
    (tmp_path / "prompts.jsonl").write_text(rows)
    domain = {"source": str(tmp_path / "prompts.jsonl"), "reward": "exact"}
    written = {"name": "far", "model": {"path": "org/model"}, "domains": {"sort": domain}}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(written | {"rollout": {"max_new_tokens": 8, "max_sequence": 64}}))
    assert "parameters; not here, and reckoned from its config.json" in ends(0, ["plan", str(path)]).out
    assert not [*hub.cache.rglob("*.safetensors")]
