import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from recipes import tiny_recipe, write_recipe

from opd.config import Recipe
from opd.config.load import absolute_paths, path_keys
from opd.config.schema import key_paths
from opd.errors import CheckpointError, RunFolderError
from opd.models.checkpoint import save_checkpoint
from opd.pipelines.cli import main
from opd.pipelines.evaluation.evaluate import _measurement_identity
from opd.pipelines.launch import machine
from opd.pipelines.records import run_folder
from opd.pipelines.records.run_folder import AcceptedChanges, RunFolder, default_path
from opd.pipelines.stages.context import StageContext
from opd.storage.checkpoints import CheckpointStore
from opd.storage.wal import TokenWAL, read_log
from opd.types import Chunk, RolloutRequest, SamplingParams


def make_recipe(**changes) -> Recipe:
    data = {
        "name": "demo",
        "model": {"config": {"model_type": "llama"}},
        "domains": {"sort": {"source": "procedural:sort"}},
        "runtime": {"threads": 1},
    }
    return Recipe.model_validate({**data, **changes})


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    """A run that has begun, and that everything is refused of."""
    RunFolder.create(path := tmp_path_factory.mktemp("demo") / "run", make_recipe()).close()
    return path


def test_create_writes_the_recipe_and_refuses_a_second_run(tmp_path: Path):
    with RunFolder.create(tmp_path / "run", make_recipe()) as folder:
        assert Recipe.model_validate(json.loads(folder.config_path.read_text())) == make_recipe()
    with pytest.raises(RunFolderError, match="exists already; add --resume"):
        RunFolder.create(tmp_path / "run", make_recipe())


def test_an_empty_folder_and_one_killed_at_birth_are_free(tmp_path: Path):
    RunFolder.create(tmp_path, make_recipe()).close()
    (tmp_path / "config.json").rename(tmp_path / ".config.json.0123abcd.tmp")
    with RunFolder.resume(tmp_path, make_recipe()) as folder:
        assert folder.config_path.exists()


def _killed_at(call: int, path: Path) -> bool:
    """Create a run in a child that kills itself before its `call`-th use of files; whether it got there."""
    pid = os.fork()
    if pid == 0:
        left = call

        def dying(real):
            def use(*arguments, **options):
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments, **options)

            return use

        for name in (
            "mkdir",
            "open",
            "fdopen",
            "replace",
            "rename",
            "fsync",
            "ftruncate",
            "pwrite",
            "unlink",
        ):
            setattr(os, name, dying(getattr(os, name)))
        RunFolder.create(path, make_recipe())
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.slow
def test_a_run_killed_at_any_step_of_its_creation_can_be_resumed_or_started(tmp_path: Path):
    kills = 0
    while _killed_at(kills + 1, tmp_path / f"{kills}"):
        path = tmp_path / f"{kills}"
        began = (path / "config.json").exists()
        if path.exists():
            if not began:
                again = tmp_path / f"{kills}-again"
                shutil.copytree(path, again)
                RunFolder.create(again, make_recipe()).close()
            RunFolder.resume(path, make_recipe()).close()
        for _ in range(2 * path.exists()):
            with RunFolder.resume(path, make_recipe()) as folder:
                assert Recipe.model_validate(folder.read_config()) == make_recipe()
                assert folder.run_id
        kills += 1
    assert kills > 12


@pytest.mark.parametrize("file", ["config.json", "inputs.json"])
def test_a_run_that_lost_a_file_it_began_with_is_not_begun_again(tmp_path: Path, file):
    with RunFolder.create(tmp_path / "run", make_recipe()) as folder:
        folder.mark_done("merge", {})
    (tmp_path / "run" / file).unlink()
    for opening in (RunFolder.create, RunFolder.resume):
        with pytest.raises(RunFolderError, match=r"exists already|inputs\.json is missing"):
            opening(tmp_path / "run", make_recipe())


def test_a_number_beyond_all_numbers_is_damage_of_its_file(tmp_path: Path):
    RunFolder.create(tmp_path, make_recipe()).close()
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"seed": 0', '"seed": 1e999', 1))
    for reading in (
        lambda: RunFolder.resume(tmp_path, make_recipe()),
        RunFolder.attach(tmp_path).read_config,
    ):
        with pytest.raises(RunFolderError, match=r"config\.json cannot be read as JSON \(the number 1e999"):
            reading()


def test_what_a_run_was_given_must_stay_what_it_was(tmp_path: Path):
    data, model = tmp_path / "sort.jsonl", tmp_path / "model"
    data.write_text(json.dumps({"prompt": "<sort>1=", "label": "1"}) + "\n")
    save_checkpoint(tiny.model(), tiny.tokenizer(), model, {})
    recipe = make_recipe(model={"path": str(model)}, domains={"sort": {"source": str(data), "reward": "a:b"}})
    RunFolder.create(tmp_path / "run", recipe).close()
    whole = {path: path.read_bytes() for path in [data, *model.iterdir()]}
    for path, content in whole.items():
        path.write_bytes(content + b" ")
        if path.name in ("README.md", "model.safetensors"):  # unread, and compared by who loads it
            RunFolder.resume(tmp_path / "run", recipe).close()
        else:
            with pytest.raises((RunFolderError, CheckpointError), match=path.name.replace(".", r"\.")):
                RunFolder.resume(tmp_path / "run", recipe)
        path.write_bytes(content)
    RunFolder.resume(tmp_path / "run", recipe).close()
    (model / "checksums.json").unlink()  # then the weights themselves are what the run remembers
    RunFolder.create(tmp_path / "other", recipe).close()
    (model / "model.safetensors").write_bytes(whole[model / "model.safetensors"] + b" ")
    with pytest.raises(RunFolderError, match=r"model\.path: model\.safetensors is not what it was"):
        RunFolder.resume(tmp_path / "other", recipe)


def test_the_base_of_an_adapter_that_a_run_was_given_must_stay_what_it_was(tmp_path: Path):
    base, given = tmp_path / "base", tmp_path / "adapter"
    save_checkpoint(tiny.model(), tiny.tokenizer(), base, {})
    given.mkdir()
    told = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 1, "lora_alpha": 1}
    (given / "adapter_config.json").write_text(json.dumps(told))
    (given / "adapter_model.safetensors").write_bytes(b"weights")
    recipe = make_recipe(model={"path": str(given)})
    RunFolder.create(tmp_path / "run", recipe).close()
    for file, told in (
        (given / "adapter_config.json", "adapter_config.json"),
        (given / "adapter_model.safetensors", "adapter_model.safetensors"),
        (base / "checksums.json", "base/checksums.json"),
    ):
        content = file.read_bytes()
        file.write_bytes(content + b" ")
        with pytest.raises(RunFolderError, match=rf"model\.path: {told} is not what it was"):
            RunFolder.resume(tmp_path / "run", recipe)
        file.write_bytes(content)
    RunFolder.resume(tmp_path / "run", recipe).close()


CODE = {
    "mine/__init__.py": "",
    "mine/rewards.py": "from . import judge\ndef f(sample):\n    import mine_helper\n    return 1.0\n",
    "mine/judge.py": "import json, numpy, opd.types\nfrom mine.deep.words import *\n",
    "mine/deep/words.py": "raise RuntimeError('nothing is run')\n",
    "mine_helper.py": "import mine.rewards  # in a circle\n",
    "mine/unused.py": "",
    "mine_loss.py": "no python at all (",
}


def test_the_code_of_a_run_must_stay_what_it_was(tmp_path: Path, monkeypatch):
    for name, text in CODE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    recipe = make_recipe(
        domains={"sort": {"source": "procedural:sort", "reward": "mine.rewards:f"}},
        specialist={"policy_loss": {"path": "mine_loss:f"}},
        distill={"to_batch": "opd.imports:told"},  # of opd itself: not the user's
    )
    RunFolder.create("run", recipe).close()
    given = json.loads(Path("run/inputs.json").read_text())["given"]
    assert sorted(given["domains.sort.reward"]) == sorted(CODE.keys() - {"mine/unused.py", "mine_loss.py"})
    assert list(given["specialist.policy_loss.path"]) == ["mine_loss.py"]
    assert given.keys() == {"domains.sort.reward", "specialist.policy_loss.path"}
    for name, text in CODE.items():
        Path(name).write_text(text + "# changed\n")
        if name == "mine/unused.py":
            RunFolder.resume("run", recipe).close()
        else:
            with pytest.raises(RunFolderError, match=rf"{name} is not what it was .*restore it, or .*--out"):
                RunFolder.resume("run", recipe)
        Path(name).write_text(text)
    RunFolder.resume("run", recipe).close()
    Path("mine_loss.py").unlink()
    with pytest.raises(RunFolderError, match=r"specialist\.policy_loss\.path: mine_loss.py is not"):
        RunFolder.resume("run", recipe)


def measured_as(folder: RunFolder) -> str:
    """What a measurement of a given model is known by."""
    recipe = make_recipe()
    context = StageContext.open(recipe, folder, "merge", lambda *_: None)
    try:
        return _measurement_identity(context, folder.path.parent)
    finally:
        context.metrics.close()


def test_changed_code_is_accepted_where_asked_and_recorded(tmp_path: Path, monkeypatch):
    data = Path("prompts.jsonl")
    monkeypatch.chdir(tmp_path)
    Path("late.py").write_text("import late_helper\n")
    Path("late_helper.py").write_text("")
    data.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    recipe = make_recipe(domains={"own": {"source": str(data), "reward": "late:f"}})
    with RunFolder.create("run", recipe) as folder:
        folder.mark_done("base", {"steps": 1})
        (folder.stage_folder("merge") / "metrics.jsonl").touch()
        folder.stage_folder("evaluate")
        assert folder.code_changes == []
        measured = measured_as(folder)
    Path("late.py").write_text("import late_helper, late_more\n")
    Path("late_more.py").touch()
    told: list[str] = []
    accepted = AcceptedChanges(code=True, tell=lambda kind, what: told.append(f"{kind}: {what}"))
    with pytest.raises(
        RunFolderError, match=r"late\.py is not .* by --resume --accept-changed-code, or start"
    ):
        RunFolder.check("run", recipe, resume=True)
    RunFolder.check("run", recipe, resume=True, accepted=AcceptedChanges(code=True))
    with RunFolder.resume("run", recipe, accepted) as folder:
        (change,) = folder.code_changes
        assert measured_as(folder) != measured, "other rewards measure every model again"
    assert told == ["code: late.py (domains.own.reward), late_more.py (domains.own.reward)"]
    assert (change["done"], change["under_way"]) == (["base"], ["merge"])
    files = change["files"]["domains.own.reward"]
    given = json.loads(Path("run/inputs.json").read_text())["given"]["domains.own.reward"]
    assert (files["late.py"]["was"], files["late_more.py"]["was"]) == (given["late.py"], None)
    assert files["late.py"]["is"] != given["late.py"]
    with RunFolder.resume("run", recipe, accepted) as folder:  # what is accepted may not change either
        assert len(folder.code_changes) == len(told) == 1
    Path("late_more.py").write_text("# again\n")
    with pytest.raises(
        RunFolderError, match=r"late_more\.py is not what it was when the run .* last went on"
    ):
        RunFolder.resume("run", recipe)
    with RunFolder.resume("run", recipe, accepted) as folder:
        assert [len(change["files"]["domains.own.reward"]) for change in folder.code_changes] == [2, 1]
    Path("late.py").write_text("import late_helper\n")
    with RunFolder.resume("run", recipe, accepted) as folder:
        assert folder.code_changes[-1]["files"]["domains.own.reward"]["late_more.py"]["is"] is None
    with RunFolder.resume("run", recipe) as folder:  # nor does what is gone come back
        assert len(folder.code_changes) == 3
    data.write_text('{"prompt": "a"}\n{"prompt": "c"}\n')
    with pytest.raises(RunFolderError, match=r"prompts\.jsonl is not .* restore it, or start a new run"):
        RunFolder.resume("run", recipe, accepted)


def log_of(folder: Path, versions: dict[str, int]) -> None:
    """A log with a response of one token to each request, by weights of these versions."""
    with TokenWAL(folder) as log:
        for uid, version in versions.items():
            log.open(RolloutRequest(uid, np.ones(1, np.int32), SamplingParams(), 0), {})
            token = np.ones(1, np.int32)
            log.append(Chunk([uid], np.zeros(1, np.int32), token, np.zeros(1, np.float32), version, {}))


@pytest.mark.parametrize(
    ("file", "kept"), [("mended_reward.py", {"old", "now"}), ("mended_source.py", set())]
)
def test_mended_code_keeps_what_the_checkpoints_own_weights_have_written(
    tmp_path: Path, monkeypatch, file, kept
):
    """With other rewards later steps do not come again; with another source prompts are others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("mended_reward.py").write_text("def f(sample):\n    return 0.0\n")
    Path("mended_source.py").write_text(
        "from opd.data.procedural import Sort\n\n\nclass Mine(Sort):\n    pass\n"
    )
    recipe = make_recipe(
        domains={"own": {"source": "procedural:mended_source:Mine", "reward": "mended_reward:f"}}
    )
    begun(Path("run"), recipe, {"step": 6}, "specialist-own")
    with RunFolder.resume("run", recipe) as folder:
        log_of(folder.wal_folder("specialist-own"), {"old": 5, "now": 6, "later": 7})
        log_of(folder.stage_folder("specialist-own") / "wal-rank-1", {"now": 6, "later": 8})
    Path(file).write_text(Path(file).read_text() + "# mended\n")
    with RunFolder.resume("run", recipe, AcceptedChanges(code=True)) as folder:
        for name, own in (("wal", kept), ("wal-rank-1", kept - {"old"})):
            log = folder.stage_folder("specialist-own") / name
            assert (set(read_log(log).uids()) if log.exists() else set()) == own


LOWER = {"lr": 1e-4, "schedule": "linear"}
LEVERS = {"specialist": {"optim": LOWER, "policy_loss": {"clip_high": 0.3}}, "rollout": {"temperature": 0.7}}


def begun(path: Path, recipe: Recipe, state: dict[str, Any], stage: str = "specialist-sort") -> None:
    """A run of which `stage` has a checkpoint."""
    with RunFolder.create(path, recipe) as folder:
        store = CheckpointStore(folder.checkpoints_folder(stage), owner=folder.owner_id(stage))
        store.save(int(state["step"]), {}, state)


def test_changed_settings_are_accepted_where_asked_and_recorded(tmp_path: Path):
    path, told = tmp_path / "run", []
    accepted = AcceptedChanges(settings=True, tell=lambda kind, what: told.append((kind, what)))
    begun(path, make_recipe(), {"step": 6})
    folder = RunFolder.attach(path)
    folder.mark_done("base", {"steps": 1})
    measured = measured_as(folder)
    log, other = folder.wal_folder("specialist-sort") / "0.log", folder.wal_folder("merge") / "0.log"
    for file in (log, other):
        file.parent.mkdir(parents=True)
        file.touch()
    lower = make_recipe(specialist=LEVERS["specialist"])
    said = r"clip_high = 0\.28 and the recipe now says 0\.3; resume with the same recipe, go on with what it "
    with pytest.raises(RunFolderError, match=said + "says now by --resume --accept-changed-settings, or"):
        RunFolder.resume(path, lower)
    RunFolder.check(path, lower, resume=True, accepted=accepted)
    assert told == []
    with RunFolder.resume(path, lower, accepted) as folder:
        clip, rate = folder.setting_changes
        assert (rate.field, rate.old, rate.new) == ("specialist.optim.lr", 3e-4, 1e-4)
        assert rate.stages == {"specialist-sort": 6, "baseline-mixed_grpo": 0}
        assert folder.read_config()["specialist"]["optim"]["lr"] == 1e-4
        assert measured_as(folder) == measured, "what is measured is measured as it was"
    assert log.exists()
    assert told == [("settings", f"{clip.format_change()}, {rate.format_change()}")]
    assert (
        "specialist.optim.lr 0.0003 -> 0.0001 (specialist-sort after step 6, baseline-"
        in rate.format_change()
    )
    RunFolder.resume(path, lower).close()  # from now on that is its recipe
    with pytest.raises(RunFolderError, match=r"last went on with .*clip_high = 0\.3 and .* 0\.28;"):
        RunFolder.resume(path, make_recipe())
    cooler = make_recipe(**LEVERS)
    with RunFolder.resume(path, cooler, accepted) as folder:
        drawn = folder.setting_changes[2]
        assert (drawn.field, drawn.old, drawn.new) == ("rollout.temperature", 1.0, 0.7)
        assert drawn.done == ["base"]
        assert measured_as(folder) != measured, "answers are drawn otherwise"
    assert not log.exists(), "it holds responses at another temperature"
    with RunFolder.resume(path, make_recipe(), accepted) as folder:
        assert len(folder.setting_changes) == 6
        assert json.loads(folder.config_path.read_text()) == make_recipe().model_dump(mode="json")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"seed": 3}, "seed"),
        ({"name": "other"}, "name"),
        ({"model": {"config": {"model_type": "qwen2"}}}, "model.config.model_type"),
        ({"domains": {"sort": {"source": "procedural:add3"}}}, "domains.sort.source"),
        (
            {"domains": {"sort": {"source": "procedural:sort"}, "b": {"source": "procedural:add3"}}},
            "domains.b",
        ),
        ({"domains": {"sort": {"source": "procedural:sort", "prompts": 9}}}, "domains.sort.prompts"),
        ({"specialist": {"prompts_per_step": 9}}, "specialist.prompts_per_step"),
        ({"specialist": {"advantage": {"type": "rloo"}}}, "specialist.advantage.type"),
        ({"specialist": {"policy_loss": {"type": "cispo"}}}, "specialist.policy_loss.type"),
        ({"specialist": {"optim": {"beta1": 0.5}}}, "specialist.optim.beta1"),
        ({"specialist": {"reference_kl": {"estimator": "k3"}}}, "specialist.reference_kl.estimator"),
        ({"specialist": {"refill": {}}}, "specialist.refill"),
        ({"specialist": {"batch": {"kl_chunk": 99}}}, "specialist.batch.kl_chunk"),
        ({"distill": {"samples_per_prompt": 2}}, "distill.samples_per_prompt"),
        ({"distill": {"rl_coef": 0.5, "samples_per_prompt": 2}}, "distill.samples_per_prompt"),
        ({"rollout": {"max_new_tokens": 9}}, "rollout.max_new_tokens"),
        ({"rollout": {"max_running": 9}}, "rollout.max_running"),
        ({"rollout": {"schedule": "async"}}, "rollout.schedule"),
        ({"storage": {"shards": 2}}, "storage.shards"),
        ({"evaluation": {"prompts_per_domain": 9}}, "evaluation.prompts_per_domain"),
        ({"baselines": {"methods": []}}, "baselines.methods"),
    ],
)
def test_what_a_run_cannot_change_in_its_middle_is_refused_with_its_name(demo: Path, changes, field):
    kept = (demo / "inputs.json").read_bytes()
    with pytest.raises(RunFolderError) as refused:
        RunFolder.resume(demo, make_recipe(**changes), AcceptedChanges(code=True, settings=True))
    said = str(refused.value)
    assert f"was started with {field} = " in said
    assert said.endswith("; resume with the same recipe, or start a new run with --out")
    assert "stays as it is" in said or "cannot" in said or "no stage can" in said
    assert (demo / "inputs.json").read_bytes() == kept


def test_a_change_that_would_have_no_effect_or_an_odd_one_is_refused(tmp_path: Path):
    def refused(state: dict, before: dict, after: dict, done: str = "") -> str:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        begun(path, make_recipe(**before), state)
        if done:
            RunFolder.attach(path).mark_done(done, {"steps": 1})
        with pytest.raises(RunFolderError) as error:
            RunFolder.resume(path, make_recipe(**after), AcceptedChanges(settings=True))
        return str(error.value)

    def own(**settings) -> dict:
        return {"specialist": settings}

    faster, at = own(optim={"lr": 1e-2}), {"step": 6}
    assert "has no effect any more: specialist-sort is done;" in refused(at, {}, faster, "specialist-sort")
    assert "specialist-sort has taken 6;" in refused(at, {}, own(steps=6))
    held = {"coef": 0.1, "target": 0.02}
    adapted = at | {"counters": {"reference_kl/coef": 0.3}}
    assert "has adapted it to reference_kl.target since; change that one" in refused(
        adapted, own(reference_kl=held), own(reference_kl=held | {"coef": 0.2})
    )
    chosen = own(difficulty={"samples": 4})
    cooler = {"rollout": {"temperature": 0.5}}
    assert "has measured the difficulty of its prompts;" in refused(at, chosen, chosen | cooler)
    learnt = {"distill": {"rl_coef": 0.5, "samples_per_prompt": 2}}
    assert "no stage can begin or cease to learn by it" in refused(
        at, learnt, {"distill": {"samples_per_prompt": 2}}
    )


def test_a_domain_goes_on_with_a_setting_of_its_own(tmp_path: Path):
    """What it said nothing of before is compared with what was said of all."""
    domains: dict[str, Any] = {name: {"source": f"procedural:{name}"} for name in ("sort", "add3")}
    begun(tmp_path / "run", make_recipe(domains=domains), {"step": 6}, "specialist-add3")
    domains["add3"] |= {"specialist": {"optim": LOWER}, "rollout": {"temperature": 0.5}}
    with RunFolder.resume(
        tmp_path / "run", make_recipe(domains=domains), AcceptedChanges(settings=True)
    ) as folder:
        rate, drawn = folder.setting_changes
        assert (rate.field, rate.stages) == ("domains.add3.specialist.optim.lr", {"specialist-add3": 6})
        assert drawn.field == "domains.add3.rollout.temperature"
        assert "specialist-sort" not in drawn.stages
    RunFolder.resume(tmp_path / "run", make_recipe(domains=domains)).close()


def test_a_domains_share_and_an_evaluation_sets_draws_go_on_as_their_own(tmp_path: Path):
    """What was `null` before is compared with what was said of all, in the words of either."""
    sets: dict[str, Any] = {"own": {"source": "procedural:sort"}}
    both = {"rl_coef": 0.5, "samples_per_prompt": 2}
    before = {"distill": both, "evaluation": {"sets": sets}}
    begun(tmp_path / "run", make_recipe(**before), {"step": 6}, "merge")
    share = {"domains": {"sort": {"source": "procedural:sort", "distill": {"rl_coef": 0.25}}}}
    drawn = {"evaluation": {"sets": {"own": sets["own"] | {"rollout": {"temperature": 0.5}}}}}
    after = make_recipe(**before | share | drawn)
    with RunFolder.resume(tmp_path / "run", after, AcceptedChanges(settings=True)) as folder:
        found = {change.field: (change.old, change.new) for change in folder.setting_changes}
        assert found == {
            "domains.sort.distill.rl_coef": (0.5, 0.25),
            "evaluation.sets.own.rollout.temperature": (1.0, 0.5),
        }
    RunFolder.resume(tmp_path / "run", after).close()
    share["domains"]["sort"]["distill"] = {"kl_coef": 2.0, "rl_coef": 0.25}
    more = make_recipe(**before | share | drawn)
    with RunFolder.resume(tmp_path / "run", more, AcceptedChanges(settings=True)) as folder:
        assert (folder.setting_changes[-1].field, folder.setting_changes[-1].old) == (
            "domains.sort.distill.kl_coef",
            1.0,
        )


def test_rules_change_without_leave_and_are_recorded(tmp_path: Path):
    RunFolder.create(tmp_path / "run", make_recipe()).close()
    watched = make_recipe(watch={"grad_norm": {"action": "stop"}, "dead_groups": None})
    for _ in range(2):
        with RunFolder.resume(tmp_path / "run", watched) as folder:
            stop, off = sorted(folder.setting_changes, key=lambda change: change.field, reverse=True)
            assert (stop.field, stop.old, stop.new) == ("watch.grad_norm.action", "warn", "stop")
            assert (off.field, off.new) == ("watch.dead_groups", None)


GROUP = {"arguments": {"dtype": "bfloat16", "context-length": 128}, "count": 1}
ASKED = {"type": "sglang", "path": "x", "signal": "topk"}
OWN = {
    "servers": {"own": GROUP},
    "teachers": {"t": {**ASKED, "servers": "own"}, "u": {**ASKED, "urls": ["http://a:1"]}},
    "domains": {"sort": {"source": "procedural:sort", "teacher": {"t": 1.0, "u": 1.0}}},
    "rollout": {"engine": {"type": "sglang", "urls": ["http://b:1"], "sync": "disk"}},
}


def moved() -> dict[str, Any]:
    """As `OWN`, but for where its servers are, how they are started, and how they are asked."""
    started = {"arguments": {"dtype": "bfloat16", "mem-fraction-static": 0.5}, "count": 2}
    group = started | {"command": ["serve"], "environment": {"A": "b"}, "silence_seconds": 9}
    asked = {"urls": ["http://c:1", "http://d:1"], "urls_file": "more", "api_key_env": "KEY", "patience": 9}
    teachers = {"t": OWN["teachers"]["t"], "u": {**ASKED, **asked, "timeout": 7}}
    engine = {"type": "sglang", "servers": "writers", "folder": "/shared", "max_in_flight_tokens": 9}
    return OWN | {
        "servers": {"own": group, "writers": {}},
        "teachers": teachers,
        "rollout": {"engine": engine},
    }


def test_where_servers_are_and_how_they_are_started_changes_without_leave_and_is_recorded(tmp_path: Path):
    path = tmp_path / "run"
    begun(path, make_recipe(**OWN), {"step": 6}, "merge")
    folder = RunFolder.attach(path)
    measured, log = measured_as(folder), folder.wal_folder("merge") / "0.log"
    log.parent.mkdir(parents=True)
    log.touch()
    for _ in range(2):
        with RunFolder.resume(path, make_recipe(**moved())) as folder:
            found = {change.field: change for change in folder.setting_changes}
            assert len(found) == len(folder.setting_changes)
            assert measured_as(folder) == measured
            assert folder.read_config()["servers"]["own"]["command"] == ["serve"]
    command, sync = found["servers.own.command"], found["rollout.engine.sync"]
    assert (command.old, command.new, command.stages["merge"]) == ([], ["serve"], 6)
    assert (sync.old, sync.new) == ("disk", None)
    assert {"teachers.u.urls", "servers.own.arguments.context-length", "servers.writers"} <= found.keys()
    assert log.exists(), "what was written is written as it would be now"


def test_the_numbers_in_which_a_server_computes_change_where_that_is_asked_for(tmp_path: Path):
    path = tmp_path / "run"
    begun(path, make_recipe(**OWN), {"step": 6}, "merge")
    measured = measured_as(RunFolder.attach(path))
    exact = make_recipe(**OWN | {"servers": {"own": {"arguments": {"dtype": "float32"}}}})
    with pytest.raises(RunFolderError, match=r"own\.arguments\.dtype = .* --accept-changed-settings, or"):
        RunFolder.resume(path, exact)
    with RunFolder.resume(path, exact, AcceptedChanges(settings=True)) as folder:
        assert {change.field for change in folder.setting_changes} == {
            "servers.own.arguments.dtype",
            "servers.own.arguments.context-length",
        }
        assert measured_as(folder) != measured
    for key, other in (("signal", "sampled"), ("checksum", "y")):
        teachers = {**OWN["teachers"], "u": {**OWN["teachers"]["u"], key: other}}
        with pytest.raises(RunFolderError, match=rf"teachers\.u\.{key} = .* which stays as it is"):
            RunFolder.resume(
                path, make_recipe(**OWN | {"teachers": teachers}), AcceptedChanges(settings=True)
            )


FEWER_BITS = {"arguments": GROUP["arguments"] | {"quantization": "fp8"}}
TAKEN = OWN["teachers"] | {"t": {**ASKED, "servers": "other"}}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"servers": {"own": {**GROUP, "command": ["serve", "--quant=fp8"]}}}, "own.command"),
        ({"servers": {"own": {**GROUP, "command": ["serve", "-q", "fp8"]}}}, "own.command"),
        ({"servers": {"other": FEWER_BITS}, "teachers": TAKEN}, "other.arguments.quantization"),
        ({"servers": {"own": {"arguments": {}}}}, "own.arguments.dtype"),
    ],
)
def test_numbers_do_not_change_by_a_command_or_another_group_unasked(tmp_path: Path, changes, field):
    path = tmp_path / "run"
    begun(path, make_recipe(**OWN), {"step": 6}, "merge")
    measured = measured_as(RunFolder.attach(path))
    fewer = make_recipe(**OWN | changes)
    with pytest.raises(RunFolderError, match=rf"servers\.{field} = .* --accept-changed-settings, or"):
        RunFolder.resume(path, fewer)
    with RunFolder.resume(path, fewer, AcceptedChanges(settings=True)) as folder:
        own = next(change for change in folder.setting_changes if change.field == f"servers.{field}")
        assert own.stages["merge"] == 6
        assert measured_as(folder) != measured
    RunFolder.resume(path, fewer).close()


def test_another_group_that_computes_alike_is_taken_without_leave(tmp_path: Path):
    path = tmp_path / "run"
    begun(path, make_recipe(**OWN), {"step": 6}, "merge")
    with RunFolder.resume(
        path, make_recipe(**OWN | {"servers": {"other": GROUP}, "teachers": TAKEN})
    ) as folder:
        assert {change.field for change in folder.setting_changes} == {
            "servers.other",
            "servers.own",
            "teachers.t.servers",
        }


def test_a_change_survives_a_kill_between_its_two_files(tmp_path: Path):
    path = tmp_path / "run"
    begun(path, make_recipe(), {"step": 6})
    before = (path / "config.json").read_bytes()
    lower = make_recipe(**LEVERS, watch={"dead_groups": None})
    RunFolder.resume(path, lower, AcceptedChanges(settings=True)).close()
    after = (path / "config.json").read_bytes()
    (path / "config.json").write_bytes(before)  # as it was, when the change was in inputs.json
    with RunFolder.resume(path, lower) as folder:
        assert len(folder.setting_changes) == 4
    assert (path / "config.json").read_bytes() == after
    (path / "config.json").write_bytes(after.replace(b'"beta1": 0.9', b'"beta1": 0.8'))
    with pytest.raises(RunFolderError, match=r"config\.json is not what the run was started with"):
        RunFolder.resume(path, lower, AcceptedChanges(settings=True))


def test_an_evaluation_without_a_run_leaves_no_folder(tmp_path, ends):
    recipe = write_recipe(tmp_path / "recipe.yaml")
    said = ends(2, ["evaluate", str(recipe), "--out", str(tmp_path / "new")]).err
    assert "there is no run in" in said
    assert "`opd run` makes and measures them" in said
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("command", ["run", "specialist", "distill", "evaluate"])
def test_changes_are_accepted_only_where_a_run_goes_on(tmp_path: Path, command, capsys):
    recipe = write_recipe(tmp_path / "recipe.yaml")
    for switch in ("--accept-changed-code", "--accept-changed-settings"):
        assert main([command, str(recipe), switch, "--out", str(tmp_path / "run")]) == 2
        assert f"{switch} is for a run that goes on; give --resume with it" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_what_a_stage_left_that_was_killed_as_it_ended_is_removed(tmp_path: Path):
    kinds = ("wal", "cache", "trajectories", "trajectories-rank-1", "signals", "signals-rank-1")
    with RunFolder.create(tmp_path / "run", make_recipe()) as folder:
        for stage in ("base", "merge", "evaluate"):
            for kind in kinds:
                (folder.stage_folder(stage) / kind / "deep").mkdir(parents=True)
        for stage in ("base", "evaluate"):
            folder.mark_done(stage, {"steps": 1})
        (folder.stage_folder("evaluate") / "done.json").write_text("{}")
    RunFolder.resume(tmp_path / "run", make_recipe()).close()
    left = {
        stage: [(folder.stage_folder(stage) / kind).exists() for kind in kinds] for stage in ("base", "merge")
    }
    assert left == {"base": [False] * 6, "merge": [True] * 6}
    assert (folder.stage_folder("evaluate") / "wal").exists(), "a damaged record ends nothing"


def test_a_run_goes_on_with_the_same_files_elsewhere(tmp_path: Path, monkeypatch):
    line = json.dumps({"prompt": "<sort>1=", "label": "1"}) + "\n"
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "sort.jsonl").write_text(line)
    monkeypatch.chdir(tmp_path / "here")
    recipe = make_recipe(domains={"sort": {"source": "sort.jsonl", "reward": "gone:x"}})
    assert absolute_paths(recipe).domains["sort"].source == str(tmp_path / "here/sort.jsonl")
    assert absolute_paths(absolute_paths(recipe)) == absolute_paths(recipe)
    RunFolder.create("run", absolute_paths(recipe)).close()
    RunFolder.resume("run", recipe).close()
    monkeypatch.chdir(tmp_path / "there")
    RunFolder.resume("../here/run", absolute_paths(recipe)).close()
    Path("sort.jsonl").write_text(line * 2)
    with pytest.raises(RunFolderError, match=r"started with domains\.sort\.source = .*here/sort\.jsonl"):
        RunFolder.resume("../here/run", absolute_paths(recipe))


@pytest.mark.parametrize("given", ["s3://bucket/x", "~/x", "/x/y", None])
def test_what_is_no_relative_path_stays_as_it_is(given):
    recipe = make_recipe(storage={"published": given}, run_dir=given)
    assert absolute_paths(recipe) == recipe


def test_replies_that_are_kept_are_those_of_the_folder_where_the_run_began():
    judge = {"type": "judge", "urls": ["http://localhost:1/v1"], "cache": "replies"}
    asked = {"source": "x.jsonl", "reward": judge}
    found = absolute_paths(make_recipe(domains={"sort": asked}, evaluation={"sets": {"later": asked}}))
    for own in (found.domains["sort"], found.evaluation.sets["later"]):
        assert (own.reward.cache, own.source) == (
            str(Path("replies").absolute()),
            str(Path("x.jsonl").absolute()),
        )


def test_no_path_of_the_schema_is_forgotten():
    """Keys that may hold a path by their name are paths, dotted paths, or known to be neither."""
    named = {"path", "folder", "published", "run_dir", "tokenizer", "chat_template", "source", "dir"}
    named.add("weights_cache")
    settings = {
        "teachers": {"math": {"path": "x"}},
        "domains": {
            "sort": {"source": "x.jsonl", "teacher": "math", "reward": "a:b"},
            "reverse": {"source": "v.jsonl", "reward": "a:b", "sft": {"source": "y.jsonl"}},
        },
        "evaluation": {"sets": {"later": {"source": "u.jsonl", "reward": "a:b"}}},
        "sft": {"source": "z.jsonl"},
        "rollout": {"engine": {"type": "sglang", "urls": ["http://localhost:1"]}},
    }
    known = set(path_keys(make_recipe(**settings)))
    code = {(*key, "path") for key in (("specialist", "advantage"), ("distill", "advantage"))}
    code |= {(kind, "policy_loss", "path") for kind in ("specialist", "distill")}
    code |= {
        ("domains", name, "specialist", key, "path")
        for name in ("sort", "reverse")
        for key in ("advantage", "policy_loss")
    }
    code |= {("distill", "loss", "path"), ("distill", "loss", "loss", "path")}
    specialists = [("specialist",), *(("domains", name, "specialist") for name in ("sort", "reverse"))]
    code |= {(*key, "opd", "loss", *rest) for key in specialists for rest in (("path",), ("loss", "path"))}
    code |= {("domains", name, "reward", "path") for name in ("sort", "reverse")}
    code.add(("evaluation", "sets", "later", "reward", "path"))
    code.add(("domains", "sort", "sft", "source"))  # refused: `math` teaches sort
    code.add(("distill", "teachers", "path"))  # of a kind of teachers, which is refused there
    found = {path for path in key_paths(Recipe, settings) if path[-1] in named}
    assert found - code == known


def test_a_folder_of_something_else_is_never_taken(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("x")
    for opening in (RunFolder.create, RunFolder.resume):
        with pytest.raises(RunFolderError, match="exists already"):
            opening(tmp_path, make_recipe())
    assert not (tmp_path / "config.json").exists()


def test_a_models_folder_is_not_taken_for_a_run_that_has_lost_a_file(tmp_path: Path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    for opening in (RunFolder.create, RunFolder.resume):
        with pytest.raises(RunFolderError, match="is a model's folder and no run's; give another one"):
            opening(tmp_path, make_recipe())


def test_resume_names_the_first_key_that_differs(tmp_path: Path):
    path = tmp_path / "run"
    RunFolder.create(path, make_recipe()).close()
    with pytest.raises(RunFolderError, match=r"with seed = 0 and the recipe now says 3"):
        RunFolder.resume(path, make_recipe(seed=3))
    with pytest.raises(RunFolderError, match=r"domains\.sort\.params\.digits = nothing"):
        RunFolder.resume(
            path, make_recipe(domains={"sort": {"source": "procedural:sort", "params": {"digits": 6}}})
        )
    with RunFolder.resume(path, make_recipe(runtime={"workers": 2})) as folder:
        assert json.loads(folder.config_path.read_text())["runtime"]["workers"] == 2


def test_resume_without_a_run_and_with_a_broken_config(tmp_path: Path):
    with pytest.raises(RunFolderError, match="start it without --resume"):
        RunFolder.resume(tmp_path / "none", make_recipe())
    RunFolder.create(tmp_path / "run", make_recipe()).close()
    (tmp_path / "run" / "config.json").write_text("{")
    with pytest.raises(RunFolderError, match=r"config\.json cannot be read"):
        RunFolder.resume(tmp_path / "run", make_recipe())


HOLD = """
import sys
from opd.pipelines.records.run_folder import RunFolder
from opd.config import Recipe
recipe = Recipe.model_validate_json(sys.argv[2])
with RunFolder.create(sys.argv[1], recipe):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_live_processes_never_share_a_folder(tmp_path: Path):
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run"), make_recipe().model_dump_json()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunFolderError, match=f"process {holder.pid}"):
            RunFolder.resume(tmp_path / "run", make_recipe())
        holder.kill()
    RunFolder.resume(tmp_path / "run", make_recipe()).close()


def test_a_failed_opening_gives_the_lock_back(tmp_path: Path):
    RunFolder.create(tmp_path / "run", make_recipe()).close()
    with pytest.raises(RunFolderError):
        RunFolder.resume(tmp_path / "run", make_recipe(seed=1))
    RunFolder.resume(tmp_path / "run", make_recipe()).close()


def test_done_is_recorded_and_read_back(tmp_path: Path):
    with RunFolder.create(tmp_path / "run", make_recipe()) as folder:
        assert folder.stage_done("merge") is None
        folder.mark_done("merge", {"digest": "abc", "accuracy": 0.5})
        assert folder.stage_done("merge") == {"digest": "abc", "accuracy": 0.5}
        assert folder.stage_done("evaluate") is None
        with pytest.raises(ValueError, match="not JSON compliant"):
            folder.mark_done("evaluate", {"accuracy": float("nan")})
        assert folder.stage_done("evaluate") is None
        (folder.stage_folder("merge") / "done.json").write_text("[]")
        with pytest.raises(RunFolderError, match="delete it to run the stage again"):
            folder.stage_done("merge")


def test_a_stage_whose_model_has_become_another_is_not_done(tmp_path: Path):
    with RunFolder.create(tmp_path / "run", make_recipe()) as folder:
        checksums = folder.path / "base" / "checksums.json"
        checksums.parent.mkdir()
        checksums.write_text("{}")
        folder.mark_done("base", {}, [checksums])
        folder.mark_done("merge", {"steps": 1}, needs=["base"])
        assert folder.stage_done("merge") == {"steps": 1}
        checksums.write_text("[]")
        with pytest.raises((RunFolderError, CheckpointError), match="stage merge was made from another one"):
            folder.stage_done("merge")


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "", ".."])
def test_a_name_never_leads_out_of_the_folder(tmp_path: Path, name):
    with RunFolder.create(tmp_path / "run", make_recipe()) as folder:
        for make in (folder.specialist_folder, folder.baseline_folder, folder.stage_folder):
            with pytest.raises(RunFolderError, match="cannot name a folder"):
                make(name)


def test_the_default_place():
    assert default_path(make_recipe()) == Path("runs/demo")
    assert default_path(make_recipe(run_dir="x/y")) == Path("x/y")


def test_a_worker_attaches_without_the_lock(tmp_path: Path):
    with RunFolder.create(tmp_path / "run", make_recipe()) as folder:
        worker = RunFolder.attach(folder.path)
        worker.mark_done("merge", {"steps": 1})
        worker.close()
        assert folder.stage_done("merge") == {"steps": 1}
        with pytest.raises(RunFolderError, match="in use"):
            RunFolder.resume(folder.path, make_recipe())


def test_threads_are_settled_when_a_run_is_created_and_kept(tmp_path: Path, monkeypatch):
    recipe = tiny_recipe(model={"path": str(tmp_path / "model")}, runtime={"threads": None}, base=None)
    shapes = [({}, 12), ({"runtime": {"threads": None, "workers": 5}}, 2), ({"train": {"ranks": 4}}, 3),
              ({"runtime": {"threads": None, "workers": 50}}, 1), ({"runtime": {"threads": 7}}, 7),
              ({"model": tiny_recipe().model.model_dump()}, 1),
              ({"launch": {"type": "ray", "trainer": {"cpus": 5.5}}}, 5)]  # fmt: skip
    monkeypatch.setattr(machine, "core_count", lambda: 12)
    for changes, threads in shapes:
        assert machine.threads_here(Recipe.model_validate(recipe.model_dump() | changes)) == threads, changes
    monkeypatch.setattr(run_folder, "input_digests", lambda recipe: {})
    with RunFolder.create(tmp_path / "run", recipe) as folder:
        assert folder.thread_count(recipe) == folder.read_config()["runtime"]["threads"] == 12
    shared = recipe.model_copy(update={"runtime": recipe.runtime.model_copy(update={"workers": 5})})
    with RunFolder.create(tmp_path / "shared", shared) as folder:
        assert (folder.thread_count(shared), folder.thread_count(shared, alone=True)) == (2, 12)
    monkeypatch.setattr(machine, "core_count", lambda: 3)
    with RunFolder.resume(tmp_path / "shared", shared) as folder:
        assert (folder.thread_count(shared), folder.thread_count(shared, alone=True)) == (2, 12)
    with RunFolder.resume(tmp_path / "run", recipe) as folder:
        assert folder.thread_count(recipe) == folder.read_config()["runtime"]["threads"] == 12
    assert RunFolder.attach(tmp_path / "run").thread_count(recipe) == 12, "in a worker, a rank, an actor"
    four = recipe.model_copy(update={"runtime": recipe.runtime.model_copy(update={"threads": 4})})
    with RunFolder.resume(tmp_path / "run", four) as folder:
        assert folder.thread_count(four, alone=True) == 4
        assert folder.thread_count(four) == folder.read_config()["runtime"]["threads"] == 4
    with RunFolder.resume(tmp_path / "run", recipe) as folder:
        assert folder.thread_count(recipe) == 12


def test_cores_are_within_the_limit_of_the_group(monkeypatch):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: range(16))
    for limit, cores in (("max 100000", 16), ("250000 100000", 3), ("100 100000", 1), ("9900000 100000", 16)):
        monkeypatch.setattr(machine.Path, "read_text", lambda *_, limit=limit: limit)
        assert machine.core_count() == cores


def test_one_place_decides_about_tf32():
    threads = torch.get_num_threads()
    try:
        for wanted in (True, False):  # the second is the default of a recipe
            machine.configure_machine(threads, wanted)
            flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
            assert flags == (wanted, wanted)
        assert tiny_recipe().runtime.tf32 is False
    finally:
        machine.configure_machine(threads, False)


def test_copies_of_weights_stay_for_whoever_goes_on_with_the_run(tmp_path: Path):
    recipe = make_recipe()
    folder = RunFolder.create(tmp_path / "run", recipe)
    copies = folder.weights_cache(recipe)
    copies.mkdir(parents=True)
    folder.__exit__(KeyboardInterrupt)
    assert copies.is_dir()
    with RunFolder.resume(tmp_path / "run", recipe) as folder:
        assert folder.weights_cache(recipe) == copies
    assert not copies.parent.exists()
    elsewhere = make_recipe(runtime={"threads": 1, "weights_cache": str(tmp_path / "node")})
    with RunFolder.resume(tmp_path / "run", elsewhere) as folder:  # on a machine with other disks
        folder.weights_cache(elsewhere).mkdir(parents=True)
    assert (tmp_path / "node" / copies.name).is_dir()
