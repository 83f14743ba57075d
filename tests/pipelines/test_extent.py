"""A stage with a budget of tokens ends with it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from opd.pipelines.stages.loop import Extent, LoopState
from opd.pipelines.stages.samples import within

lengths = st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=12), min_size=1, max_size=8)


@settings(derandomize=True, deadline=None)
@given(lengths, st.integers(1, 400))
def test_the_last_step_is_cut_where_the_budget_ends(steps, budget):
    state, extent, last = LoopState(), Extent(tokens=budget), 0
    for step in steps:
        if extent.progress(state) >= 1.0:
            break
        kept = within(step, lambda tokens: tokens, extent.left(state))
        assert kept == step[: len(kept)]
        assert kept
        assert len(kept) == len(step) or sum(kept) >= budget - state.student_tokens
        state.student_tokens += sum(kept)
        last = kept[-1]
    whole = sum(map(sum, steps))
    assert state.student_tokens == whole if whole < budget else 0 <= state.student_tokens - budget < last
    assert within(steps[0], lambda tokens: tokens, None) == steps[0]
    assert Extent(steps=3).left(state) is None
