"""A little server of SGLang with a real model, as a run starts its servers: it takes their arguments."""

import argparse
import threading
from pathlib import Path
from typing import Any

from little_models import LittleSGLang


class Launched(LittleSGLang):
    """It says whether it is ready, too."""

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        return {} if path == "/health" else super().answer(path, body)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--model-path", type=Path)
    options.add_argument("--host")
    options.add_argument("--port", type=int)
    told, _ = options.parse_known_args()
    Launched.host = told.host
    Launched(told.model_path, told.port)
    threading.Event().wait()


if __name__ == "__main__":
    main()
