"""A server as small as can be, for those who start and end servers: it takes the arguments of SGLang's, or
those of vLLM's, whose questions it then knows.

It answers 200 to everything, but nothing for its scheduler while a file `hung` is beside it, and it is idle
when it was asked twice. As vLLM it has some pages in the developers' mode alone, and writes or pools. Told a
key, it answers 401 without it to all but who asks whether it is ready. Asked to release what it has not, or
to take what it has, it ends. It holds a semaphore's worth of shared memory and a folder of hidden states, and
has a child of its own, in a session of its own. `--fail-once FILE` ends it at its first start, `--slow
SECONDS` makes it ready late.
"""

import argparse
import http.server
import os
import signal
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path


def has(path: str) -> bool:
    """Whether there is such a page."""
    if path == "/is_sleeping":
        return os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
    return path != ("/v1/completions" if pools else "/pooling")


def wait(path: str) -> None:
    """While what would have to answer hangs."""
    own = ("/is_sleeping", "/v1/completions", "/pooling") if vllm else ("/server_info",)
    while path in own and has(path) and Path(pids, "hung").exists():
        time.sleep(0.02)


class Answer(http.server.BaseHTTPRequestHandler):
    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        if not key or self.path == "/health" or self.headers["Authorization"] == f"Bearer {key}":
            return True
        self.send_error(401)
        return False

    def do_GET(self) -> None:
        wait(self.path)
        self.send_response(200 if has(self.path) else 404)
        self.end_headers()
        self.wfile.write(b"{}")

    def do_POST(self) -> None:
        global asleep, flushes
        self.rfile.read(int(self.headers["Content-Length"]))
        wait(self.path)
        verb, status = self.path[1:], 200 if has(self.path) else 404
        with Path(pids, "told").open("a") as told:
            told.write(f"{self.server.server_address[1]} {verb}\n")
        if verb == "flush_cache":
            flushes += 1
            status = 400 if flushes % 2 else 200
        if verb.endswith("memory_occupation"):
            if asleep == verb.startswith("release"):
                os._exit(4)
            asleep = not asleep
        self.send_response(status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


asleep, flushes = False, 0
pids, key = "/nothing/there", ""
vllm = pools = False


def main() -> None:
    global key, pids, pools, vllm
    options = argparse.ArgumentParser()
    for name in ("--model-path", "--model", "--host", "--pids", "--fail-once", "--seed", "--runner"):
        options.add_argument(name)
    for name in ("--config", "--middleware", "--max-logprobs"):
        options.add_argument(name)
    options.add_argument("--port", type=int)
    options.add_argument("--slow", type=float, default=0.0)
    options.add_argument("--enable-return-hidden-states", action="store_true")
    options.add_argument("--enable-memory-saver", action="store_true")
    options.add_argument("--enable-weights-cpu-backup", action="store_true")
    options.add_argument("--chunked-prefill-size", type=int)
    told = options.parse_args()
    if told.config:
        key = Path(told.config).read_text().removeprefix("api-key: ").strip()
    elif told.middleware:
        key = os.environ["OPD_SERVER_KEY"]
    vllm, pools = told.model is not None, told.runner == "pooling"
    if told.fail_once and not Path(told.fail_once).exists():
        Path(told.fail_once).touch()
        print("the model is too large", flush=True)
        sys.exit(3)
    time.sleep(told.slow)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the worst of servers
    shared = SharedMemory(create=True, size=4096)
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    hidden = Path(os.environ["OPD_HIDDEN_FOLDER"])
    hidden.mkdir()
    (hidden / "segment").touch()
    if told.pids:
        pids = told.pids
        Path(told.pids, f"hidden-{told.port}").write_text(str(hidden))
        Path(told.pids, "arguments").write_text(" ".join(sys.argv[1:]))
        whole = Path(told.pids, f"new-{told.port}")  # who waits for the file reads it at once
        whole.write_text(f"{os.getpid()} {child.pid} {shared.name.lstrip('/')}")
        whole.replace(Path(told.pids, str(told.port)))
    http.server.ThreadingHTTPServer((told.host, told.port), Answer).serve_forever()


main()
