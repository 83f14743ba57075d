"""What is logged of a step, from its micro-batches, ranks and updates: means, extremes and shares."""

import pytest
import torch

from opd.config.rl import PolicyLossConfig
from opd.metrics import combine_updates
from opd.train.losses import clipped_policy_loss
from opd.train.terms import MetricSums


def sums_of(*micro_batches: dict[str, tuple[float, float, float]]) -> MetricSums:
    """Of micro-batches, each with (sum, smallest, largest) of ten units by name."""
    sums = MetricSums()
    for micro in micro_batches:
        for name, (total, least, most) in micro.items():
            sums.add(name, total, 10)
            sums.record_min(f"{name}_min", least)
            sums.record_max(f"{name}_max", most)
    return sums


def test_sums_are_the_same_however_they_are_spread_over_micro_batches_and_ranks():
    first, second = {"r": (9.0, 0.5, 1.5)}, {"r": (12.0, 0.8, 4.0), "s": (5.0, 0.1, 0.2)}
    whole = sums_of(first, second)
    assert whole.means() == {
        "r": pytest.approx(1.05),
        "s": 0.5,
        "r_min": 0.5,
        "r_max": 4.0,
        "s_min": 0.1,
        "s_max": 0.2,
    }
    assert (
        MetricSums.merge_ranks([sums_of(first).raw_sums(), sums_of(second).raw_sums()]).means()
        == whole.means()
    )


def test_a_metric_that_some_updates_do_not_have_is_the_mean_of_the_others():
    found = combine_updates(
        [
            {"entropy": 1.0, "kl/a": 0.5, "lr": 0.25, "policy/ratio_min": 1.0, "policy/ratio_max": 1.0},
            {"kl/a": 0.3, "kl/b": 2.0, "lr": 0.25, "policy/ratio_min": 0.2, "policy/ratio_max": 3.0},
            {"entropy": 2.0, "lr": 0.25, "policy/ratio_min": 0.7, "policy/ratio_max": 9.0},
        ]
    )
    assert found == {
        "entropy": 1.5,
        "kl/a": pytest.approx(0.4),
        "kl/b": 2.0,
        "lr": 0.25,
        "policy/ratio_min": 0.2,
        "policy/ratio_max": 9.0,
    }
    assert combine_updates([]) == {}


def test_shares_of_a_step_are_over_all_of_its_updates():
    found = combine_updates([{"token_share/a": 1.0, "grad_share/a": 1.0}, {"token_share/b": 1.0}])
    assert found == {"token_share/a": 0.5, "grad_share/a": 0.5, "token_share/b": 0.5}


def test_the_smallest_ratio_of_a_loss_is_logged_as_the_largest_is():
    ratios = torch.tensor([0.25, 1.0, 2.0])
    _, stats = clipped_policy_loss(ratios.log(), torch.zeros(3), torch.ones(3), PolicyLossConfig())
    found = stats.metrics()
    assert (found["policy/ratio_min"], found["policy/ratio_max"]) == pytest.approx((0.25, 2.0))
