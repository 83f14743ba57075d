"""The length-bias example at a small size: a restart is biased, a resume is not. Seeds are fixed."""

from pathlib import Path

import arms
import experiment
import numpy as np
import pytest
import two_samples

COUNT, HAZARD = 1024, 0.04


@pytest.fixture(scope="module")
def reference() -> arms.Outcome:
    return arms.undisturbed(arms.build_model(), arms.build_requests(arms.build_model(), COUNT, 0))


@pytest.mark.slow
def test_a_restart_favours_short_responses(reference: arms.Outcome) -> None:
    model = arms.build_model()
    found = arms.restarted(model, arms.build_requests(model, COUNT, 1), HAZARD, seed=0)
    assert two_samples.same_lengths(reference.lengths, found.lengths) < 1e-6
    assert two_samples.kolmogorov_smirnov(reference.lengths, found.lengths)[1] < 1e-6
    assert two_samples.same_mean(reference.rewards, found.rewards) < 1e-6
    predicted = experiment.survivors_mean(reference, HAZARD)
    assert found.lengths.mean() == pytest.approx(predicted, abs=4 * found.lengths.std() / COUNT**0.5)


@pytest.mark.slow
def test_a_resume_does_not(reference: arms.Outcome, tmp_path: Path) -> None:
    model = arms.build_model()
    requests = arms.build_requests(model, COUNT, 2)
    found = arms.resumed(model, requests, HAZARD, 0, folder=tmp_path, fresh=True)
    assert found.interruptions > COUNT
    assert found.sampled == found.lengths.sum(), "a token was sampled twice"
    assert two_samples.same_lengths(reference.lengths, found.lengths) > 0.01
    assert two_samples.kolmogorov_smirnov(reference.lengths, found.lengths)[1] > 0.01
    assert two_samples.same_mean(reference.rewards, found.rewards) > 0.01
    by_uid = {request.uid: request for request in requests}
    seen, expected, p_value = two_samples.next_token_fit(model, by_uid, found.responses, found.resumes)
    assert seen.sum() == pytest.approx(expected.sum())
    assert p_value > 0.01
    # The same test sees a shift of one token in fifty.
    swapped = {uid: ids.copy() for uid, ids in found.responses.items()}
    for uid, position in found.resumes[::50]:
        swapped[uid][position] = 0
    assert (
        two_samples.next_token_fit(model, by_uid, swapped, found.resumes[: len(found.resumes)])[2] < p_value
    )


def test_with_its_own_noise_a_resumed_response_is_the_undisturbed_one(
    reference: arms.Outcome, tmp_path: Path
) -> None:
    model = arms.build_model()
    requests = arms.build_requests(model, COUNT, 0)[:256]
    found = arms.resumed(model, requests, HAZARD, 0, folder=tmp_path, fresh=False)
    assert found.interruptions > 100
    for uid, ids in found.responses.items():
        np.testing.assert_array_equal(ids, reference.responses[uid])


def test_the_tests_know_a_difference_when_there_is_one() -> None:
    rng = np.random.default_rng(0)
    x, y, z = rng.geometric(0.03, 5000), rng.geometric(0.03, 5000), rng.geometric(0.034, 5000)
    for test in (two_samples.same_lengths, two_samples.same_mean):
        assert test(x, y) > 0.01 > test(x, z)
    assert two_samples.kolmogorov_smirnov(x, y)[1] > 0.01 > two_samples.kolmogorov_smirnov(x, z)[1]
    # Textbook quantiles: chi-square 3.841 at one degree of freedom, 18.307 at ten.
    assert two_samples.chi_square_tail(3.841, 1) == pytest.approx(0.05, abs=1e-4)
    assert two_samples.chi_square_tail(18.307, 10) == pytest.approx(0.05, abs=1e-4)


@pytest.mark.parametrize("hazards", [[0.02], [0.005, 0.02, 0.05]])
@pytest.mark.parametrize("p", [1e-9, 0.0005, 0.0019, 0.0021, 0.008, 0.3])
def test_what_rejects_is_marked_and_the_level_counts_every_test(hazards: list[float], p: float) -> None:
    arm = {"interruptions": 0, "length": 1.0, "length_error": 0.1, "reward": 0.1, "reward_error": 0.1}
    arm |= {"sampled_per_kept_token": 1.0, "ks_distance": 0.1, "p_ks": p, "p_lengths": 0.5, "p_reward": 0.5}
    level = experiment.LEVEL / (3 + 4 * len(hazards))
    found = {
        "restart": arm,
        "resume": arm,
        "resume_same_noise": {"equal_to_undisturbed": 1},
        "restart_predicted_mean_length": 1.0,
        "next_token": {"resumes": 1, "p_value": 0.5},
    }
    results = {"count": 1, "limit": 1, "level": level, "undisturbed": arm, "control": arm}
    table = experiment.table(results | {"hazards": {f"{h:g}": found for h in hazards}})
    control = next(line for line in table.splitlines() if "undisturbed, other noise" in line)
    assert (" * |" in control) is (p < level)
