"""The environment `tools`: calls, answers, files, limits, and what the log gives back."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, fields, replace
from typing import ClassVar

import images
import pytest
from boxes import gone, running
from recipes import tiny_recipe
from watched import without_waiting

from opd.config.environments import EnvironmentConfig, SandboxConfig
from opd.environments import trajectory
from opd.environments.protocol import Action, Task, ToolCall, tools_of
from opd.environments.tools import Tools, _remove_left, limits_of, schema
from opd.environments.trajectory import Command, TrajectoryLog, read_trajectories
from opd.errors import ConfigError, StorageError
from opd.pipelines.check.checks import Finding
from opd.pipelines.check.domains import check_environments
from opd.pipelines.cli import main
from opd.rollout.prompts import Domain, Prompt
from opd.sandbox import isolation
from opd.sandbox.isolation import own_user, process_name
from opd.sandbox.protocol import Limits, Outcome, SandboxError
from opd.sandbox.substrates import find_substrate

USUAL = asdict(limits_of(SandboxConfig()))
TABLE = "town,people\nUlm,126000\nBonn,330000\n"
ALL = ["python", "shell", "calculator", "table"]


def task(uid="e", label="456000", **metadata) -> Task:
    return Task(uid, "", [{"role": "user", "content": "?"}], label, metadata, 0)


def acted(log, *actions, tools=ALL, sandbox=None, given=None):
    """The steps of one life of an episode."""

    async def life():
        environment = Tools(tools, sandbox)
        environment.log = log
        environment.reset(given or task(files={"towns.csv": TABLE}))
        try:
            return [
                await environment.step(Action(f"{turn}", calls, turn=turn))
                for turn, calls in enumerate(actions)
            ]
        finally:
            await environment.close()

    return asyncio.run(life())


def call(name, **arguments):
    return ToolCall(name, arguments)


def said(step):
    return [message["content"].strip() for message in step.observation]


EPISODE = (
    [
        call("table", file="towns.csv", column="town", value="bonn"),
        call("calculator", expression="330000+126000"),
    ],
    [call("python", code="open('note', 'w').write('456000'); print('kept')")],
    [call("shell", command="cat note; date +%N")],
)


@pytest.mark.parametrize("logged", [True, False])
def test_tools_answer_and_share_the_files_of_their_episode(tmp_path, logged):
    with TrajectoryLog(tmp_path / "log") as log:
        steps = acted(log if logged else None, *EPISODE)
    assert said(steps[0]) == ["town: Bonn; people: 330000\n1 rows", "456000"]
    assert said(steps[1]) == ["kept"]
    assert said(steps[2])[0].startswith("456000")
    assert not any(step.done or step.reward for step in steps)


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (call("calculator", expression="2*(3+4)-7**2/7"), "7.0"),
        (call("calculator", expression="9**9**9"), "error: exit status 1"),
        (call("calculator", expression="__import__('os')"), "numbers, +"),
        (call("calculator", expression=7), "7"),
        (call("calculator"), "error: calculator takes expression, each a text"),
        (call("table", file="/etc/passwd", column="a", value="b"), "error"),
        (call("table", file="towns.csv", column="mayor", value="b"), "columns are town, people"),
        (call("python", code="import sys; sys.exit(3)"), "error: exit status 3"),
        (call("python", code="print('x' * 100_000)"), "bytes more]"),
        (call("python", code=["print(1)"]), "error: python takes code"),
        (call("python", code="\ud800"), "error: the arguments of python are no text"),
        (call("shell", command="a\0b"), "error: shell takes texts of at most 65,535 characters, and no NUL"),
        (call("python", code="#" * 65_536), "error: python takes texts of at most 65,535 characters"),
        (call("calculator", expression="(-8) ** 0.5 // 2"), "TypeError: unsupported operand"),
        (call("format_disk", all="yes"), "error: there is no tool format_disk"),
    ],
)
def test_a_call_is_answered_whatever_it_is(call, answer):
    (step,) = acted(None, [call])
    assert answer in said(step)[0]
    assert "Traceback" not in said(step)[0]
    assert not step.done


def test_an_answer_without_a_call_ends_the_episode_and_is_right_or_not():
    async def ended(text, label):
        environment = Tools(["calculator"])
        environment.reset(task(label=label))
        return await environment.step(Action(text))

    for text, label, right in [
        ("It is 456000.", "456000", 1.0),
        ("456000", 456000, 1.0),
        ("1456000", "456000", 0.0),
        ("-456000", "456000", 0.0),
        ("0.456000", "456000", 0.0),
        ("1,456", "456", 0.0),
        ("1/2", "2", 0.0),
        ("It is 4, 2", "2", 1.0),
        ("456", "456000", 0.0),
        ("", "456000", 0.0),
        ("It is None", None, 0.0),
    ]:
        step = asyncio.run(ended(text, label))
        assert (step.done, step.reward) == (True, right), text


def test_who_fills_its_disk_ends_its_episode_with_a_reason():
    fill = [call("shell", command="for n in 1 2 3 4; do head -c 500000 /dev/zero > $n; done")]
    first, second = acted(None, fill, fill, sandbox={"disk_mb": 1})
    assert "disk" in said(first)[0]
    assert second.done
    assert "quota" in second.info["ended"]


def test_a_resumed_episode_hears_what_it_heard_and_goes_on(tmp_path):
    more = [call("shell", command="cat note")]
    with TrajectoryLog(tmp_path / "log") as log:
        before = acted(log, *EPISODE)
    with TrajectoryLog(tmp_path / "log") as log:
        after = acted(log, *EPISODE, more)
        assert after[:3] == before
        assert said(after[3]) == ["456000"]
        assert [one.attempts for one in log.find("e").commands] == [1] * 5


@pytest.mark.parametrize(
    "other",
    [{"label": "330000"}, {"prompt": "??"}, {"messages": [{"role": "user", "content": "??"}]}, {"seed": 1}],
    ids=lambda other: next(iter(other)),
)
def test_a_log_of_another_task_gives_no_reward(tmp_path, other):
    with TrajectoryLog(tmp_path / "log") as log:
        acted(log, *EPISODE[:1], [], given=task(label="1"))  # the turn is "1", which is right
        assert [step.reward for step in log.find("e").steps] == [0.0, 1.0]
    with TrajectoryLog(tmp_path / "log") as log:
        assert acted(log, *EPISODE[:1], [], given=task(label="1"))[1].reward == 1.0
        with pytest.raises(StorageError, match="begun with other settings"):
            acted(log, *EPISODE[:1], [], given=replace(task(label="1"), **other))


def test_tools_that_there_are_not_are_refused_early():
    for params in (
        {"tools": ["rm"]},
        {"tools": []},
        {"tools": "python"},
        {"sandbox": {"seconds": -1}},
        {"sandbox": {"network": True}},
    ):
        with pytest.raises(ConfigError):
            tools_of(EnvironmentConfig(type="tools", params=params), "d")
    schemas = tools_of(EnvironmentConfig(type="tools", params={"tools": ["table", "python"]}), "d")
    assert [one["function"]["name"] for one in schemas] == ["table", "python"]


def test_trajectories_are_shown_and_replayed(tmp_path, capsys, ends):
    run = tmp_path / "run"
    log_folder = run / "stages/merge/episodes"
    with TrajectoryLog(log_folder) as log:
        acted(log, *EPISODE[:2], given=task("merge/0/0", files={"towns.csv": TABLE}))
        acted(log, *EPISODE, given=task("merge/1/0", files={"towns.csv": TABLE}))
        log.log_intent("merge/1/0", 3, read_trajectories(log_folder)[0]["merge/1/0"].commands[0].command)
    shown = ends(0, ["trajectory", "show", str(run)]).out
    assert "merge/0/0: 2 steps, 3 commands" in shown
    assert "merge/1/0: 3 steps, 5 commands, 1 in flight" in shown
    shown = ends(0, ["trajectory", "show", str(log_folder), "--episode", "merge/1/0"]).out
    assert "out| town: Bonn; people: 330000" in shown
    assert "changed note" in shown
    assert "in flight" in shown
    assert main(["trajectory", "replay", str(run), "--episode", "merge/0/0"]) == 0
    assert "3 commands run again, all as before" in capsys.readouterr().out
    assert "command 3" in (said := ends(1, ["trajectory", "replay", str(run), "--episode", "merge/1/0"]).out)
    assert "stdout at byte" in said
    (file,) = log_folder.glob("*.wal")
    damaged = bytearray(file.read_bytes())
    damaged[damaged.rindex(b"merge/1/0")] ^= 1
    file.write_bytes(damaged)
    for words in ([], ["--episode", "merge/0/0"]):
        assert "merge/0/0" in ends(2, ["trajectory", "show", str(run), *words]).out


def test_what_cannot_be_shown_is_said(tmp_path, ends):
    (tmp_path / "run/stages/merge").mkdir(parents=True)
    for words in (
        ["trajectory", "show", str(tmp_path / "nowhere")],
        ["trajectory", "show", str(tmp_path / "run")],
        ["trajectory", "replay", str(tmp_path / "run"), "--episode", "x"],
        ["trajectory", "show", str(tmp_path / "run"), "--seed", "3"],
        ["trajectory", "erase", str(tmp_path / "run")],
    ):
        assert len(ends(2, words).err.splitlines()) == 1
    with TrajectoryLog(tmp_path / "run/stages/merge/episodes") as log:
        log.begin_episode("e", {})
    for action in (["show", str(tmp_path / "run"), "--episode", "f"], ["replay", str(tmp_path / "run")]):
        assert "opd trajectory show" in ends(2, ["trajectory", *action]).err
    assert "make no sense" in ends(2, ["trajectory", "replay", str(tmp_path / "run"), "--episode", "e"]).err


def logged(folder, words, **limits):
    """A log of one command, with limits that somebody wrote."""
    written(folder, Command(words), limits={**USUAL, **limits})


def written(folder, command, **settings):
    """A log of one command, and what somebody wrote of its sandbox."""
    usual = {"type": "tools", "substrate": find_substrate().kind, "reads": [], "files": {"f": "text"}}
    with TrajectoryLog(folder) as log:
        log.begin_episode("e", {**usual, "limits": USUAL, **settings})
        number = log.log_intent("e", 0, command).number
        log.log_result("e", number, Outcome(0, stdout=b""), None)


def test_a_replay_lets_commands_read_what_the_user_names_and_not_what_the_log_does(tmp_path, ends):
    secret = tmp_path / "secret"
    secret.write_text("mine")
    written(tmp_path / "log", Command(("/bin/cat", str(secret))), reads=[str(tmp_path), "/etc"])
    replay = ["trajectory", "replay", str(tmp_path / "log"), "--episode", "e"]
    for given in ([], ["--reads", "/etc"], ["--reads", str(secret)]):
        (line,) = ends(2, [*replay, *given]).err.splitlines()
        assert f"lets commands read {tmp_path}; if" in line
        assert "give --reads" in line
    assert "'mine' now" in ends(1, [*replay, "--reads", str(tmp_path), "--reads", "/etc"]).out
    assert main(["trajectory", "show", str(tmp_path / "log"), "--reads", "/etc"]) == 2


def test_a_replay_is_not_weaker_apart_than_this_machine_can_because_a_log_says_so(tmp_path, ends):
    if find_substrate().kind == "process":
        pytest.skip("there is nothing stronger here")
    written(tmp_path / "log", Command(("/bin/true",)), substrate="process")
    replay = ["trajectory", "replay", str(tmp_path / "log"), "--episode", "e"]
    assert "give --substrate process" in ends(2, replay).err
    assert main([*replay, "--substrate", "process"]) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(one.name, value) for one in fields(Limits) for value in ("x", None, -1, 1 << 70, True)],
        ("seconds", 3601),
        ("seconds", 1e9),
        ("memory", (1 << 40) + 1),
        ("files", 1e3),
    ],
)
def test_limits_in_a_log_that_no_recipe_gives_are_refused(tmp_path, ends, name, value):
    logged(tmp_path / "log", ("true",), **{name: value})
    (line,) = ends(2, ["trajectory", "replay", str(tmp_path / "log"), "--episode", "e"]).err.splitlines()
    assert f"make no sense (limits.{name}" in line


def test_a_replay_takes_no_more_than_a_recipe_by_default_because_a_log_says_so(tmp_path, ends):
    logged(tmp_path / "log", ("true",), disk=1 << 40, seconds=3600.0)
    replay = ["trajectory", "replay", str(tmp_path / "log"), "--episode", "e"]
    (line,) = ends(2, replay).err.splitlines()
    assert "seconds 3,600.0 and disk 1,099,511,627,776" in line
    assert "give --quotas" in line
    assert main([*replay, "--quotas"]) == 0
    assert main(["trajectory", "show", str(tmp_path / "log"), "--quotas"]) == 2


@pytest.mark.parametrize(
    ("killed_by", "state"), [("\x1b[2J", None), (None, "\x1b[2J" * 16), (None, 3), (["wall"], None)]
)
def test_what_ended_a_command_and_its_state_are_read_as_what_they_are(tmp_path, ends, killed_by, state):
    with TrajectoryLog(tmp_path / "log") as log:
        log.begin_episode("e", {})
        number = log.log_intent("e", 0, Command(("true",))).number
        record = log._result_record("e", number, Outcome(0, killed_by=killed_by), state)
        record["order"] = log._table.order
        log._files.append(trajectory.RecordKind.RESULT, trajectory._encode_record(record))
    said = ends(2, ["trajectory", "show", str(tmp_path / "log"), "--episode", "e"])
    assert "\x1b" not in said.out + said.err


def test_what_a_tool_was_asked_is_shown_though_its_program_is_long(tmp_path, capsys):
    with TrajectoryLog(tmp_path / "log") as log:
        acted(log, [call("calculator", expression="330000+126000")])
        (uid,) = log.uids()
    assert main(["trajectory", "show", str(tmp_path / "log"), "--episode", uid]) == 0
    (line,) = [one for one in capsys.readouterr().out.splitlines() if "command 0: python3" in one]
    assert line.endswith(" 330000+126000")
    assert len(line) < 300


def test_a_tool_of_its_own_runs_in_the_sandbox_as_the_others_do(tmp_path):
    class Counting(Tools):
        known: ClassVar = {**Tools.known, "count": schema("count", "Lines of a file.", file="Its name")}

        def command(self, tool, arguments):
            return ("wc", "-l", *arguments) if tool == "count" else super().command(tool, arguments)

    async def life():
        environment = Counting(["count", "shell"])
        environment.reset(task(files={"towns.csv": TABLE}))
        calls = [call("count", file="towns.csv"), call("shell", command="echo on"), call("count", file=["x"])]
        try:
            return await environment.step(Action("0", calls, turn=0))
        finally:
            await environment.close()

    assert said(asyncio.run(life())) == ["3 towns.csv", "on", "error: count takes file, each a text"]
    assert [one["function"]["name"] for one in Counting.schemas(["count"])] == ["count"]
    with pytest.raises(ConfigError, match="no tool count"):
        Tools(["count"])


def found_of(tools, within=60.0, **sandbox) -> list[Finding]:
    """What the doctor says of them."""
    params = {"tools": tools, "sandbox": sandbox}
    environment = EnvironmentConfig(type="tools", params=params, seconds=within)
    domain = tiny_recipe().domains["sort"].model_copy(update={"environment": environment})
    recipe = tiny_recipe().model_copy(update={"domains": {"sort": domain}})
    train = [Prompt.from_content([{"role": "user", "content": "?"}], "1", "sort")]
    return check_environments(recipe, {"sort": Domain("sort", train, [])})


def test_an_image_without_what_a_tool_runs_is_found_before_the_run(podman):
    image = {"substrate": "container", "image": images.SHELL}
    found = found_of(["python", "shell", "table"], **image)
    (error,) = [one.detail for one in found if one.level == "error"]
    assert f"image {images.SHELL} (" in error
    assert "has no python3 for python and table; put it into the image" in error
    assert "error" not in [one.level for one in found_of(["shell"], **image)]


def test_a_turn_whose_commands_may_outlast_the_environments_step_is_found_before_the_run():
    (error,) = [one.detail for one in found_of(["shell"], within=30.0) if one.level == "error"]
    assert "4 commands may take 10 s each" in error
    assert "set domains.sort.environment.seconds above 40" in error
    assert "error" not in [one.level for one in found_of(["shell"], within=30.0, seconds=5)]


def test_what_commands_are_to_read_and_is_not_there_is_found_before_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").touch()
    reads = [str(tmp_path / "here"), str(tmp_path / "gone"), "here"]
    gone, loose = [one.detail for one in found_of(["shell"], reads=reads) if one.level == "error"]
    assert "gone, which is not there; mend the path, or take it out" in gone
    assert "has here, which is not an absolute path" in loose


@pytest.mark.parametrize(("path", "own"), [("/", "/home/agent"), ("/home/", "/home/agent"), ("/tmp", "/tmp")])
def test_a_folder_that_would_hide_the_sandboxs_own_is_found_before_the_run(path, own):
    if find_substrate().kind == "process":
        pytest.skip("commands have the machine's own folders")
    (error,) = [one.detail for one in found_of(["shell"], reads=[path]) if one.level == "error"]
    assert f"has {path}, where commands have a {own} of their own; name the files and folders" in error
    assert "error" not in [one.level for one in found_of(["shell"], reads=[path], substrate="process")]


def test_limits_within_which_no_command_runs_are_not_told_as_a_program_that_is_missing():
    found = found_of(["python"], substrate="process", memory_mb=1)
    (error,) = [one.detail for one in found if one.level == "error"]
    assert "not even an empty command of the shell runs within params.sandbox" in error
    assert error.endswith("raise its memory_mb, processes or seconds")


@pytest.mark.parametrize(
    ("tools", "sandbox", "sentence"),
    [
        ("shell", {}, "a list of tools is needed; give some of python, "),
        ([["shell"]], {}, "a list of tools is needed; give some of python, "),
        (["shell"], "process", "params.sandbox is process, but takes a mapping; write its settings, such"),
        (["shell"], {"memory": 3}, "params.sandbox: unknown key `memory`; did you mean `memory_mb`?"),
        (["shell"], {"substrate": "bwrap"}, "`substrate` is 'bwrap', but must be one of auto, bubblewrap,"),
    ],
)
def test_parameters_that_cannot_be_are_told_as_the_recipe_has_them(tools, sandbox, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        Tools(tools, sandbox)


def test_a_deterministic_tool_is_one_that_there_is():
    with pytest.raises(ConfigError, match="deterministic names nosuch"):
        Tools(["shell"], {"deterministic": ["nosuch"]})


def test_homes_of_another_pid_namespace_are_not_taken_for_left(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mine = process_name()
    place, uid, pid, started = mine.split("-")
    kept = [mine, f"{'0' * 8}-{uid}-{pid}-1", f"{place}-{int(uid) + 1}-{pid}-1"]
    left = [f"{place}-{uid}-{pid}-{int(started) + 1}", f"{place}-{uid}-{1 << 22}-1"]
    for name in kept + left:
        (tmp_path / f"opd-sandboxes-{name}-abc").mkdir()
    _remove_left()
    assert {path.name for path in tmp_path.iterdir()} == {f"opd-sandboxes-{name}-abc" for name in kept}


def test_commands_at_the_same_time_are_users_of_their_own(tmp_path, monkeypatch):
    """Of ids that no other process of this machine takes meanwhile."""
    monkeypatch.setattr(isolation, "_FIRST_USER", 10_000_000 + os.getpid())
    monkeypatch.setattr(isolation, "_USERS", 50)
    with contextlib.ExitStack() as stack:
        users = [stack.enter_context(own_user(tmp_path)) for _ in range(50)]
        assert len(set(users)) == 50
        with pytest.raises(SandboxError, match="no more can"):
            stack.enter_context(own_user(tmp_path))
    with own_user(tmp_path) as again:
        assert again == users[0]


@pytest.mark.slow
def test_a_replay_that_is_asked_twice_to_stop_ends_its_command_and_says_so(tmp_path):
    mark = f"opd-replay-{os.getpid()}"
    logged(tmp_path / "log", ("/bin/sh", "-c", f"sleep 1000; : {mark}"), seconds=3600.0)
    command = [sys.executable, "-m", "opd.pipelines.cli", "trajectory", "replay", str(tmp_path / "log")]
    place = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [*command, "--episode", "e", "--quotas"], stderr=subprocess.PIPE, text=True, env=place
    )
    try:
        while not running(mark):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=120)[1]
    finally:
        process.kill()
    told = without_waiting(said).splitlines()
    assert (process.returncode, told) == (143, ["opd: asked to stop, and did"])
    assert gone(mark)
    assert not list(tmp_path.glob("opd-replay-*"))


def test_a_damaged_log_beside_a_whole_one_is_said(tmp_path, ends):
    for stage in ("a", "merge"):
        with TrajectoryLog(tmp_path / "stages" / stage / "episodes") as log:
            log.begin_episode("e/0", {})
    (file,) = (tmp_path / "stages" / "a" / "episodes").glob("*.wal")
    data = bytearray(file.read_bytes())
    data[data.rindex(b"e/0")] ^= 1
    file.write_bytes(data)
    assert "DAMAGED" in ends(2, ["trajectory", "show", str(tmp_path)]).out
