"""A server as small as can be, for those who start and end servers: it takes the arguments of SGLang's.

It answers 200 to everything, but nothing for its scheduler while a file `hung` is beside it. It holds a
semaphore's worth of shared memory and a folder of hidden states, and has a child of its own, in a session of
its own. `--fail-once FILE` ends it at its first start, `--slow SECONDS` makes it ready late.
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


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        while self.path == "/server_info" and Path(pids, "hung").exists():
            time.sleep(0.02)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


pids = "/nothing/there"


def main() -> None:
    global pids
    options = argparse.ArgumentParser()
    for name in ("--model-path", "--host", "--pids", "--fail-once"):
        options.add_argument(name)
    options.add_argument("--port", type=int)
    options.add_argument("--slow", type=float, default=0.0)
    options.add_argument("--enable-return-hidden-states", action="store_true")
    options.add_argument("--enable-memory-saver", action="store_true")
    options.add_argument("--chunked-prefill-size", type=int)
    told = options.parse_args()
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
        Path(told.pids, str(told.port)).write_text(f"{os.getpid()} {child.pid} {shared.name.lstrip('/')}")
    http.server.ThreadingHTTPServer((told.host, told.port), Answer).serve_forever()


main()
