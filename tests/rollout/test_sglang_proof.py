"""Checksums of a worker against the trainer's bytes: cast, joined and cut as SGLang keeps them."""

import hashlib

import pytest
import tiny
import torch
from full import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.errors import RolloutError
from opd.rollout.weight_proof import CHECKSUMS, Proof, apart_at_most

KV_HEADS, ROWS = 2, 64
SETTINGS = {"cpu": {"device": "cpu"}, "cuda": {"device": "cuda", "dtype": "auto"}}
CASES = [
    (device, dtype, ranks)
    for device in CHECKSUMS
    for dtype in (torch.float32, torch.bfloat16)
    for ranks in (1, 2, 4)
]


def weights(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    """Of a float32 Qwen2, whose queries, keys and values have biases; its head is its own."""
    model = tiny.model(seed, model_type="qwen2", num_key_value_heads=KV_HEADS, tie_word_embeddings=False)
    generator = torch.Generator().manual_seed(seed)
    return [
        (name, tensor + torch.randn(tensor.shape, generator=generator)) for name, tensor in model.weights()
    ]


def kept(given: list[tuple[str, torch.Tensor]], rank: int, size: int) -> dict[str, torch.Tensor]:
    """The tensors of a rank of SGLang's tensor parallelism."""
    known, found = dict(given), {}
    shared = min(size, KV_HEADS)
    for name, tensor in given:
        if "q_proj" in name:
            k, v = (known[name.replace("q_proj", other)] for other in ("k_proj", "v_proj"))
            mine = rank * shared // size
            parts = [tensor.chunk(size)[rank], k.chunk(shared)[mine], v.chunk(shared)[mine]]
            found[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif "gate_proj" in name:
            up = known[name.replace("gate_proj", "up_proj")]
            both = torch.cat([tensor.chunk(size)[rank], up.chunk(size)[rank]])
            found[name.replace("gate_proj", "gate_up_proj")] = both
        elif "o_proj" in name or "down_proj" in name:
            found[name] = tensor.chunk(size, dim=1)[rank]
        elif "embed_tokens" in name or "lm_head" in name:
            whole = torch.cat([tensor, torch.zeros(-len(tensor) % ROWS, tensor.shape[1])])
            found[name] = whole.chunk(size)[rank]
        elif not any(part in name for part in ("k_proj", "v_proj", "up_proj")):
            found[name] = tensor
    found["model.rotary_emb.cos_sin_cache"] = torch.ones(3)
    return found


def answer(given, device: str, dtype: torch.dtype, size: int) -> list[dict]:
    """What `/weights_checker` of a worker that holds `given` says."""
    ranks = []
    for rank in range(size):
        sums = {
            n: CHECKSUMS[device](t.to(dtype).contiguous())[:16] for n, t in kept(given, rank, size).items()
        }
        place = {"role": "target", "tp_rank": rank, "tp_size": size}
        ranks.append({"checksums": sums, "per_gpu_checksum": "", "parallelism_info": [place]})
    return ranks


@pytest.mark.parametrize(("device", "dtype", "size"), CASES)
def test_a_worker_that_holds_the_trainers_weights_proves_it(device, dtype, size):
    given = weights()
    proof, ranks = Proof(given), answer(given, device, dtype, size)
    proof.check("http://one", ranks, SETTINGS[device])
    known = dict(proof._found)
    proof.check("http://two", ranks, SETTINGS[device])
    assert proof._found == known  # nothing was computed for the second


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=cases(60))
@given(st.sampled_from(CASES), st.data())
def test_a_changed_bit_is_found_wherever_it_is(case, data):
    device, dtype, size = case
    given = weights()
    there = [(name, tensor.clone()) for name, tensor in given]
    name, tensor = data.draw(st.sampled_from(there), label="tensor")
    place = data.draw(st.integers(0, tensor.numel() - 1), label="place")
    bit = data.draw(st.integers(16 if dtype == torch.bfloat16 else 0, 30), label="bit")
    tensor.view(-1).view(torch.int32)[place] ^= 1 << bit
    if not torch.equal(tensor.to(dtype), dict(given)[name].to(dtype)):
        with pytest.raises(RolloutError, match=r"holds another \S+ than the trainer"):
            Proof(given).check("http://one", answer(there, device, dtype, size), SETTINGS[device])


@pytest.mark.parametrize(("device", "dtype", "size"), CASES)
def test_another_ranks_share_and_older_weights_are_found(device, dtype, size):
    given, older = weights(), weights(1)
    mixed = [pair if place % 5 else old for place, (pair, old) in enumerate(zip(given, older, strict=True))]
    with pytest.raises(RolloutError, match="holds another"):
        Proof(given).check("http://one", answer(mixed, device, dtype, size), SETTINGS[device])
    if size > 1:
        ranks = answer(given, device, dtype, size)
        ranks[0]["checksums"], ranks[1]["checksums"] = ranks[1]["checksums"], ranks[0]["checksums"]
        with pytest.raises(RolloutError, match="holds another"):
            Proof(given).check("http://one", ranks, SETTINGS[device])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda sums: sums.pop("model.norm.weight"), "says nothing of model.norm.weight"),
        (lambda sums: sums.clear(), "says nothing of lm_head.weight"),
        (lambda sums: sums.update(adapter="0" * 16), "holds adapter, which was not pushed"),
        (lambda sums: sums.update(dict.fromkeys(sums, "")), "proves none of its tensors"),
        (lambda sums: sums.update(dict.fromkeys(sums, "0" * 16)), "proves none of its tensors"),
        (lambda sums: sums.update({"model.norm.weight": ""}), "holds another model.norm.weight"),
    ],
)
def test_what_proves_nothing_is_refused(change, words):
    given = weights()
    ranks = answer(given, "cuda", torch.bfloat16, 1)
    change(ranks[0]["checksums"])
    with pytest.raises(RolloutError, match=words):
        Proof(given).check("http://one", ranks, {})


@pytest.mark.parametrize(
    ("count", "dtype", "expected"),
    [
        (0, "float32", "0000000000000000"),
        (1, "uint8", "3d93a6540b54ef2a"),
        (5, "uint8", "321657ab05f5ac06"),
        (3, "bfloat16", "a0ca8384bbeaa024"),
        (8192, "int32", "aa3a4671823c62dd"),
        (20001, "bfloat16", "1155febe6e663851"),
        (24581, "float32", "06fc29090dc092db"),
    ],
)
def test_the_checksum_of_a_gpu_is_what_sglangs_kernel_gives(count, dtype, expected):
    """Of 0.5.23, run by Triton's interpreter."""
    values = (torch.arange(count) * 37 % 251).to(getattr(torch, dtype))
    assert CHECKSUMS["cuda"](values) == expected
    raw = values.view(torch.uint8).numpy().tobytes()
    assert CHECKSUMS["cpu"](values) == hashlib.sha256(raw).hexdigest()


def test_the_checksum_of_a_gpu_does_not_depend_on_how_it_is_cut_here(monkeypatch):
    values = torch.randn(50_000)
    whole = CHECKSUMS["cuda"](values)
    monkeypatch.setattr("opd.rollout.weight_proof._AT_ONCE", 8192)
    assert CHECKSUMS["cuda"](values) == whole


@pytest.mark.parametrize(
    ("dtypes", "most"), [(["float32"], 0.001), (["float32", "bfloat16"], 0.25), (["float16"], 0.25)]
)
def test_the_coarser_of_two_dtypes_says_how_far_outputs_may_be_apart(dtypes, most):
    sent = [(dtype, torch.zeros(1, dtype=getattr(torch, dtype))) for dtype in dtypes]
    assert apart_at_most(0.001, sent) == most
    assert apart_at_most(0.25, sent) == 0.25
