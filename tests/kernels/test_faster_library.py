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
        (packed.times(x), exact),
        (packed.times(x, bias), exact + bias.double()),
        (packed.times(x, None), exact),
        (packed.added(total, x), total.double() + exact),
        (packed.added(total, x, 0.5), total.double() + exact / 2),
    ):
        torch.testing.assert_close(ours.double(), wanted, rtol=1e-5, atol=2e-4)
    small = projection.DecodeWeight(w[:100].clone())
    assert torch.equal(small.times(x), torch.mm(x, w[:100].t()))
    assert torch.equal(
        small.added(total[:, :100], x, 0.5), torch.addmm(total[:, :100], x, w[:100].t(), alpha=0.5)
    )


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
