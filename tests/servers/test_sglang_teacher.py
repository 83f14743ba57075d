"""A teacher on a real SGLang server gives what the same model gives in this process."""

import json
from concurrent.futures import FIRST_COMPLETED, wait

import numpy as np
import pytest
import tiny
import torch
from recipes import tiny_recipe
from seaweedfs import absent_port
from served_models import PADDED, recipe_tokenizer

from opd.config.distill import DistillConfig
from opd.config.teachers import SGLangTeacherConfig
from opd.errors import ConfigError, TeacherError
from opd.kernels.ops import linear_kl, linear_logprobs, linear_topk
from opd.metrics import read_metrics
from opd.models.causal_lm import CausalLM
from opd.models.token_alignment import TokenTranslator
from opd.models.tokenizers import character_tokenizer
from opd.pipelines.check.servers import check_kinds
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_pipeline, run_stage
from opd.pipelines.stages.publishing import publish_checkpoint
from opd.pipelines.stages.teachers import ScoreAhead
from opd.rollout.collect import EncodedPrompt, collect
from opd.rollout.torch_engine import TorchEngine
from opd.served.http_client import Server
from opd.teachers.kinds import Placement
from opd.teachers.local_teacher import LocalTeacher
from opd.teachers.schedule import Router, TeacherSchedule, sampled_logprobs
from opd.teachers.scorer import ExpectedModel
from opd.teachers.served_teacher import SignalNeeds
from opd.teachers.sglang_teacher import SGLangScorer, SGLangTeacher
from opd.types import SamplingParams

LENGTHS = [(3, 4), (1, 1), (5, 0), (2, 60), (9, 7), (40, 1), (9, 3)]
TOKENS = len(recipe_tokenizer())


@pytest.fixture(scope="module")
def published(served_models, tmp_path_factory):
    """The URL of each model, published."""
    root = tmp_path_factory.mktemp("published")
    for name in ("a", "b"):
        publish_checkpoint(served_models[name], root / name)
    return {name: str(root / name) for name in ("a", "b")}


@pytest.fixture
def served(sglang, published, closing):
    """Makes teachers of model `a` on the server; all are closed."""

    def make(signal="hidden", *, vocabulary=TOKENS, asked=SignalNeeds(), **settings):  # noqa: B008
        config = SGLangTeacherConfig(path=published["a"], urls=[sglang.url], signal=signal, **settings)
        placement = Placement(vocabulary=vocabulary)
        return closing(SGLangTeacher("a", published["a"], config, needs=asked, placement=placement))

    return make


@pytest.fixture(scope="module")
def here(served_models):
    """Makes the same teacher in this process."""
    return lambda vocabulary=TOKENS: LocalTeacher("a", served_models["a"], vocabulary=vocabulary)


def response_ids(samples) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([s.response_ids for s in samples]).astype(np.int64))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_hidden_states_rebuild_the_whole_vocabulary(served, here, temperature):
    samples = tiny.samples(LENGTHS)
    teacher, reference = served(asked=SignalNeeds(temperature)), here()
    got, due = teacher.score(samples).rows, reference.score(samples).rows
    assert got.shape == (sum(r for _, r in LENGTHS), 32)
    torch.testing.assert_close(got, due, atol=1e-5, rtol=1e-5)
    ids, heads = response_ids(samples), (teacher.load_head(), reference.load_head())
    assert heads[0].vocabulary == heads[1].vocabulary == TOKENS < PADDED
    logprobs = [
        linear_logprobs(rows, head, ids, temperature=temperature)
        for rows, head in zip((got, due), heads, strict=True)
    ]
    torch.testing.assert_close(*logprobs, atol=1e-4, rtol=0)
    student = LocalTeacher("student", reference.path, vocabulary=TOKENS)
    rows = student.score(samples).rows * 1.1
    kls = [
        linear_kl(rows, heads[1], t, h, temperature=temperature)
        for t, h in zip((got, due), heads, strict=True)
    ]
    torch.testing.assert_close(*kls, atol=1e-4, rtol=0)
    assert kls[0].mean() > 1e-3


def test_log_probabilities_of_sampled_and_likely_tokens(served, here):
    samples, reference = tiny.samples(LENGTHS), here(PADDED)
    samples[0].response_ids[-1] = PADDED - 1  # the last id is shown as 0 by the server
    rows, head, ids = reference.score(samples).rows, reference.load_head(), response_ids(samples)
    due = linear_logprobs(rows, head, ids)
    sampled = served("sampled", vocabulary=PADDED).score(samples)
    torch.testing.assert_close(sampled.logprobs, due, atol=1e-4, rtol=0)
    top_ids, top, _ = linear_topk(rows, head, 5)
    topk = served("topk", vocabulary=PADDED, asked=SignalNeeds(top_k=5)).score(samples)
    assert torch.equal(topk.ids, top_ids)
    torch.testing.assert_close(topk.logprobs, top, atol=1e-4, rtol=0)
    torch.testing.assert_close(topk.sampled, due, atol=1e-4, rtol=0)


def test_what_a_server_cannot_give_is_refused(served):
    with pytest.raises(ConfigError, match="temperature 1 only"):
        served("sampled", asked=SignalNeeds(temperature=0.7), vocabulary=PADDED)
    with pytest.raises(ConfigError, match="count the padding"):
        served("topk")
    samples = tiny.samples([(2, 3)])
    samples[0].response_ids[1] = TOKENS
    with pytest.raises(TeacherError, match=f"token id {TOKENS}, outside the vocabulary of {TOKENS}"):
        served().score(samples)
    assert len(served().score(tiny.samples([(200, 49)])).rows) == 49
    with pytest.raises(TeacherError, match="has 250 tokens, the servers of teacher a take 249"):
        served().score(tiny.samples([(200, 50)]))


def test_of_several_servers_the_least_that_any_takes_counts():
    config = SGLangTeacherConfig(path="/nowhere", urls=["http://a"])
    scorer = SGLangScorer(ExpectedModel({}, 4, 2), config, None)
    for name, chunk, context in (("a", 512, 300), ("b", 256, 100), ("c", 1024, 200), ("d", -1, None)):
        told = {"chunked_prefill_size": chunk, "context_length": context}
        scorer.check_settings("teacher t", Server(f"http://{name}"), told)
    assert (scorer.chunk, scorer.most) == (256, 100 - SGLangTeacherConfig.kept)


def test_nothing_is_asked_about_empty_responses(served):
    teacher = served()
    assert teacher.score(tiny.samples([(3, 0)])).rows.shape == (0, 32)
    assert teacher.pool.counters.requests == 0


def test_what_was_begun_is_asked_once(served, here):
    teacher, samples = served(), tiny.samples(LENGTHS)
    teacher.begin_scoring(samples[:3])
    teacher.begin_scoring(samples)
    rows = teacher.score(samples).rows
    torch.testing.assert_close(rows, here().score(samples).rows, atol=1e-5, rtol=1e-5)
    answered = sum(r > 0 for _, r in LENGTHS)
    assert teacher.pool.counters.requests <= 2 * answered  # each sample, and a first question for the limits
    assert all(server.in_flight == 0 for server in teacher.pool.servers)


def test_an_api_key_comes_from_the_environment(served, monkeypatch):
    monkeypatch.delenv("OPD_TEST_KEY", raising=False)
    with pytest.raises(ConfigError, match="OPD_TEST_KEY, which is not set"):
        served(api_key_env="OPD_TEST_KEY")


@pytest.mark.parametrize("loss", [{"type": "k1"}, {"type": "k2"}, {"type": "topk", "k": 5}])
def test_the_schedule_takes_log_probabilities(served, here, loss):
    """What the losses read is the same from a server's log-probabilities as from hidden states."""
    samples = tiny.samples(LENGTHS, teachers=["a"] * len(LENGTHS))
    teacher = served("topk", vocabulary=PADDED, asked=SignalNeeds(top_k=5))
    router = Router({"a": {"a": 1.0}}, "one_hot")
    schedules = [TeacherSchedule({"a": one}, router) for one in (teacher, here(PADDED))]
    found = []
    for schedule in schedules:
        schedule.assign(samples)
        schedule.score(samples)
        found.append(np.concatenate(sampled_logprobs(schedule, samples, "one_hot", 1.0)))
    np.testing.assert_allclose(*found, atol=1e-4)
    counters = schedules[0].take_counters()
    assert counters["head_loads"] == 0
    assert counters["teacher/a/wait_seconds"] > 0
    assert schedules[1].take_counters()["head_loads"] == 1
    assert DistillConfig.model_validate({"loss": loss}).loss.type == loss["type"]


def merge(recipe_changes, out):
    recipe = tiny_recipe(**recipe_changes)
    with RunFolder.create(out, recipe) as folder:
        run_pipeline(recipe, folder)
        done = folder.stage_done("merge")
    lines = (out / "stages/merge/metrics.jsonl").read_text().splitlines()
    return done, [json.loads(line) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("loss", [{"type": "full"}, {"type": "k1"}])
def test_a_merge_with_served_teachers_is_the_same(sglang, served_models, tmp_path, loss):
    """At temperature 0.7: the first step to rounding, and every token of the run."""
    few = {"steps": 3, "prompts_per_domain": 4, "checkpoint_every": 3}
    settings = {
        "model": {"path": str(served_models["b"])},
        "base": None,
        "rollout": {"max_new_tokens": 5, "max_sequence": 32, "temperature": 0.7},
        "distill": few | {"loss": loss, "teachers": "local"},
        "baselines": {"methods": []},
        "evaluation": {"prompts_per_domain": 8},
    }
    found = []
    for server in (None, {"type": "sglang", "urls": [sglang.url]}):
        entry = {"path": str(served_models["a"])} | (server or {})
        changes = settings | {"teachers": {"sort": entry, "add3": entry}}
        found.append(merge(changes, tmp_path / ("served" if server else "here")))
    (_, here), (_, there) = found
    assert len(here) == len(there) == 3
    for one, other in zip(here, there, strict=True):
        assert one["kl/mean"] == pytest.approx(other["kl/mean"], abs=1e-4)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
        assert one["tokens/student"] == other["tokens/student"]
        assert 0 < other["teacher/sort/wait_share"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["full", pytest.param("k1", marks=pytest.mark.long)])
def test_a_specialist_follows_a_served_teacher(sglang, served_models, tmp_path, loss, monkeypatch):
    """As one in this process; also what refills its steps, which the server is asked about as it ends."""
    begin, score = TeacherSchedule.begin_scoring, TeacherSchedule.score
    early: list[set[str]] = [set()]
    late: list[set[str]] = []

    def beginning(schedule, samples):
        early[-1] |= {sample.uid for sample in samples}
        begin(schedule, samples)

    def scoring(schedule, samples):
        late.append({sample.uid for sample in samples} - early[-1])
        score(schedule, samples)
        early.append(set())

    own = {"steps": 2, "prompts_per_step": 4, "group_size": 3, "minibatches": 1, "refill": {"limit": 3}}
    own |= {"opd": {"teacher": "big", "coef": 0.5, "loss": {"type": loss}}, "max_steps_without_signal": 3}
    found = []
    for server in ({"type": "local"}, {"type": "sglang", "urls": [sglang.url]}):
        if len(server) > 1:
            monkeypatch.setattr(TeacherSchedule, "begin_scoring", beginning)
            monkeypatch.setattr(TeacherSchedule, "score", scoring)
        recipe = tiny_recipe(
            model={"path": str(served_models["b"])},
            base=None,
            rollout={"max_new_tokens": 5, "max_sequence": 32, "temperature": 0.7},
            teachers={"big": {"path": str(served_models["a"])} | server},
            specialist=own,
            baselines={"methods": []},
        )
        with RunFolder.create(tmp_path / server["type"], recipe) as folder:
            run_stage(recipe, folder, "specialist-sort")
            found.append(read_metrics(folder.metrics_path("specialist-sort")))
    here, there = found
    assert len(here) == len(there) == 2
    assert any(row["refill/taken"] > 4 for row in there)
    assert late == [set(), set()]
    for one, other in zip(here, there, strict=True):
        assert one["kl/mean"] == pytest.approx(other["kl/mean"], abs=1e-4)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
        assert one["tokens/student"] == other["tokens/student"]
        assert 0 <= other["teacher/big/wait_share"] <= 1


def served_recipe(urls, path, **server):
    entry = {"type": "sglang", "path": str(path), "urls": urls, "patience": 1.0, **server}
    return tiny_recipe(
        model={"path": str(path)},
        base=None,
        teachers={"sort": entry, "add3": entry},
        baselines={"methods": []},
    )


@pytest.mark.parametrize("kind", ["folder", "published"])
def test_the_doctor_looks_at_every_server(sglang, served_models, published, kind):
    path = served_models["a"] if kind == "folder" else published["a"]
    absent = f"http://127.0.0.1:{absent_port()}"
    findings = check_kinds(served_recipe([sglang.url, absent], path))
    assert [finding.level for finding in findings] == ["ok", "error"] * 2
    assert "weight version default, checksum " in findings[0].detail
    assert "of what the model's own weights give" in findings[0].detail
    assert f"{absent}/model_info failed" in findings[1].detail
    wrong = check_kinds(served_recipe([sglang.url], path, weight_version="7"))
    assert "holds weight version default, but 7 is due" in wrong[0].detail


def test_the_doctor_refuses_a_signal_that_is_too_little(served_models):
    findings = check_kinds(served_recipe(["http://127.0.0.1:1"], served_models["a"], signal="sampled"))
    assert {finding.level for finding in findings} == {"error"}
    assert "too little for distill.loss full" in findings[0].detail


def test_responses_are_scored_while_others_are_written(served, here, served_models):
    """What ends early has been answered by its teacher before the last token is written, and is asked about
    once. The student waits for that answer between two of its tokens: it could not, were scoring to begin
    when writing ends.
    """
    teacher = served()
    schedule = TeacherSchedule({"a": teacher}, Router({"sort": {"a": 1.0}}, "one_hot"))
    engine = TorchEngine(CausalLM.from_pretrained(served_models["b"]), vocab_size=TOKENS)
    prompts = [EncodedPrompt(f"p{i}", "sort", np.array([3, 4, 5 + i], np.int32), None) for i in range(4)]
    sampling = SamplingParams(max_new_tokens=40, stop_ids=tuple(range(3, 8)))
    early, answered = 0, []

    class Watching:
        """Notes how many requests had been sent when the last step came, and hears the first answer."""

        def generate(self, requests):
            nonlocal early
            for step in ScoreAhead(engine, schedule, prompts).generate(requests):
                if not step.finished:
                    early = max(early, len(teacher._begun))
                if not step.finished and teacher._begun and not answered:
                    asked = [future for _, future in teacher._begun.values()]
                    done, _ = wait(asked, 60, return_when=FIRST_COMPLETED)
                    answered.extend(done)
                    unfinished.append(len(requests) - early)
                yield step

    unfinished: list[int] = []

    groups = collect(Watching(), prompts, 4, sampling, seed=0)
    samples = [sample for group in groups for sample in group.samples]
    assert len({len(sample.response_ids) for sample in samples}) > 2
    assert 0 < early < len(samples)
    assert answered
    assert unfinished[0] > 0
    schedule.assign(samples)
    schedule.score(samples)
    rows = schedule.hidden_rows("a", samples)
    torch.testing.assert_close(rows, here().score(samples).rows, atol=1e-5, rtol=1e-5)
    assert teacher.pool.counters.requests <= 2 * len(samples)


def test_a_served_teacher_with_another_tokenizer_is_read_in_its_own_tokens(served, here):
    theirs = recipe_tokenizer()
    letters = [token for token in theirs.get_vocab() if len(token) == 1]
    ours = character_tokenizer("".join(sorted(letters, reverse=True)))
    translator = TokenTranslator(ours, theirs, [int(ours.eos_token_id)])
    views = []
    for teacher in (served(), here()):
        samples = tiny.samples([(3, 4), (5, 6)])
        for sample in samples:
            sample.response_ids %= len(ours)
            sample.domain, sample.teacher_prompt_ids = "sort", np.array([3, 4], np.int32)
        router, translators = Router({"sort": {"a": 1.0}}, "one_hot"), {"a": translator}
        schedule = TeacherSchedule({"a": teacher}, router, translators=translators)
        schedule.assign(samples)
        schedule.score(samples)
        views += schedule.teacher_views(samples)
    assert torch.equal(views[0].aligned.teacher_ids, views[1].aligned.teacher_ids)
    assert (views[0].aligned.exact >= 0).any()
    torch.testing.assert_close(views[0].hidden, views[1].hidden, atol=1e-5, rtol=1e-5)
