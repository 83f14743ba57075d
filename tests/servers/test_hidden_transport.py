"""Hidden states of a real SGLang server as bytes: in chunks, from the prefix cache, here and over HTTP, and
what is said and left when that goes wrong.
"""

import asyncio
import logging
import os
import resource
import urllib.error
import urllib.request
from contextlib import ExitStack

import numpy as np
import pytest
import tiny
import torch
from recipes import tiny_recipe
from served_models import recipe_tokenizer

from opd.config.teachers import SGLangTeacherConfig
from opd.errors import TeacherError
from opd.pipelines.check.servers import check_kinds
from opd.pipelines.stages.publishing import publish_checkpoint
from opd.retry import Retry
from opd.served import hidden_segments
from opd.served.hidden_segments import HiddenSegment, plugin_of
from opd.served.http_client import HTTPClient, Patience, PoolOptions, Server
from opd.served.plugin.opd_hidden_states import DTYPES, HEADER_BYTES, KEY, SEGMENT_NAME
from opd.served.scoring import Question
from opd.teachers import sglang_teacher
from opd.teachers.kinds import Placement
from opd.teachers.local_teacher import LocalTeacher
from opd.teachers.served_teacher import SignalNeeds
from opd.teachers.sglang_teacher import SGLangTeacher

LENGTHS = [(3, 4), (2, 60), (40, 1), (100, 90), (17, 16), (16, 33)]
SHORT = [(3, 4), (1, 1), (9, 6), (2, 12)]
WIDTH, TOKENS = 32, len(recipe_tokenizer())


@pytest.fixture(scope="module")
def published(served_models, tmp_path_factory):
    path = tmp_path_factory.mktemp("published") / "a"
    publish_checkpoint(served_models["a"], path)
    return str(path)


@pytest.fixture(autouse=True)
def nothing_lies_there(sglang):
    """What requests have left that tests of other files cut goes after two minutes by itself."""
    for name in segments(sglang.url):
        (plugin(sglang.url).folder / name).unlink(missing_ok=True)


@pytest.fixture
def teacher(sglang, published, closing):
    """Makes teachers on the server; all are closed."""

    def make(**settings):
        config = SGLangTeacherConfig(path=published, urls=[sglang.url], **settings)
        placement = Placement(vocabulary=TOKENS)
        return closing(SGLangTeacher("a", published, config, needs=SignalNeeds(), placement=placement))

    return make


@pytest.fixture
def right(served_models):
    """The hidden states of samples, by the same model in this process."""
    here = LocalTeacher("a", served_models["a"], vocabulary=TOKENS)
    return lambda samples: here.score(samples).rows


def plugin(url):
    return asking(url, lambda pool, server: plugin_of(pool, server))


def asking(url, use):
    """What `use(pool, server)` gives."""

    async def run():
        pool = HTTPClient("a test", PoolOptions([url]))
        try:
            return await use(pool, Server(url))
        finally:
            await pool.close()

    return asyncio.run(run())


def segments(url):
    """Names of the segments that lie in the server's folder."""
    return {name for name in os.listdir(plugin(url).folder) if SEGMENT_NAME.fullmatch(name)}


def test_rows_are_the_models_whether_in_chunks_or_behind_a_cached_prefix(teacher, right, sglang):
    served, samples = teacher(), tiny.samples(LENGTHS)
    due = right(samples)
    for _ in range(2):  # the second time, the prefix cache holds all of them
        torch.testing.assert_close(served.score(samples).rows, due, atol=1e-5, rtol=1e-5)
    assert served.pool.counters.retries == 0
    assert segments(sglang.url) == set()


@pytest.mark.parametrize("start", [0, 5, 16, 39])
def test_the_prefix_cache_serves_what_comes_before(sglang, served_models, start):
    """And the same rows come back, whatever it holds."""
    tokens = np.arange(start, start + 41, dtype=np.int32) % TOKENS
    question = Question("q", tokens, start)
    found = plugin(sglang.url)

    async def ask(pool, server):
        with HiddenSegment(found, question, WIDTH) as segment:
            answer = await pool.request_json(server, "POST", "/generate", segment.request_body())
            return answer["meta_info"]["cached_tokens"], await segment.read_rows(pool, server, answer)

    (_, first), (cached, again) = asking(sglang.url, ask), asking(sglang.url, ask)
    assert cached == start
    assert first.shape == (40 - start, WIDTH)
    np.testing.assert_allclose(first, again, atol=1e-5)


def test_bytes_and_json_give_the_same_rows(teacher, monkeypatch, caplog):
    samples = tiny.samples(SHORT)
    found = teacher().score(samples).rows
    assert not [record for record in caplog.records if "as JSON" in record.getMessage()]

    async def none(pool, server):
        return None

    monkeypatch.setattr(sglang_teacher, "plugin_of", none)
    with caplog.at_level(logging.WARNING):
        plain = teacher()
        torch.testing.assert_close(plain.score(samples).rows, found, atol=1e-6, rtol=1e-6)
        plain.score(samples[:1])
    said = [record.getMessage() for record in caplog.records if "as JSON" in record.getMessage()]
    assert len(said) == 1
    assert "start it with the folder opd/served/plugin on its PYTHONPATH" in said[0]
    with pytest.raises(TeacherError, match=r"prefill 16 at once .* plug-in for hidden states"):
        plain.score(tiny.samples([(9, 20)]))


def test_a_server_elsewhere_sends_the_same_bytes(teacher, right, sglang, monkeypatch):
    folder = plugin(sglang.url).folder
    monkeypatch.setattr(hidden_segments, "SHARED", "/nowhere")
    samples, served = tiny.samples(LENGTHS), teacher()
    torch.testing.assert_close(served.score(samples).rows, right(samples), atol=1e-5, rtol=1e-5)
    assert served.pool.counters.retries == 0
    assert sorted(os.listdir(folder)) == ["lock", "proof"]


@pytest.mark.parametrize(
    "name", ["0" * 32, "proof", "lock", "..%2fproof", "%2e%2e", "A" * 32, "0" * 31 + "%0a"]
)
def test_a_server_hands_out_nothing_but_segments(sglang, name):
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{sglang.url}/opd/hidden/{name}", timeout=60)
    with caught.value as error:
        assert error.code == 404


def test_what_went_wrong_on_the_way_is_asked_for_again(teacher, right, monkeypatch):
    """Each of the first reads finds another fault."""
    read, faults = hidden_segments._read_content, iter(["damaged", "cut", "gone", "of another"])

    def faulty(folder, name, most):
        content = read(folder, name, most)
        if name in ("proof",):
            return content
        match next(faults, None):
            case "damaged":
                content[HEADER_BYTES + 1] ^= 1
            case "cut":
                del content[-1]
            case "gone":
                raise FileNotFoundError(2, "No such file or directory")
            case "of another":
                content[40] ^= 1
        return content

    monkeypatch.setattr(hidden_segments, "_read_content", faulty)
    samples, served = tiny.samples([(5, 20)]), teacher(attempts=9)
    monkeypatch.setattr(served.pool, "options", patient(served.pool.options))
    torch.testing.assert_close(served.score(samples).rows, right(samples), atol=1e-5, rtol=1e-5)
    assert served.pool.counters.retries == 4


def patient(options):
    """The same, with short pauses."""
    retry = Retry(attempts=options.patience.retry.attempts, pause=0.01, longest=0.05)
    return PoolOptions(options.urls, patience=Patience(retry=retry))


def test_what_stays_wrong_ends_with_a_sentence(teacher, monkeypatch, sglang):
    served, samples = teacher(attempts=2), tiny.samples([(5, 20)])
    served.connect_server()
    monkeypatch.setattr(served.pool, "options", patient(served.pool.options))
    monkeypatch.setattr(
        hidden_segments, "rows_of", lambda *_: (_ for _ in ()).throw(ValueError("they are damaged"))
    )
    with pytest.raises(
        TeacherError, match=r"no usable answer .* that http://.* left are not usable: they are damaged"
    ):
        served.score(samples)
    assert segments(sglang.url) == set()


def test_a_full_disk_is_a_sentence_and_the_server_goes_on(teacher, right, sglang):
    """Its kernel refuses the scheduler files above a size, which is an error of the same kind."""
    samples, served = tiny.samples([(5, 200)]), teacher(attempts=2)
    served.connect_server()
    [pid] = [pid for pid, command in sglang.processes().items() if "scheduler" in command]
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (200 * WIDTH, before[1]))
    try:
        with pytest.raises(
            TeacherError, match=r"the server says that .* cannot be written to .*File too large"
        ):
            served.score(samples)
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
    assert segments(sglang.url) == set()
    torch.testing.assert_close(teacher().score(samples).rows, right(samples), atol=1e-5, rtol=1e-5)


def test_what_is_aborted_leaves_no_segment(sglang):
    """Whenever it is: those whose answer is whole have one, and no others."""
    tokens = np.arange(240, dtype=np.int32) % TOKENS
    found = plugin(sglang.url)

    async def run(pool, server):
        with ExitStack() as stack:
            asked = [
                stack.enter_context(HiddenSegment(found, Question("q", np.roll(tokens, i), 3), WIDTH))
                for i in range(24)
            ]
            tasks = [
                asyncio.create_task(pool.request_json(server, "POST", "/generate", segment.request_body()))
                for segment in asked
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await pool.request_json(server, "POST", "/abort_request", {"rid": "", "abort_all": True})
            answers = await asyncio.gather(*tasks)
            whole = {
                segment.name
                for segment, answer in zip(asked, answers, strict=True)
                if answer["meta_info"]["finish_reason"]["type"] != "abort"
            }
            left = {name for name in os.listdir(found.folder) if SEGMENT_NAME.fullmatch(name)}
            return whole, left

    whole, left = asking(sglang.url, run)
    assert whole == left
    assert whole
    assert segments(sglang.url) == set()


def test_other_requests_are_answered_as_ever(sglang):
    body = {"input_ids": list(range(3, 13)), "sampling_params": {"max_new_tokens": 3, "temperature": 0.0}}
    plain = sglang.control("/generate", **body)
    assert KEY not in plain["meta_info"]
    hidden = sglang.control("/generate", **body, return_hidden_states=True)
    assert hidden["output_ids"] == plain["output_ids"]
    rows = hidden["meta_info"]["hidden_states"]
    assert [len(rows[1]), len(rows)] == [WIDTH, 3]


def test_a_request_that_names_no_file_is_told(sglang):
    asked = {"segment": "../../tmp/x", "start": 0}
    body = {"input_ids": [3, 4, 5], "return_hidden_states": True}
    params = {"max_new_tokens": 1, "custom_params": {KEY: asked}}
    answer = sglang.control("/generate", **body, sampling_params=params)
    assert answer["meta_info"][KEY] == [{"error": "the name of the segment is not 32 hexadecimal digits"}]


def test_the_wire_carries_little_more_than_the_numbers(sglang):
    """A header a sample, and an answer of fixed size, however long the sample."""
    found = plugin(sglang.url)

    async def sizes(pool, server):
        for count in (50, 240):
            question = Question("q", np.arange(count + 1, dtype=np.int32) % TOKENS, 0)
            with HiddenSegment(found, question, WIDTH) as segment:
                _, content = await pool.request_bytes(
                    server, "POST", "/generate", segment.request_body(), 2**20
                )
                yield len(content), (found.folder / segment.name).stat().st_size

    async def run(pool, server):
        return [size async for size in sizes(pool, server)]

    (small, few), (large, many) = asking(sglang.url, run)
    assert abs(large - small) < 32
    assert [few, many] == [HEADER_BYTES + count * WIDTH * DTYPES["float32"] for count in (50, 240)]


def test_the_doctor_says_how_hidden_states_come(sglang, published):
    entry = {"type": "sglang", "path": published, "urls": [sglang.url], "patience": 1.0}
    recipe = tiny_recipe(teachers={"sort": entry, "add3": entry}, baselines={"methods": []})
    findings = check_kinds(recipe)
    assert {finding.level for finding in findings} == {"ok"}
    assert all("hidden states through shared memory" in finding.detail for finding in findings)
