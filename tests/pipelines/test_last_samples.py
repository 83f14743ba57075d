"""What a stage keeps of its last step for whoever watches: little, whole, and never in the way."""

import json
from pathlib import Path

import numpy as np
import pytest

from opd.pipelines.records.layout import LAST_SAMPLES
from opd.pipelines.stages.last_samples import KEPT_PROMPTS, KEPT_RESPONSES, LastSamples
from opd.pipelines.stages.samples import StepSamples
from opd.types import Sample, SampleGroup, Status


def written(domain: str, number: int, rewards: list[float | None], length: int = 3, **fields) -> SampleGroup:
    uid = f"{domain}/{number}"
    samples = [
        Sample(
            f"{uid}/{place}",
            uid,
            domain,
            np.zeros(1, np.int32),
            response_ids=np.arange(length, dtype=np.int32),
            loss_mask=np.ones(length, bool),
            reward=reward,
            status=Status.COMPLETED,
            **fields,
        )
        for place, reward in enumerate(rewards)
    ]
    return SampleGroup(uid, domain, samples)


def kept(path: Path, groups: list[SampleGroup], text=lambda sample: "x") -> dict:
    LastSamples(path, text).write(1, StepSamples(groups, None))  # type: ignore[arg-type]
    return json.loads(path.read_bytes())


def test_every_domain_has_its_turn_and_the_best_stand_before_the_worst(tmp_path):
    groups = [written("sort", number, [0.0, 0.5, None, 1.0, 0.2]) for number in range(9)]
    groups += [written("add", number, [1.0]) for number in range(2)]
    document = kept(tmp_path / LAST_SAMPLES, groups)
    assert [one["domain"] for one in document["prompts"]] == ["sort", "add"] * 2 + ["sort"] * 2
    assert len(document["prompts"]) == KEPT_PROMPTS
    first = document["prompts"][0]
    assert [shown["reward"] for shown in first["shown"]] == [1.0, 0.5, 0.0, None]
    assert (first["responses"], len(first["shown"])) == (5, KEPT_RESPONSES)


def test_what_is_kept_is_short_however_long_a_response_is(tmp_path):
    seen = []

    def text(sample: Sample) -> str:
        seen.append((int(sample.response_ids[0]), int(sample.response_ids[-1]), sample.status))
        return "y" * 10**5

    long = written("sort", 0, [1.0], 10**6, metadata={"prompt": "p" * 10**6}, label=["l" * 10**6])
    kept(tmp_path / LAST_SAMPLES, [long] * 50, text)
    assert (tmp_path / LAST_SAMPLES).stat().st_size < 10**5
    # The end of the text counts only where the response has ended.
    assert seen[:2] == [(0, 1023, Status.TRUNCATED), (10**6 - 1024, 10**6 - 1, Status.COMPLETED)]


@pytest.mark.parametrize("text", ["\ud800", "\0\x1b[2J", "<script>", "\u202e", ""])
def test_any_text_can_be_kept(tmp_path, text):
    group = written(text, 0, [1.0], metadata={"messages": [{"role": text, "content": text}, 3]}, label=text)
    document = kept(tmp_path / LAST_SAMPLES, [group], lambda sample: text)
    assert document["prompts"][0]["shown"][0]["text"] == text
    assert document["prompts"][0]["prompt"] == f"{text}: {text}"


def test_a_step_without_samples_and_a_secret(tmp_path):
    assert kept(tmp_path / LAST_SAMPLES, []) == {"step": 1, "prompts": []}
    secret = f"{'a' * 1499}hf_{'Q' * 34}"
    document = kept(tmp_path / LAST_SAMPLES, [written("sort", 0, [1.0])], lambda s: secret + "b" * 5000)
    assert "QQQ" not in json.dumps(document)


def test_a_file_that_cannot_be_written_stops_nothing(tmp_path, caplog):
    path = tmp_path / LAST_SAMPLES
    path.mkdir()
    last = LastSamples(path, lambda sample: "x")
    last.discard_later(0)
    for step in (1, 2):
        last.write(step, StepSamples([written("sort", 0, [1.0])], None), final=True)  # type: ignore[arg-type]
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        f"samples of the last step are not kept in {path}"
    ]


def test_of_short_steps_one_a_second_is_kept_and_always_the_final_one(tmp_path):
    path, now, asked = tmp_path / LAST_SAMPLES, [0.0], []

    def text(sample: Sample) -> str:
        asked.append(now[0])
        return "x"

    last, seen = LastSamples(path, text, lambda: now[0]), []
    for step in range(1, 9):
        last.write(step, StepSamples([written("sort", 0, [1.0])], None), final=step == 8)  # type: ignore[arg-type]
        seen.append(json.loads(path.read_bytes())["step"])
        now[0] += 0.4
    assert seen == [1, 1, 1, 4, 4, 4, 7, 8]
    assert len(asked) == 4  # what is not kept is not decoded


@pytest.mark.parametrize("content", ["[", "[1]", '{"step": "7"}', '{"step": null}', "{}", "[" * 10**5])
def test_a_resumed_stage_forgets_what_comes_again(tmp_path, content):
    path = tmp_path / LAST_SAMPLES
    last = LastSamples(path, lambda sample: "x")
    last.write(4, StepSamples([written("sort", 0, [1.0])], None))  # type: ignore[arg-type]
    for step, stays in ((5, True), (4, True), (3, False)):
        last.discard_later(step)
        assert path.exists() is stays
    path.write_text(content)
    last.discard_later(9)
    assert not path.exists()


def test_they_are_those_of_the_last_step(finished_run):
    found = sorted((finished_run / "stages").glob(f"*/{LAST_SAMPLES}"))
    assert {file.parent.name for file in found} >= {"specialist-sort", "merge"}
    for file in found:
        rows = (file.parent / "metrics.jsonl").read_text().splitlines()
        assert json.loads(file.read_bytes())["step"] == json.loads(rows[-1])["step"] > 1
