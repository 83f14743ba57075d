"""The job script and manifest of `examples/clusters`: by the tools that read them, and on a real Slurm."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml
from recipes import write_recipe
from safetensors.torch import load_file

from opd.config.load import load_recipe
from opd.config.train import RayLaunch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "clusters" / "slurm.sbatch"
MANIFEST = ROOT / "examples" / "clusters" / "kuberay.yaml"
KUBERNETES = "1.33"
STUB = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >> "$CALLS"
case $(basename "$0") in
  scontrol) [ "$1" != show ] || echo first ;;
  srun) shift; for rank in 0 1; do SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NTASKS=2 "$@"; done ;;
  opd) echo "rank $RANK $LOCAL_RANK of $WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT" >> "$CALLS"
    exit "$STATUS" ;;
esac
"""


@pytest.mark.check
def test_the_script_is_right_to_who_checks_scripts():
    checker = Path(sys.executable).with_name("shellcheck")
    subprocess.run([checker if checker.exists() else "shellcheck", SCRIPT], check=True)


@pytest.mark.parametrize(("status", "begun"), [(0, False), (143, True), (2, True)])
def test_ranks_are_told_where_they_are_and_only_a_stop_is_queued_again(tmp_path, status, begun):
    programs, calls, run = tmp_path / "bin", tmp_path / "calls", tmp_path / "a run"
    programs.mkdir()
    for name in ("srun", "scontrol", "opd"):
        (programs / name).write_text(STUB)
        (programs / name).chmod(0o755)
    run.mkdir()
    if begun:
        (run / "config.json").write_text("{}")
    told = {"SLURM_JOB_ID": "712", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_SUBMIT_DIR": str(tmp_path)}
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "CALLS": str(calls), "STATUS": str(status)}
    environment |= told | {"OPD": str(programs / "opd")}
    words = ["bash", SCRIPT, "recipe.yaml", run, "--seed", "two words"]
    assert subprocess.run(words, env=environment, timeout=60).returncode == status
    said = calls.read_text().splitlines()
    resume = " --resume" if begun else ""
    assert f"opd run recipe.yaml --out {run}{resume} --seed two words" in said
    assert "rank 0 0 of 2 at first:20712" in said
    assert ("scontrol requeue 712" in said) == (status == 143)


def test_a_program_that_is_not_there_is_said_before_anything_is_started(tmp_path):
    told = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_SUBMIT_DIR": str(tmp_path)}
    words = ["bash", str(SCRIPT), "recipe.yaml", "run"]
    ended = subprocess.run(words, env=told | {"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "OPD=/path/to/opd" in ended.stderr


@pytest.mark.check
def test_every_part_of_the_manifest_is_what_kubernetes_knows(tmp_path):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    volume, recipe, job = yaml.safe_load_all(MANIFEST.read_text())
    for part in (volume, recipe):
        kubernetes_validate.validate(part, KUBERNETES, strict=True)
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}}
        kubernetes_validate.validate(pod | {"template": group["template"]}, KUBERNETES, strict=True)
    subprocess.run(["bash", "-n", "-c", job["spec"]["entrypoint"]], check=True)


def test_the_recipe_of_the_manifest_asks_for_the_gpus_that_its_nodes_have(tmp_path):
    _, recipe, job = yaml.safe_load_all(MANIFEST.read_text())
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe["data"]["recipe.yaml"])
    launch = (found := load_recipe([path], [])).launch
    assert isinstance(launch, RayLaunch)
    asked = found.train.ranks * launch.trainer.gpus + launch.engines * launch.engine.gpus
    asked += launch.teachers * launch.teacher.gpus
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert asked <= group["replicas"] * int(limits["nvidia.com/gpu"])
    assert len(found.teachers) == launch.teachers


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


CONFIGURATION = """ClusterName=one
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ctld}
SlurmdPort={d}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/d.pid
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MailProg=/bin/true
SchedulerParameters=requeue_delay=1
NodeName=localhost NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=localhost Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def started(*words: str, log: Path) -> Iterator[None]:
    """A server in the foreground, ended with the block."""
    with log.open("w") as out, subprocess.Popen(words, stdout=out, stderr=out, start_new_session=True) as one:
        try:
            yield
        finally:
            one.terminate()
            try:
                one.wait(20)
            except subprocess.TimeoutExpired:
                one.send_signal(signal.SIGKILL)


@pytest.fixture
def slurm(monkeypatch) -> Iterator[Path]:
    """A Slurm of one node on loopback; its folder."""
    programs = {name: shutil.which(name) for name in ("munged", "slurmctld", "slurmd", "sbatch")}
    if os.getuid() or not all(programs.values()):
        pytest.skip("needs root, and Debian's slurm-wlm and munge")
    folder = Path(f"/tmp/opd-slurm-{os.getpid()}")  # sockets have short names
    folder.mkdir(mode=0o755)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(64))
    (folder / "munge.key").chmod(0o400)
    configuration = folder / "slurm.conf"
    configuration.write_text(CONFIGURATION.format(ctld=free_port(), d=free_port(), folder=folder))
    monkeypatch.setenv("SLURM_CONF", str(configuration))
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for name, *words in (
            ("munged", "--foreground", "--force", f"--socket={folder}/munge.sock", *files),
            ("slurmctld", "-D", "-f", str(configuration)),
            ("slurmd", "-D", "-f", str(configuration), "-N", "localhost"),
        ):
            stack.enter_context(started(programs[name], *words, log=folder / f"{name}.log"))
            time.sleep(1)
        wait(lambda: "idle" in slurm_says("sinfo", "-h", "-o", "%T"), 60)
        yield folder


def slurm_says(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, timeout=60).stdout


def wait(done, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, slurm_says("scontrol", "show", "job")
        time.sleep(0.5)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_job_that_slurm_stops_is_queued_again_and_ends_with_the_same_weights(slurm, tmp_path):
    changes = {"baselines": {"methods": []}, "distill": {"steps": 24, "prompts_per_domain": 8}}
    write_recipe(tmp_path / "recipe.yaml", **changes)
    shape = ["--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0", "--time=60", f"--output={tmp_path}/%j"]
    # Their address of each other: the node has no name that others could look up.
    environment = os.environ | {"OPD": str(Path(sys.executable).with_name("opd")), "MASTER_ADDR": "127.0.0.1"}

    def submit(name: str) -> str:
        words = ["sbatch", "--parsable", *shape, SCRIPT, tmp_path / "recipe.yaml", tmp_path / name]
        return subprocess.run(
            words, env=environment, check=True, capture_output=True, text=True
        ).stdout.strip()

    def state(job: str) -> str:
        return slurm_says("squeue", "-h", "-j", job, "-t", "all", "-o", "%T").strip()

    stopped = submit("stopped")
    wait(lambda: list((tmp_path / "stopped").glob("**/distill/checkpoints/step_*")), 600)
    subprocess.run(["scancel", "--signal=TERM", stopped], check=True)  # what --signal does before time is up
    wait(lambda: state(stopped) in ("COMPLETED", "FAILED"), 900)
    assert state(stopped) == "COMPLETED", (tmp_path / stopped).read_text()
    assert "Requeue" in slurm_says("scontrol", "show", "job", stopped)
    assert "Restarts=1" in slurm_says("scontrol", "show", "job", stopped)
    whole = submit("whole")
    wait(lambda: state(whole) in ("COMPLETED", "FAILED"), 900)
    assert state(whole) == "COMPLETED", (tmp_path / whole).read_text()
    one, other = (
        load_file(tmp_path / name / "merged" / "model.safetensors") for name in ("stopped", "whole")
    )
    assert one.keys() == other.keys()
    assert all((one[key] == other[key]).all() for key in one)
