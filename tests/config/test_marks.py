"""What fields say of themselves beside their type: `Changes`, `Located`, `Own`."""

from pathlib import Path

import pytest

from opd.config import Recipe
from opd.config.schema import change_at, key_paths
from opd.pipelines.records.settings import RecordedChange

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


def test_the_page_names_every_setting_that_may_change():
    table = (
        PAGE.read_text("utf-8").partition("## Change a setting while a run goes on")[2].partition("\n## ")[0]
    )
    paths = key_paths(Recipe, {"domains": {"a": {}}, "evaluation": {"sets": {"a": {}}}})
    found = {path[-1] for path in paths if change_at(path) and not change_at(path[:-1])}
    assert {"lr", "kl_coef", "every", "urls", "correction"} <= found
    shaping = {"weights", "clip", "truncated_reward", "mask_truncated", "overlong_buffer", "overlong_penalty"}
    named_together = shaping | {"length_coef", "weight"}  # "`shaping` but for `running_std`"
    missing = [name for name in sorted(found - named_together) if f"{name}`" not in table]
    assert not missing


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("specialist.optim.lr", "rate"),
        ("domains.a.specialist.policy_loss.correction.upper", "rate"),
        ("specialist.opd.loss.loss.clip_high", "rate"),
        ("specialist.critic", "rate"),
        ("specialist.critic.optim.lr", "rate"),
        ("specialist.shaping.weights.length", "rate"),
        ("distill.kl_coef", "stream"),
        ("domains.a.distill.rl_coef", "stream"),
        ("evaluation.sets.a.rollout.top_p", "drawn"),
        ("domains.a.reward.urls", "judged"),
        ("domains.a.reward.timeout", "aside"),
        ("domains.a.reward.cache", None),
        ("specialist.optim.beta1", None),
        ("specialist.critic.optim.beta1", None),
        ("specialist.shaping.running_std", None),
        ("distill.prompts_per_domain", None),
        ("domains.a.source", None),
        ("rollout.engine", None),
        ("seed", None),
        ("nosuch.key", None),
    ],
)
def test_what_may_change_is_said_by_the_field(path, what):
    found = change_at(tuple(path.split(".")))
    assert (None if found is None else found.what) == what


@pytest.mark.parametrize(
    ("field", "otherwise"),
    [("domains.a.reward.urls", True), ("domains.a.reward.urls.weight", False), ("distill.steps", False)],
)
def test_what_is_measured_otherwise_is_no_matter_of_a_domains_name(field, otherwise):
    """The second one's domain is called `a.reward.urls`."""
    assert RecordedChange("", field, 1, 2, {}, []).changes_measurement == otherwise
