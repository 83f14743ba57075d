"""A little server with a real model, as a run starts its servers: it takes the arguments of SGLang's, or of
vLLM's, whose dialect it then speaks. `--seconds` is the time between two tokens. `--notes FOLDER` gets its
process id (`PORT.pid`) and all weights that it was ever said to have (`VERSION.DIGEST.safetensors`).
"""

import argparse
import os
import threading
from pathlib import Path
from typing import Any

from little_models import LittleServer, LittleSGLang, LittleVLLM
from safetensors.torch import save_file

from opd.rollout.served_workers import READING


def launched(kind: type[LittleServer], notes: Path | None) -> type[LittleServer]:
    """That kind, which says whether it is ready, too."""

    class Launched(kind):
        def answer(self, path: str, body: dict[str, Any]) -> Any:
            if path in ("/health", "/is_sleeping"):
                return {}
            before, found = self.version, super().answer(path, body)
            if notes is not None and self.version != before and not self.version.endswith(READING):
                self.note()
            return found

        def note(self) -> None:
            """Keep the weights."""
            assert notes is not None
            place = notes / f"{self.version}.{self.model.quick_digest()[:16]}.safetensors"
            if not place.exists():
                new = notes / f".{place.name}-{self.port}"
                save_file({key: one.clone() for key, one in self.model.weights()}, new)
                new.replace(place)

    return Launched


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--model-path", type=Path)
    options.add_argument("--model", type=Path)
    options.add_argument("--host")
    options.add_argument("--port", type=int)
    options.add_argument("--runner")
    options.add_argument("--seconds", type=float, default=0.0)
    options.add_argument("--notes", type=Path)
    told, _ = options.parse_known_args()
    made = launched(LittleSGLang if told.model is None else LittleVLLM, told.notes)
    made.host = told.host
    server = made(told.model_path or told.model, told.port)
    server.seconds = told.seconds
    if isinstance(server, LittleVLLM):
        server.pools = told.runner == "pooling"
    if told.notes is not None:
        (told.notes / f"{told.port}.pid").write_text(str(os.getpid()))
    threading.Event().wait()


if __name__ == "__main__":
    main()
