"""Changes of weights: what comes out is what went in, to the last bit, or it is refused."""

from __future__ import annotations

import json

import pytest
import torch
from full import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from opd.errors import RolloutError
from opd.models.causal_lm import weights_digest
from opd.rollout.weight_delta import (
    all_blocks,
    bits_of,
    changed_blocks,
    form_as_json,
    form_from_json,
    form_of,
    group_blocks,
    pack_blocks,
    unpack_blocks,
)

BITS = {torch.float32: (torch.int32, 32), torch.bfloat16: (torch.int16, 16), torch.float16: (torch.int16, 16)}


def parts_of(blocks, most: int = 1 << 20) -> list[bytes]:
    return [pack_blocks(own) for own in group_blocks(blocks, most)]


def applied(base, parts) -> list[tuple[str, torch.Tensor]]:
    held = [(name, tensor.clone()) for name, tensor in base]
    own, form = dict(held), form_of(base)
    for part in parts:
        for block in unpack_blocks(part, form):
            block.write_to(own[block.name].view(-1))
    return held


def drawn(bits: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Numbers of any bits at all: NaN, infinities and -0.0 among them."""
    whole, width = BITS[dtype]
    return torch.tensor([bit - (1 << width) * (bit >> (width - 1)) for bit in bits], dtype=whole).view(dtype)


@st.composite
def versions(draw):
    """Two versions of a few tensors, most elements the same or few, with gaps of every size."""
    before, after = [], []
    for number in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from(list(BITS)))
        bits = st.integers(0, 2 ** BITS[dtype][1] - 1)
        size = draw(st.sampled_from([0, 1, 2, 255, 256, 700, 3000]))
        some = draw(st.lists(bits, min_size=1, max_size=8))
        old = drawn([some[at % len(some)] for at in range(size)], dtype)
        new = old.clone()
        share = draw(st.sampled_from(["none", "few", "all"]))
        if size and share == "all":
            new = bits_of(new).bitwise_xor(1).view(dtype)
        elif size and share == "few":
            for at in draw(st.lists(st.integers(0, size - 1), max_size=12)):
                new[at : at + 1] = drawn([draw(bits)], dtype)
        shape = (size // 2, 2) if size % 2 == 0 else (size,)
        before.append((f"t{number}", old.view(shape)))
        after.append((f"t{number}", new.view(shape)))
    return before, after


@pytest.mark.slow
@settings(max_examples=cases(150), deadline=None)
@given(versions(), st.sampled_from([1, 7, 256, 4096]), st.sampled_from([64, 1 << 20]))
def test_changes_and_everything_give_the_newer_version_bit_for_bit(pair, elements, most):
    before, after = pair
    due = weights_digest(after, quick=True)
    changes = parts_of(changed_blocks(before, after, elements), most)
    everything = parts_of(all_blocks(after, elements), most)
    assert weights_digest(applied(before, changes), quick=True) == due
    nothing = [(name, torch.zeros_like(tensor)) for name, tensor in before]
    assert weights_digest(applied(nothing, everything), quick=True) == due
    if weights_digest(before, quick=True) == due:
        assert changes == []


@settings(max_examples=cases(60), deadline=None)
@given(versions(), st.sampled_from([7, 4096]))
def test_positions_are_those_of_a_plain_comparison(pair, elements):
    before, after = pair
    found: dict[str, set[int]] = {}
    for block in changed_blocks(before, after, elements):
        own = range(block.count) if block.positions is None else block.positions.tolist()
        found.setdefault(block.name, set()).update(block.first + at for at in own)
    for (name, old), (_, new) in zip(before, after, strict=True):
        pairs = zip(bits_of(old).tolist(), bits_of(new).tolist(), strict=True)
        plain = {at for at, (was, now) in enumerate(pairs) if was != now}
        assert plain <= found.get(name, set())  # a block that goes whole has others, too
    sparse = [(block, block.positions) for block in changed_blocks(before, after, elements)]
    for block, positions in sparse:
        if positions is not None:
            assert block.values.nbytes + len(positions) < block.count * block.values.dtype.itemsize


@pytest.mark.parametrize(("every", "in_part"), [(1, False), (2, True)])
def test_a_block_goes_in_part_where_that_is_less(every, in_part):
    """A changed element is two bytes, and one that says where."""
    old = torch.zeros(4096, dtype=torch.bfloat16)
    new = old.clone()
    new[::every] = 1.0
    (block,) = changed_blocks([("t", old)], [("t", new)])
    assert (block.positions is not None) == in_part


@pytest.mark.parametrize("gap", [0, 1, 254, 255, 256, 510, 65534, 65535, 65536, 200_000])
def test_gaps_of_every_size_come_back(gap):
    old = torch.zeros(gap + 3, dtype=torch.bfloat16)
    new = old.clone()
    new[gap], new[gap + 2] = -0.0, float("nan")
    before, after = [("t", old)], [("t", new)]
    (part,) = parts_of(changed_blocks(before, after))
    assert weights_digest(applied(before, [part])) == weights_digest(after)
    assert len(part) < 2048 + new.nbytes // 100


def test_a_few_percent_take_three_bytes_each_in_bfloat16():
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(1 << 20, generator=generator).bfloat16()
    changed = torch.rand(1 << 20, generator=generator) < 0.03
    new = torch.where(changed, old + 1000, old)
    size = sum(map(len, parts_of(changed_blocks([("t", old)], [("t", new)]))))
    assert size < 3.1 * int(changed.sum())


FORM = form_of([("a", torch.zeros(10, 2, dtype=torch.bfloat16)), ("b", torch.zeros(5))])
ONES = torch.ones(4, dtype=torch.bfloat16)


def part(blocks, **sent) -> bytes:
    told = blocks if isinstance(blocks, bytes) else json.dumps(blocks).encode()
    copied = {name: tensor.clone() for name, tensor in sent.items()}
    return save({"blocks": torch.frombuffer(bytearray(told), dtype=torch.uint8), **copied})


def codes(*own: int) -> torch.Tensor:
    return torch.tensor(own, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"", "no part of them"),
        (b"\xff" * 40, "no part of them"),
        (part([["a", 0, 4, 0]], v0=ONES)[:-3], "no part of them"),
        (save({"v0": ONES}), "no part of them"),
        (part(b"[" * 100_000), "no part of them"),
        (part(b'[["a", 1e999, 4, 0]]', v0=ONES), "no part of them"),
        (part([["a", 0, 4]], v0=ONES), "no part of them"),
        (part([["c", 0, 4, 0]], v0=ONES), "'c', which is no tensor"),
        (part([["a", 0, 4, 0]], v0=ONES.float()), "another dtype"),
        (part([["a", 0, 4, 0]], v0=ONES.view(2, 2)), "another dtype or shape"),
        (part([["a", 0, 4, 0]]), "another dtype or shape"),
        (part([["a", 0, 5, 0]], v0=ONES), "4 values for 5 elements"),
        (part([["a", 0, 3, 0]], v0=ONES), "4 values for 3 elements"),
        (part([["a", 18, 4, 0]], v0=ONES), "elements 18 to 22"),
        (part([["a", -1, 4, 0]], v0=ONES), "elements -1 to 3"),
        (part([["a", 0, 0, 0]], v0=ONES[:0]), "elements 0 to 0"),
        (part([["a", 0, 2**62, 1]], v0=ONES, g0=codes(0, 0, 0, 0)), "elements 0 to"),
        (part([["a", 4, 4, 0], ["a", 7, 4, 0]], v0=ONES, v1=ONES), "elements 7 to 11"),
        (part([["a", 4, 4, 0], ["a", 0, 4, 0]], v0=ONES, v1=ONES), "elements 0 to 4"),
        (part([["a", 0, 9, 3]], v0=ONES, g0=codes(0, 0, 0, 0)), "gaps of an unknown form"),
        (part([["a", 0, 9, 1]], v0=ONES), "gaps of an unknown form"),
        (part([["a", 0, 9, 1]], v0=ONES, g0=codes(0, 0, 0, 0).short()), "gaps of an unknown form"),
        (part([["a", 0, 9, 2]], v0=ONES, g0=codes(0, 0, 0)), "gaps of an unknown form"),
        (part([["a", 0, 2, 1]], v0=ONES, g0=codes(0, 0, 0, 0)), "gaps of an unknown form"),
        (part([["a", 0, 9, 1]], v0=ONES, g0=codes(0, 0, 0)), "positions that are not 4 of 9"),
        (part([["a", 0, 9, 1]], v0=ONES, g0=codes(0, 0, 0, 6)), "positions that are not 4 of 9"),
        (part([["a", 0, 9, 1]], v0=ONES, g0=codes(0, 0, 0, 0, 255)), "positions that are not 4 of 9"),
        (part([["a", 0, 9, 1]], v0=ONES[:0], g0=codes()), "positions that are not 0 of 9"),
        (part([["a", 0, 4, 0]], v0=ONES, v1=ONES), "'v1', of which no block knows"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(sent, words):
    with pytest.raises(RolloutError, match=words) as refusal:
        unpack_blocks(sent, FORM)
    assert str(refusal.value).endswith("; send them anew.")


@pytest.mark.parametrize(
    "told",
    [
        None,
        [["a", "bfloat16"]],
        [["a", "float4", [1]]],
        [["a", "bfloat16", [-1]]],
        [["a", "bfloat16", [2**40, 2**40]]],
        [["a", "bfloat16", [1.5]]],
        [[7, "bfloat16", [1]]],
        [["a", "bfloat16", [1]], ["a", "bfloat16", [1]]],
        [[["a"], "bfloat16", [1]]],
        [["__metadata__", "bfloat16", [1]]],
        [["a", "bfloat16", [0, 2**40, 2**40]]],
        [[f"a{number}", "bfloat16", [2**46]] for number in range(2)],
    ],
)
def test_a_form_is_not_trusted(told):
    with pytest.raises(RolloutError, match="send them anew"):
        form_from_json(told)
    assert form_from_json(json.loads(json.dumps(form_as_json(FORM)))) == FORM


def test_a_part_is_safetensors():
    old, new = [("t", torch.zeros(1000))], [("t", torch.zeros(1000))]
    new[0][1][[3, 300]] = 1.0
    (sent,) = parts_of(changed_blocks(old, new))
    found = load(sent)
    assert json.loads(bytes(found["blocks"].tolist())) == [["t", 0, 1000, 1]]
    assert found["g0"].tolist() == [3, 255, 41]
    assert found["v0"].tolist() == [1.0, 1.0]
