"""A Megatron-Core teacher in one process: what transformers computes, and several teachers on one module."""

import json
from types import SimpleNamespace

import pytest
import tiny
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from opd.errors import CheckpointError, MissingExtraError, ModelError, StorageError, TeacherError

pytest.importorskip("megatron.core", reason="needs the extra megatron", exc_type=ImportError)

import megatron_models as models
from recipes import tiny_recipe
from tiny_published import publish

from opd.megatron.form import MegatronForm
from opd.ranks import process_group
from opd.teachers import megatron_teacher
from opd.teachers.kinds import Placement
from opd.teachers.local_teacher import LocalTeacher
from opd.teachers.megatron_teacher import megatron_teachers
from opd.teachers.schedule import Router, TeacherSchedule

SAMPLES = tiny.samples(models.LENGTHS)


def test_without_megatron_a_check_names_the_extra(monkeypatch):
    monkeypatch.setattr(megatron_teacher, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"teacher t on Megatron-Core.*opd\[megatron\]"):
        list(megatron_teacher.KIND.check("t", None, tiny_recipe()))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two teachers of one form and one of another: name -> (checkpoint, published)."""
    folder = tmp_path_factory.mktemp("megatron")
    made = {
        "a": models.model("qwen3", seed=1),
        "b": models.model("qwen3", seed=2),
        "c": models.model("llama", 5),
    }
    return {name: publish(model, folder / name, shards=2) for name, model in made.items()}


@pytest.mark.some(1)
@pytest.mark.parametrize("family", sorted(models.FAMILIES, key="gpt_oss".__ne__))  # it has most parts
def test_logits_are_those_of_transformers(family, tmp_path):
    made = models.model(family)
    checkpoint, url = publish(made, tmp_path, shards=2)
    expected = models.transformers_logits(made)
    for source, keep in ((str(checkpoint), True), (url, False)):
        with megatron_teachers({"t": source}, Placement(max_tokens=24), keep=keep) as teachers:
            head = teachers["t"].load_head()
            found = head.logits(teachers["t"].score(SAMPLES).rows)
            assert (found - expected).abs().max() <= 1e-4
            assert expected.abs().max() > 1  # not a comparison of nothings
    assert not dist.is_initialized()


@pytest.mark.some(2)
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "olmoe", "glm4_moe", "deepseek_v3", "gpt_oss", "qwen2_moe"])
def test_bfloat16_rounds_as_transformers_does(tmp_path, family, keep):
    checkpoint, _ = publish(models.model(family), tmp_path, shards=2)
    loaded = LocalTeacher("t", checkpoint, dtype="bfloat16")
    placement = Placement(dtype="bfloat16")
    with megatron_teachers({"t": str(checkpoint)}, placement, keep=keep) as teachers:
        found, expected = teachers["t"].score(SAMPLES).rows, loaded.score(SAMPLES).rows
        assert found.dtype == expected.dtype == torch.bfloat16
        assert (found.float() - expected.float()).abs().max() <= 2**-4 * expected.abs().max()
        assert teachers["t"].load_head().weight.dtype == torch.bfloat16


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("published", [0, 1])
def test_teachers_take_turns_on_one_module(pair, keep, published):
    sources = {name: str(where[published]) for name, where in pair.items()}
    alone = {}
    for name, source in sources.items():
        with megatron_teachers({name: source}, Placement()) as teachers:
            alone[name] = (teachers[name].score(SAMPLES).rows, teachers[name].load_head().weight.clone())
    with megatron_teachers(sources, Placement(), keep=keep) as teachers:
        assert teachers["a"].tags is teachers["b"].tags
        assert teachers["a"].tags is not teachers["c"].tags
        for name in "abcabba":
            assert torch.equal(teachers[name].score(SAMPLES).rows, alone[name][0])
            # A head never disturbs whose weights the module has.
            for other in "abc":
                assert torch.equal(teachers[other].load_head().weight, alone[other][1])
        assert teachers["a"].tags.loads == 5  # a b a b a: the second b in a row moves nothing
        assert teachers["c"].tags.loads == 1


def test_what_is_kept_is_read_once_and_what_is_not_at_every_swap(pair):
    sources = {name: pair[name][1] for name in "ab"}
    for keep in (True, False):
        with megatron_teachers(sources, Placement(), keep=keep) as teachers:
            opened = teachers["a"].bytes_read
            nbytes = teachers["a"].source.published.manifest.nbytes
            head = teachers["a"].source.published.manifest.units["head"].nbytes
            for _ in range(2):
                for teacher in teachers.values():
                    teacher.score(SAMPLES)
            assert teachers["a"].bytes_read - opened == (nbytes if keep else 2 * (nbytes - head))


def test_responses_of_length_zero_and_no_samples_at_all(pair):
    with megatron_teachers({"t": str(pair["a"][0])}, Placement(max_tokens=1)) as teachers:
        assert teachers["t"].score([]).rows.shape == (0, 32)
        assert teachers["t"].score(tiny.samples([(3, 0), (1, 0)])).rows.shape == (0, 32)
        one = teachers["t"].score(tiny.samples([(1, 1)])).rows
        assert one.shape == (1, 32)
        assert torch.isfinite(one).all()


def test_a_schedule_runs_them_as_any_teacher(pair):
    """Mixtures too: all heads of a route at once, whichever teacher's weights are in the module."""
    router = Router({"a": {"a": 0.5, "b": 0.5}, "c": {"c": 1.0}}, "geometric")
    samples = tiny.samples(models.LENGTHS, teachers=["a", "c"] * 3)
    views = {}
    with megatron_teachers({name: str(pair[name][0]) for name in "abc"}, Placement()) as teachers:
        torch_teachers = {name: LocalTeacher(name, pair[name][0]) for name in "abc"}
        for kind, set_of_teachers in (("megatron", teachers), ("torch", torch_teachers)):
            schedule = TeacherSchedule(set_of_teachers, router)
            schedule.assign(samples)
            schedule.score(samples)
            routed = [s for s in samples if s.domain == "a" and len(s.response_ids)]
            views[kind] = [
                (v.name, v.weight, v.head.logits(v.hidden)) for v in schedule.teacher_views(routed)
            ]
            schedule.release()
    for ours, theirs in zip(views["megatron"], views["torch"], strict=True):
        assert ours[:2] == theirs[:2]
        torch.testing.assert_close(ours[2], theirs[2], atol=1e-4, rtol=0)


def test_a_padded_head_is_cut_to_the_vocabulary(pair):
    with megatron_teachers({"t": str(pair["a"][0])}, Placement(vocabulary=9)) as teachers:
        assert teachers["t"].load_head().vocabulary == 9
    with (
        megatron_teachers({"t": str(pair["a"][0])}, Placement(vocabulary=99)) as teachers,
        pytest.raises(ModelError, match="fewer than the 99 tokens"),
    ):
        teachers["t"].load_head()


def test_what_it_cannot_be_is_refused_in_one_sentence(tmp_path):
    cases = {
        "model_type 'gemma'": {"model_type": "gemma"},
        "mlp_bias True": {"mlp_bias": True},
        "topk_method 'noaux_tc'": models.V2 | {"topk_method": "noaux_tc"},
        "hidden_act 'gelu'": {"hidden_act": "gelu"},
        "clip_qkv 8.0": models.FAMILIES["olmoe"] | {"model_type": "olmoe", "clip_qkv": 8.0},
        "clip_qkv 0.0": models.FAMILIES["olmoe"] | {"model_type": "olmoe", "clip_qkv": 0.0},
        "sliding_window 48": models.FAMILIES["olmoe"] | {"model_type": "olmoe", "sliding_window": 48},
        "partial_rotary_factor 0.4": {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.4}},
        "model_type deepseek_v3 cannot have attention_bias True": models.FAMILIES["deepseek_v3"]
        | {"model_type": "deepseek_v3", "attention_bias": True},
        "rope_type 'dynamic'": {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
        },
        "this dots1 model is missing or cannot be": {"model_type": "dots1", "n_shared_experts": None},
        "this glm4_moe_lite model .* cannot be": {"model_type": "glm4_moe_lite", "mlp_layer_types": []},
    }
    for message, changes in cases.items():
        config = AutoConfig.for_model(**tiny.LLAMA | changes)
        with pytest.raises(ModelError, match=message):
            MegatronForm.from_config(config)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("family", "ignored"),
    [
        ("llama", {"layer_types": ["full_attention", "sliding_attention"], "use_qk_norm": True}),
        ("mistral", {"use_sliding_window": False, "layer_types": ["full_attention", "sliding_attention"]}),
        ("mixtral", {"norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": [0]}),
        ("dots1", {"mlp_layer_types": ["sparse", "dense"], "use_qk_norm": False, "scoring_func": "softmax"}),
        ("deepseek_v3", {"layer_types": ["sliding_attention"] * 2, "topk_method": "greedy"}),
    ],
)
def test_settings_that_transformers_ignores_are_ignored(family, ignored, tmp_path):
    checkpoint, _ = publish(models.model(family), tmp_path, shards=2)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | ignored))
    (checkpoint / "checksums.json").unlink(missing_ok=True)
    made = SimpleNamespace(module=AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32))
    expected = models.transformers_logits(made)
    with megatron_teachers({"t": str(checkpoint)}, Placement()) as teachers:
        found = teachers["t"].load_head().logits(teachers["t"].score(SAMPLES).rows)
    assert (found - expected).abs().max() <= 1e-4


def test_damage_is_noticed_and_the_next_call_goes_on(pair, tmp_path):
    checkpoint, url = publish(models.model("qwen3", seed=9), tmp_path, shards=2)
    shard = next((tmp_path / "published").rglob("shard-00001-*"))
    whole = bytearray(shard.read_bytes())
    shard.write_bytes(bytes(whole[:100]) + bytes([whole[100] ^ 1]) + bytes(whole[101:]))
    with megatron_teachers({"t": url, "a": str(pair["a"][0])}, Placement()) as teachers:
        before = teachers["a"].score(SAMPLES).rows
        with pytest.raises(StorageError, match="corrupt"):
            teachers["t"].score(SAMPLES)
        # Half of the weights were the other teacher's: they are all read again.
        assert torch.equal(teachers["a"].score(SAMPLES).rows, before)
        shard.write_bytes(bytes(whole))
        assert torch.isfinite(teachers["t"].score(SAMPLES).rows).all()
    (checkpoint / "model.safetensors").write_bytes(b"")
    with (
        pytest.raises(CheckpointError, match="truncated"),
        megatron_teachers({"t": str(checkpoint)}, Placement()),
    ):
        pass


def test_weights_of_another_form_are_refused(pair, tmp_path):
    checkpoint, _ = publish(models.model("llama", seed=9), tmp_path, shards=2)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"vocab_size": 10}))
    (checkpoint / "checksums.json").unlink(missing_ok=True)
    with (
        pytest.raises(ModelError, match="asks for 10 along"),
        megatron_teachers({"t": str(checkpoint)}, Placement()),
    ):
        pass


def test_two_ranks_need_two_processes(pair):
    with (
        pytest.raises(TeacherError, match="needs 2 processes"),
        megatron_teachers({"t": str(pair["a"][0])}, Placement(), tensor_parallel=2),
    ):
        pass
    assert not dist.is_initialized()


def test_its_groups_end_with_it(pair):
    """A group that Megatron-Core only forgets keeps three threads: ranks with many stages stalled of them."""
    with process_group():
        groups = len(dist.distributed_c10d._world.pg_map)
        with megatron_teachers({"t": str(pair["a"][0])}, Placement(max_tokens=24)) as teachers:
            teachers["t"].score(SAMPLES)
            assert len(dist.distributed_c10d._world.pg_map) > groups + 10
        assert len(dist.distributed_c10d._world.pg_map) == groups
