"""Building models from configurations, streaming weights, digests."""

from functools import partial

import pytest
import tiny
import torch

from opd.errors import ModelError
from opd.models.causal_lm import CausalLM, tensors_of, torch_device, weights_digest


def build(**config) -> CausalLM:
    return CausalLM.from_config(tiny.LLAMA | config, tokenizer=tiny.tokenizer())


def test_vocabulary_and_special_ids_come_from_the_tokenizer():
    model, tokenizer = tiny.model(), tiny.tokenizer()
    assert model.vocab_size == len(tokenizer) == model.config.vocab_size
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert model.config.bos_token_id is None


def test_the_seed_alone_decides_the_weights():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = tiny.model(1).digest()
    assert torch.equal(torch.rand(3), expected), "building a model must not move the global generator"
    assert tiny.model(1).digest() == first != tiny.model(2).digest()


def test_weights_are_in_order_and_tied_ones_appear_once():
    tied, untied = build(tie_word_embeddings=True), build(tie_word_embeddings=False)
    names = [name for name, _ in tied.weights()]
    assert names == [name for name, _ in tied.weights()]
    assert names[0] == "model.embed_tokens.weight"
    assert "lm_head.weight" not in names
    assert [name for name, _ in untied.weights()] == [*names, "lm_head.weight"]
    assert sum(tensor.numel() for _, tensor in tied.weights()) == tied.parameter_count


def test_weights_are_views_without_gradients():
    model = tiny.model()
    name, tensor = next(model.weights())
    assert not tensor.requires_grad
    assert tensor.data_ptr() == dict(model.module.named_parameters())[name].data_ptr()


def test_load_weights_copies_every_bit_and_keeps_ties():
    source, target = tiny.model(1), tiny.model(2)
    pointer = target.module.lm_head.weight.data_ptr()
    target.load_weights(source.weights())
    assert target.digest() == source.digest()
    assert target.module.lm_head.weight.data_ptr() == pointer
    assert target.module.lm_head.weight is target.module.model.embed_tokens.weight
    assert target.module.lm_head.weight.requires_grad


def test_load_weights_names_what_does_not_fit():
    model = tiny.model()
    weights = dict(model.weights())
    name = "model.norm.weight"
    with pytest.raises(ModelError, match=r"no tensor extra\.weight"):
        model.load_weights([("extra.weight", torch.zeros(1))])
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[3\] but the model needs \[32\]"):
        model.load_weights([(name, torch.zeros(3))])
    del weights[name]
    with pytest.raises(ModelError, match=r"1 tensors were not given, among them model\.norm\.weight"):
        model.load_weights(weights.items())


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_digest_depends_on_names_shapes_dtypes_and_bytes(dtype, quick):
    digest = partial(weights_digest, quick=quick)
    tensor = torch.arange(6).to(dtype)
    digests = {
        digest([("a", tensor)]),
        digest([("b", tensor)]),
        digest([("a", tensor.view(2, 3))]),
        digest([("a", tensor.to(torch.float64))]),
        digest([("a", tensor.flip(0))]),
    }
    assert len(digests) == 5
    strided = torch.stack([tensor, tensor], dim=1)[:, 0]
    assert digest([("a", strided)]) == digest([("a", tensor)])
    assert digest([("a", strided[:1])]) == digest([("a", tensor[:1])])


def test_a_changed_bit_changes_the_digest():
    model = tiny.model()
    before = model.digest()
    with torch.no_grad():
        model.module.model.norm.weight[3] += 1e-7
    assert model.digest() != before


def test_dropout_is_off_so_that_logprobs_can_be_recomputed():
    model = build(attention_dropout=0.9)
    ids = torch.arange(6)
    first = model.hidden(ids, ids, [0, 6])
    assert first.requires_grad
    assert torch.equal(first, model.hidden(ids, ids, [0, 6]))


def test_no_tokens_give_no_rows():
    empty = torch.zeros(0, dtype=torch.int64)
    assert tiny.model().hidden(empty, empty, [0, 0]).shape == (0, 32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_models_load_and_stay_close(dtype):
    exact = tiny.model()
    half = CausalLM.from_config(tiny.LLAMA, tokenizer=tiny.tokenizer(), dtype=dtype)
    half.load_weights(exact.weights())
    ids = torch.arange(2, 10)
    with torch.no_grad():
        close, hidden = half.hidden(ids, ids - 2, [0, 8]), exact.hidden(ids, ids - 2, [0, 8])
    assert close.dtype == getattr(torch, dtype)
    assert half.module.model.rotary_emb.inv_freq.dtype == torch.float32
    torch.testing.assert_close(close.float(), hidden, atol=0.1, rtol=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "lama"}, r"model_type is 'lama'.*did you mean 'llama'\?"),
        ({"num_hidden_layer": 3}, r"num_hidden_layer is not an argument.*did you mean 'num_hidden_layers'\?"),
        ({"vocab_size": 5}, r"vocab_size is 5, fewer than the tokenizer's 15 ids"),
        ({"hidden_size": "wide"}, r"cannot be used for model_type 'llama'"),
        ({"num_key_value_heads": 3}, r"its sizes do not fit together"),
    ],
)
def test_wrong_configurations_are_one_sentence(change, message):
    with pytest.raises(ModelError, match=message) as caught:
        build(**change)
    assert "\n" not in str(caught.value)


def test_a_padded_vocabulary_is_kept():
    assert build(vocab_size=64).vocab_size == 64


def test_wrong_dtype_and_device_are_named():
    with pytest.raises(ModelError, match="dtype 'int8' is not one of float32"):
        CausalLM.from_config(tiny.LLAMA, tokenizer=tiny.tokenizer(), dtype="int8")
    with pytest.raises(ModelError, match="'tpuu' is not a device"):
        torch_device("tpuu")
    assert torch_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_on_a_machine_without_it_is_refused():
    with pytest.raises(ModelError, match="no CUDA device"):
        torch_device("cuda")


def test_tensors_are_found_once_in_the_order_of_the_parts():
    module = torch.nn.Sequential(
        torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3, bias=False)
    )
    tied = torch.nn.Module()
    tied.first, tied.second, tied.none = module, module[2], None
    tied.own = torch.nn.Parameter(torch.zeros(2))
    tied.register_buffer("kept", module[1].running_mean)
    tied.register_parameter("absent", None)
    parameters, buffers = tensors_of(tied)
    assert list(map(id, parameters)) == list(map(id, tied.parameters()))
    assert list(map(id, buffers)) == list(map(id, tied.buffers()))
