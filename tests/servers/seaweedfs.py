"""A real S3 server on localhost: SeaweedFS, started for one test session and stopped at its end."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KEY, SECRET, BUCKET = "tester", "tester-secret", "models"


@dataclass(frozen=True)
class S3Server:
    """Where a running server listens."""

    host: str
    port: int
    folder: Path

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.port}"


def weed() -> str | None:
    """The server's program, beside the interpreter or on the path."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


def aws_environment(endpoint: str, key: str = KEY, secret: str = SECRET) -> dict[str, str]:
    """The variables that lead a client to `endpoint`, and to nothing else of this machine."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


class TakenPortError(Exception):
    """Another program was faster to take a port that was free."""


@contextlib.contextmanager
def seaweedfs(folder: Path) -> Iterator[S3Server]:
    """Run a server with its data in `folder`; the bucket `models` is made by the first write."""
    with contextlib.ExitStack() as stack:
        for attempt in range(10):
            with contextlib.suppress(TakenPortError):
                server = stack.enter_context(_running(folder / str(attempt)))
                break
        else:
            raise RuntimeError(f"the S3 server found no free ports: see {folder}")
        yield server


@contextlib.contextmanager
def _running(folder: Path) -> Iterator[S3Server]:
    program = weed()
    if program is None:
        raise FileNotFoundError("weed")
    folder.mkdir(parents=True, exist_ok=True)
    identity = {
        "name": KEY,
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    ports = free_ports(4)
    command = [program, f"-logdir={folder}", "server", f"-dir={folder}"]
    command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += ["-filer", "-s3", f"-s3.config={folder / 's3.json'}", "-master.volumeSizeLimitMB=1024"]
    command += ["-volume.max=12", "-volume.preStopSeconds=0", "-s3.iam=false"]
    # Two more services of a fixed port each, on which a second server on this machine would fail.
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += ["-master.peers=none", "-master.telemetry=false"]
    for name, (port, grpc) in zip(("master", "volume", "filer", "s3"), ports, strict=True):
        command += [f"-{name}.port={port}", f"-{name}.port.grpc={grpc}"]
    with (folder / "weed.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        server = S3Server("127.0.0.1", ports[3][0], folder)
        _wait_until_ready(server, process)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(1)
        except subprocess.TimeoutExpired:  # it waits ten seconds for clients that keep a connection
            process.kill()
            process.wait()
        for name, (port, grpc) in zip(("master", "volume", "filer", "s3"), ports, strict=True):
            for socket_file in (f"seaweedfs-{name}-{port}.sock", f"seaweedfs-{name}-grpc-{grpc}.sock"):
                Path("/tmp", socket_file).unlink(missing_ok=True)


_held: list[socket.socket] = []


def absent_port() -> int:
    """A port that nobody listens on, and nobody takes while this process runs."""
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    _held.append(held)
    return held.getsockname()[1]


def free_ports(count: int) -> list[tuple[int, int]]:
    """Pairs of ports nobody listens on now."""
    sockets = [socket.socket() for _ in range(2 * count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
    return list(zip(ports[::2], ports[1::2], strict=True))


def _wait_until_ready(server: S3Server, process: subprocess.Popen) -> None:
    """Until the server takes a write: its parts come up one after another."""
    import botocore.session
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    config = Config(
        connect_timeout=1, read_timeout=5, retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}
    )
    client = botocore.session.Session().create_client(
        "s3",
        region_name="us-east-1",
        endpoint_url=server.endpoint,
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        config=config,
    )
    deadline = time.monotonic() + 60
    while True:
        try:
            with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou):
                client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="ready", Body=b"ready")
            client.close()
            return
        except (BotoCoreError, ClientError) as error:
            if process.poll() is not None or time.monotonic() > deadline:
                log = (server.folder / "weed.log").read_text(errors="replace")
                if "address already in use" in log:
                    raise TakenPortError from None
                log = log[-2000:]
                raise RuntimeError(f"the S3 server did not start ({error}): {log}") from error
            time.sleep(0.1)
