"""Products by the faster library against float64, and where it is not asked."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from opd.kernels import projection

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="PyTorch was built without oneDNN"
)


@pytest.fixture(autouse=True)
def onednn(monkeypatch):
    """As on a processor where it is the faster one."""
    monkeypatch.setattr(projection, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(projection, "onednn_packs", lambda: True)
    monkeypatch.setattr(projection, "widens", lambda dtype: False)


WIDENS = projection.widens


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shape", [(5,), (1, 1), (2, 3), (70, 1), (0,)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("trained", ["all", "inputs", "weight"])
def test_values_and_gradients_are_those_of_float64(shape, bias, trained):
    inputs, weight, shift = normal(*shape, 300), normal(257, 300), normal(257) if bias else None
    upstream = normal(*shape, 257)
    found = []
    for dtype, product in ((torch.float32, projection.linear), (torch.float64, functional.linear)):
        x = inputs.to(dtype, copy=True).requires_grad_(trained != "weight")
        w = weight.to(dtype, copy=True).requires_grad_(trained != "inputs")
        b = None if shift is None else shift.to(dtype, copy=True).requires_grad_(trained == "all")
        y = product(x, w, b)
        y.backward(upstream.to(dtype))
        found.append([y.detach(), x.grad, w.grad, None if b is None else b.grad])
    for ours, exact in zip(*found, strict=True):
        assert (ours is None) == (exact is None)
        if ours is not None:
            assert ours.shape == exact.shape
            torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=2e-4)


def test_what_is_not_contiguous_gives_the_same():
    x, w = normal(300, 40).t(), normal(300, 257).t()
    torch.testing.assert_close(projection.linear(x, w), x @ w.t(), rtol=1e-5, atol=2e-4)
    x, w = normal(40, 300).requires_grad_(), normal(257, 300).requires_grad_()
    projection.linear(x, w).sum().backward()  # its gradient is one number, expanded
    torch.testing.assert_close(x.grad, w.detach().sum(0).expand(40, -1), rtol=1e-5, atol=2e-4)
    torch.testing.assert_close(w.grad, x.detach().sum(0).expand(257, -1), rtol=1e-5, atol=2e-4)


def test_small_weights_other_dtypes_and_autocast_are_pytorchs_own(monkeypatch):
    monkeypatch.setattr(projection, "onednn_linear", lambda *arguments: pytest.fail("oneDNN"))
    for weight, dtype in ((normal(255, 257), torch.float32), (normal(300, 300), torch.float64)):
        x, w = normal(4, weight.shape[1]).to(dtype), weight.to(dtype)
        assert torch.equal(projection.linear(x, w), functional.linear(x, w))
    with torch.autocast("cpu", torch.bfloat16):
        assert projection.linear(normal(4, 300), normal(300, 300)).dtype == torch.bfloat16


@pytest.mark.parametrize("rows", [1, 7, 16, 65])
def test_a_weight_for_decode(rows):
    x, w, total, bias = normal(rows, 300), normal(257, 300), normal(rows, 257), normal(257)
    exact = x.double() @ w.double().t()
    packed = projection.DecodeWeight(w.clone())
    for ours, wanted in (
        (packed.project_rows(x), exact),
        (packed.project_rows(x, bias), exact + bias.double()),
        (packed.project_rows(x, None), exact),
        (packed.add_product(total.clone(), x), total.double() + exact),
        (packed.add_product(total.clone(), x, 0.5), total.double() + exact / 2),
    ):
        torch.testing.assert_close(ours.double(), wanted, rtol=1e-5, atol=2e-4)
    small = projection.DecodeWeight(w[:100].clone())
    assert torch.equal(small.project_rows(x), torch.mm(x, w[:100].t()))
    assert torch.equal(
        small.add_product(total[:, :100].clone(), x, 0.5),
        torch.addmm(total[:, :100], x, w[:100].t(), alpha=0.5),
    )


PROCESSORS = {
    "x86-64 of 2013": ("GenuineIntel", {"architecture": "x86_64"}, (True, True)),
    "Intel, AVX-512's instruction alone": (
        "GenuineIntel",
        {"architecture": "x86_64", "avx512_bf16": True, "avx512_fp16": True},
        (True, False),
    ),
    "Intel, AMX": (
        "GenuineIntel",
        {"architecture": "x86_64", "avx512_bf16": True, "amx_bf16": True, "avx512_fp16": True},
        (False, False),
    ),
    "AMD, AVX-512's instruction": (
        "AuthenticAMD",
        {"architecture": "x86_64", "avx512_bf16": True},
        (False, True),
    ),
    "ARM with bfloat16": ("", {"architecture": "aarch64", "bf16": True}, (False, False)),
    "ARM without": ("", {"architecture": "aarch64"}, (True, False)),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_which_processors_multiply_16_bit_numbers_in_float32(name, monkeypatch, tmp_path):
    maker, found, wanted = PROCESSORS[name]
    (tmp_path / "cpuinfo").write_text(f"vendor_id : {maker}")
    monkeypatch.setattr(projection, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    ask = WIDENS.__wrapped__
    assert (ask(torch.bfloat16), ask(torch.float16)) == wanted
    assert not ask(torch.float32)
    assert not ask(torch.float64)


@pytest.mark.parametrize("library", ["MKL", "oneDNN"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_products_in_float32_are_rounded_once(dtype, library, monkeypatch):
    monkeypatch.setattr(projection, "widens", lambda asked: asked == dtype)
    monkeypatch.setattr(projection, "onednn_is_faster", lambda: library == "oneDNN")
    leaves = [normal(2, 70, 300), normal(257, 300), normal(257)]
    upstream = normal(2, 70, 257).to(dtype)
    narrow = [leaf.to(dtype).requires_grad_() for leaf in leaves]
    exact = [leaf.detach().double().requires_grad_() for leaf in narrow]
    found, wanted = projection.linear(*narrow), functional.linear(*exact)
    found.backward(upstream)
    wanted.backward(upstream.double())
    half = torch.finfo(dtype).eps / 2
    pairs = [
        (found.detach(), wanted.detach()),
        *((a.grad, b.grad) for a, b in zip(narrow, exact, strict=True)),
    ]
    for ours, true in pairs[:-1]:
        assert ours.dtype == dtype
        # Half a unit of the last place, and the sum's own error in float32.
        assert bool(((ours.double() - true).abs() <= half * true.abs() * 1.001 + 2e-4).all())
    assert pairs[-1][0].dtype == dtype


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_for_decode_of_16_bits_is_kept_in_float32_where_that_is_faster(dtype, packs, monkeypatch):
    monkeypatch.setattr(projection, "widens", lambda asked: asked == dtype)
    monkeypatch.setattr(projection, "onednn_packs", lambda: packs)
    x, w, total, bias = (normal(*s).to(dtype) for s in ((7, 300), (257, 300), (7, 257), (257,)))
    exact = x.double() @ w.double().t()
    kept, half = projection.DecodeWeight(w.clone()), torch.finfo(dtype).eps / 2
    for ours, wanted in (
        (kept.project_rows(x), exact),
        (kept.project_rows(x, bias), exact + bias.double()),
        (kept.add_product(total.clone(), x), total.double() + exact),
        (kept.add_product(total.clone(), x, 0.5), total.double() + exact / 2),
    ):
        assert ours.dtype == dtype
        assert bool(((ours.double() - wanted).abs() <= half * wanted.abs() * 1.001 + 2e-4).all())


def test_layers_that_are_sped_up_stay_what_they_are():
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(300, 257), nn.ReLU(), Own(257, 300))
    before, x = {name: one.clone() for name, one in model.state_dict().items()}, normal(3, 300)
    wanted = model(x)
    projection.speed_up(model)
    assert type(model[0]) is projection.Linear
    assert type(model[2]) is Own
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    torch.testing.assert_close(model(x), wanted, rtol=1e-5, atol=1e-5)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight.zero_()
    torch.testing.assert_close(model(x), wanted, rtol=1e-5, atol=1e-5)
