"""A teacher on a little server of every dialect: its hidden states are its model's, or they are not used.

A head that is right, and a version that is due, are not enough: layers prove themselves.
"""

from contextlib import ExitStack

import numpy as np
import pytest
import tiny
import torch
from dialects import SGLANG, VLLM
from little_models import little
from recipes import tiny_recipe
from served_models import recipe_tokenizer

from opd.config.servers import ServerGroupConfig
from opd.config.teachers import VLLMTeacherConfig
from opd.errors import TeacherError
from opd.kernels.head import Head
from opd.pipelines.check.servers import check_kinds
from opd.teachers import scorer
from opd.teachers.local_teacher import LocalTeacher
from opd.teachers.served_teacher import SignalNeeds

pytest.importorskip("aiohttp", reason="needs the extra sglang")
TOKENS = len(recipe_tokenizer())
SAMPLES = [(3, 4), (1, 1), (5, 0), (9, 7), (100, 100)]
SIGNALS = ["hidden", "topk", "sampled"]
ANOTHER = "serves another model, vocabulary or other weights .* from what the model's own weights give"
BEYOND = "serves another model"
WAYS = {"sglang": (SGLANG, {}), "sglang-bytes": (SGLANG, {"plugin": True}), "vllm": (VLLM, {})}
"""In which hidden states come."""
way = pytest.mark.parametrize("way", WAYS)


def samples_of(shapes):
    """Without the last token, which is one too many for the teachers here."""
    made = tiny.samples(shapes)
    for sample in made:
        for ids in (sample.prompt_ids, sample.response_ids):
            np.minimum(ids, TOKENS - 2, out=ids)
    return made


@pytest.fixture
def serve(vllm_models):
    """Starts little servers of a model that give hidden states in a way."""
    with ExitStack() as stack:

        def start(way, model="a", signal="hidden"):
            dialect, options = WAYS[way]
            server = stack.enter_context(little(dialect.little, vllm_models[model], **options))
            server.dialect = dialect
            if dialect is VLLM:
                server.pools = signal == "hidden"
            return server

        yield start


@pytest.fixture
def teacher_of(vllm_published, closing):
    """Makes teachers on a server; all are closed."""

    def make(server, model="a", **settings):
        hidden = settings.get("signal", "hidden") == "hidden"
        asked = SignalNeeds(temperature=0.7) if hidden else SignalNeeds(top_k=5)
        given = {"attempts": 2, "asked": asked, "vocabulary": TOKENS - hidden} | settings
        return closing(server.dialect.make_teacher(vllm_published[model], [server.url], **given))

    return make


@pytest.fixture
def due(vllm_models):
    """The right hidden states."""
    return lambda samples: LocalTeacher("here", vllm_models["a"]).score(samples).rows


@pytest.fixture
def unread(monkeypatch):
    """The weights cannot be read."""

    def not_read(*_):
        raise TeacherError("it is a mixture of experts.")

    monkeypatch.setattr(scorer.StreamedTeacher, "score", not_read)


@pytest.mark.some(2)
@way
def test_they_are_the_models_own_at_any_temperature_and_padding(serve, teacher_of, due, way):
    samples, teacher = samples_of(SAMPLES), teacher_of(serve(way))
    found, head = teacher.score(samples).rows, teacher.load_head()
    assert isinstance(head, Head)
    assert teacher.pool.counters.requests > 0
    torch.testing.assert_close(found, due(samples))


@pytest.mark.some(3)
@pytest.mark.parametrize("signal", SIGNALS)
@way
def test_other_layers_under_the_same_head_are_refused(serve, teacher_of, way, signal):
    teacher = teacher_of(serve(way, "kin", signal), signal=signal)
    with pytest.raises(TeacherError, match=ANOTHER if way != "vllm" else BEYOND):
        teacher.score(samples_of(SAMPLES))


def test_a_checksum_takes_the_place_of_reading_the_weights(serve, teacher_of, unread):
    right, other = serve("sglang"), serve("sglang", "kin")
    teacher_of(right, checksum=right.checksum()).connect_server()
    teacher_of(right, asked=SignalNeeds(main=False)).connect_server()  # another rank reads them
    with pytest.raises(TeacherError, match="have checksum"):
        teacher_of(other, checksum=right.checksum()).connect_server()


def test_what_nothing_proves_is_refused_and_told_its_checksum(serve, teacher_of, unread):
    server = serve("sglang")
    told = f"since it is a mixture .* checksum to {server.checksum()}"
    with pytest.raises(TeacherError, match=told):
        teacher_of(server).connect_server()
    teacher_of(server, signal="topk").connect_server()
    with pytest.raises(TeacherError, match=r"nothing proves .* since it is a mixture of experts; set signal"):
        teacher_of(serve("vllm")).score(samples_of(SAMPLES))


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_the_doctor_asks_for_them(serve, vllm_models, vllm_published, kind):
    right, wrong = serve(kind), serve(kind, "kin")

    def visited(path, server=right):
        entry = {"type": kind, "path": str(path), "urls": [server.url]}
        local = {"path": str(vllm_models["a"])}
        recipe = tiny_recipe(
            model=local,
            base=None,
            teachers={"sort": entry, "add3": local},
            distill={"steps": 1},
            baselines={"methods": []},
        )
        return next(iter(check_kinds(recipe)))

    for path in (vllm_published["a"], vllm_models["a"]):
        assert visited(path).level == "ok"
        assert "nats of what the model's own weights give" in visited(path).detail
        assert BEYOND in visited(path, wrong).detail
    for path in (vllm_published["b"], vllm_models["b"]):
        assert BEYOND in visited(path).detail
    if kind == "vllm":
        right.pools = False
        assert "--pooler-config" in visited(vllm_models["a"]).detail


# Of vLLM alone: it pools hidden states in what it computes in.


def test_in_bfloat16_as_the_server_tells(serve, teacher_of, due):
    server, samples = serve("vllm"), samples_of(SAMPLES)
    server.settings["dtype"] = "torch.bfloat16"
    assert torch.equal(teacher_of(server).score(samples).rows, due(samples).bfloat16().float())


def test_a_server_that_tells_nothing_is_asked_in_float32(serve, teacher_of, due):
    server, samples = serve("vllm"), samples_of(SAMPLES)
    server.settings = None
    torch.testing.assert_close(teacher_of(server).score(samples).rows, due(samples))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda content: content[:-4], r"hidden states of \d+ bytes came, due are"),
        (lambda content: b"", "hidden states of 0 bytes came"),
        (lambda content: content * 3, "more than the"),
        (lambda content: np.full(len(content) // 4, np.nan, "<f4").tobytes(), "is not finite"),
        (lambda content: bytes(len(content)), "has lost its weights"),
    ],
)
def test_what_is_damaged_is_never_used(serve, teacher_of, change, sentence):
    server = serve("vllm")
    teacher = teacher_of(server, patience=0.1, attempts=1)
    teacher.connect_server()
    server.change = change
    with pytest.raises(TeacherError, match=sentence):
        teacher.score(samples_of([(3, 4)]))


def test_another_model_another_width_and_a_server_that_writes_are_found(serve, teacher_of):
    server = serve("vllm")

    def refused(words, model="a", shapes=SAMPLES):
        with pytest.raises(TeacherError, match=words):
            teacher_of(server, model).score(samples_of(shapes))

    refused("model's own weights give", "b")
    server.change = lambda content: content * 2
    refused(r"of width 64, .* takes 32")
    server.change, server.pools = lambda content: content, False
    refused("start it with --runner pooling")
    server.pools = True
    refused(r"258 tokens.* take 257", shapes=[(200, 58)])


def test_a_group_is_started_to_pool():
    group = ServerGroupConfig(
        type="vllm", arguments=VLLMTeacherConfig(path="a", urls=["http://a:1"]).server_arguments
    )
    assert group.command_line[:4] == ["--runner", "pooling", "--convert", "embed"]
    scores = VLLMTeacherConfig(path="a", urls=["http://a:1"], signal="topk").server_arguments
    assert scores == {"max-logprobs": -1}
