"""A run whose rewards come from a server: resumed and repeated without asking anything twice, bit for bit."""

import json
import re
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from attempts import made_base, stop
from recipes import tiny_recipe, write_recipe
from reward_server import RewardServer, completion, reward_server

from opd.config import Recipe
from opd.errors import RewardError, RunFolderError
from opd.metrics import read_metrics
from opd.pipelines.check.domains import check_domains, check_rewards
from opd.pipelines.cli import main
from opd.pipelines.records.run_folder import AcceptedChanges, RunFolder
from opd.pipelines.run import run_stage

pytest.importorskip("aiohttp")
pytest.importorskip("orjson")

STAGE = "specialist-sort"
SORT = {"source": "procedural:sort", "params": {"digits": 3}, "prompts": 200}


class Moody:
    """A judge that never says the same twice: whoever asks again learns something else."""

    def __init__(self) -> None:
        self._numbers = count()

    def __call__(self, path: str, body: dict[str, Any]) -> Any:
        number = next(self._numbers)
        return completion("I cannot say." if number % 9 == 8 else f"Score: {number * 7 % 11}")


def recipe_of(server: RewardServer, base: Path, cache: Path, **own: Any) -> Any:
    reward = {"type": "judge", "urls": [f"{server.url}/v1"], "cache": str(cache), "unreadable": 0.0}
    return tiny_recipe(
        base=None,
        model={"path": str(base)},
        domains={"sort": SORT | {"reward": reward | own}},
        specialist={"steps": 4, "prompts_per_step": 4, "group_size": 4, "checkpoint_every": 2},
    )


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows = read_metrics(path / "stages" / STAGE / "metrics.jsonl")
    kept = ("reward/", "policy/", "entropy", "grad_norm", "length/")
    return [{k: v for k, v in row.items() if k.startswith(kept)} for row in rows]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return made_base(tmp_path_factory.mktemp("base") / "run", tiny_recipe(base=None))


@pytest.mark.slow
def test_resumed_and_repeated_nothing_is_asked_twice(base, tmp_path):
    with reward_server(Moody()) as server:
        recipe = recipe_of(server, base, tmp_path / "cache")
        with RunFolder.create(tmp_path / "first", recipe) as folder:
            stop(recipe, folder, STAGE, 3)
            before, asked = rows_of(tmp_path / "first"), len(server.asked)
            run_stage(recipe, folder, STAGE)
            first = folder.stage_done(STAGE) or {}
        rows = rows_of(tmp_path / "first")
        assert rows[:3] == before  # the third step came after the checkpoint, and was taken again
        assert len(rows) == 4
        texts = [json.dumps(body["messages"]) for _, body, _ in server.asked]
        assert len(texts) == len(set(texts)) >= asked > 16
        assert any(0 < row["reward/sort/unreadable"] < 1 for row in rows)
        done = len(server.asked)
        with RunFolder.create(tmp_path / "second", recipe) as folder:
            run_stage(recipe, folder, STAGE)
            second = folder.stage_done(STAGE) or {}
        assert (second["digest"], rows_of(tmp_path / "second")) == (first["digest"], rows)
        assert len(server.asked) == done


@pytest.mark.slow
def test_a_run_that_a_reply_has_stopped_goes_on_with_what_such_replies_are_worth(base, tmp_path):
    """What was said is kept, so it would stop again; and the server may be elsewhere by then."""

    def silent(path: str, body: dict[str, Any]) -> Any:
        return completion("I cannot say." if len(server.asked) > 20 else f"Score: {len(server.asked) % 11}")

    def run(recipe: Recipe, resume: bool = True) -> None:
        accepted = AcceptedChanges(settings=resume)
        opened = RunFolder.resume(path, recipe, accepted) if resume else RunFolder.create(path, recipe)
        with opened as folder:
            run_stage(recipe, folder, STAGE)

    path = tmp_path / "run"
    with reward_server(silent) as server:
        recipe = recipe_of(server, base, tmp_path / "cache", unreadable=None)
        with pytest.raises(RewardError, match=r"no number .* also with --resume --accept-changed-settings"):
            run(recipe, resume=False)
        with pytest.raises(RewardError, match="no number that can be read"):
            run(recipe)
        for name, value in (("pattern", "[0-9]"), ("range", [0, 20])):
            with pytest.raises(RunFolderError, match=f"domains.sort.reward.{name}.* stays as it is"):
                run(recipe_of(server, base, tmp_path / "cache", unreadable=0.0, **{name: value}))
    with reward_server(silent) as server:
        run(recipe_of(server, base, tmp_path / "cache", unreadable=0.25, timeout=5.0))
        rows = read_metrics(path / "stages" / STAGE / "metrics.jsonl")
        assert len(rows) == 4
        assert rows[-1]["reward/sort/unreadable"] > 0
    changed = {own.field.rpartition(".")[2]: own for own in RunFolder.attach(path).setting_changes}
    assert changed.keys() == {"urls", "unreadable", "timeout"}
    assert {name for name, own in changed.items() if own.changes_measurement} == {"urls", "unreadable"}


def test_the_doctor_asks_the_server_and_does_not_wait_for_one_that_is_not_there(base, tmp_path):
    with reward_server(lambda path, body: completion("Score: 5")) as server:
        recipe = recipe_of(server, base, tmp_path / "cache", model="m")
        domains: dict[str, Any] = {}
        (found,) = check_domains(recipe, domains)
        assert (found.level, found.detail) == ("ok", "procedural:sort, scored by judge m")
        (found,) = check_rewards(recipe, domains)
        assert (found.level, found.detail) == (
            "ok",
            "0.5 for an empty answer, 0.5 for '0', 0.5 for its label",
        )
        assert len(server.asked) == 3
    (found,) = check_rewards(recipe, domains)
    assert found.level == "error"
    assert f"reward judge: nobody answers at {server.url}/v1" in found.detail


def longer_is_better(path: str, body: dict[str, Any]) -> Any:
    return [float(len(text)) for text in body["texts"]]


@pytest.mark.parametrize("count", [40, 4])
def test_how_often_a_reward_prefers_the_better_answer(count, tmp_path, capsys):
    """Three of four pairs are ordered as their file says, a tie counting half."""
    pairs = [("good", "no"), ("good", "bad"), ("good", "same"), ("no", "good")] * (count // 4)
    rows = [{"prompt": f"q{i}", "chosen": a, "rejected": b} for i, (a, b) in enumerate(pairs)]
    said = [{"role": "user", "content": "q0"}, {"role": "assistant", "content": "good"}]
    rows[0] = {"chosen": said, "rejected": [said[0], {"role": "assistant", "content": "no"}]}
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    with reward_server(longer_is_better) as server:
        reward = {"type": "scorer", "urls": [server.url], "cache": None, "template": "{answer}"}
        recipe = write_recipe(tmp_path / "recipe.yaml", domains={"sort": SORT | {"reward": reward}})
        command = ["doctor", str(recipe), "--pairs", str(path), "--json"]
        assert main(command) == 0
    said = json.loads(capsys.readouterr().out)
    numbers = said["numbers"]
    assert numbers["value"] == pytest.approx(0.625)
    assert numbers["low"] < 0.625 < numbers["high"]
    assert (numbers["pairs"], numbers["ties"]) == (count, count // 4)
    # Margins 2, 1, 0 and -2, each through log(1 + exp(-margin)).
    assert numbers["loss"] == pytest.approx((0.126928 + 0.313262 + 0.693147 + 2.126928) / 4, abs=1e-5)
    assert said["level"] == "warning"
    assert f"accuracy 0.625 (0.{str(numbers['low'])[2:4]}" in said["finding"]
    assert ("give more pairs" in said["finding"]) == (numbers["high"] > 0.5)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([], "has no pairs"),
        ([{"prompt": "q", "chosen": "a"}], r"pairs\.jsonl:1: `rejected` is no text"),
        (
            [{"prompt": "q", "chosen": "a", "rejected": "b"}, {"chosen": "a", "rejected": "b"}],
            "2: there is no",
        ),
        ([{"prompt": "q", "chosen": "a", "rejected": []}], "`rejected` is no text"),
    ],
)
def test_pairs_that_are_none_are_named(rows, told, tmp_path, ends):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    recipe = write_recipe(tmp_path / "recipe.yaml", domains={"sort": SORT | {"reward": "exact"}})
    said = ends(2, ["doctor", str(recipe), "--pairs", str(path), "--domain", "sort"]).out
    assert "error    pairs sort: " in said
    assert re.search(told, said)


def test_pairs_of_a_built_in_reward_and_of_no_domain(tmp_path, capsys, ends):
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"q{i}", "label": "7", "chosen": "7", "rejected": "8"} for i in range(120)]
    path.write_text("\n".join(map(json.dumps, rows)))
    domains = {"sort": SORT | {"reward": "exact"}, "more": SORT}
    recipe = write_recipe(tmp_path / "recipe.yaml", domains=domains)
    assert main(["doctor", str(recipe), "--pairs", str(path), "--domain", "sort"]) == 0
    assert "ok       pairs sort: exact: Bradley-Terry accuracy 1.000 (0.9" in capsys.readouterr().out
    for words, told in (([], "needs --domain, one of sort, more"), (["--domain", "x"], "needs --domain")):
        assert told in ends(2, ["doctor", str(recipe), "--pairs", str(path), *words]).err
    assert main(["doctor", str(recipe), "--pairs", str(path), "--domain", "more"]) == 2
    assert "its source's own checker" in capsys.readouterr().out
    assert "--domain goes with --pairs" in ends(2, ["doctor", str(recipe), "--domain", "sort"]).err
