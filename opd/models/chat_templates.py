"""Chat templates are programs that come with models: they run in a process of their own, within limits.

transformers' sandbox keeps them from Python's objects, not from looping for hours or filling the memory. The
process has no secrets in its environment, so many seconds of processor time a conversation, and so much
memory; one serves all conversations of the process that asks, and ends with it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECONDS, MEMORY, LONGEST = 5, 1 << 30, 1 << 24
"""Of processor time a conversation; bytes beside what the process takes at rest; bytes of what is written."""
MOST_TEMPLATE = 1 << 20
"""Characters of a template; those of today's models have 500 to 20,000."""
_PASSED = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR")
_ENDLESS = (
    f"the chat template took more than {SECONDS} s of processor time or {MEMORY >> 20} MiB of memory, or"
    f" wrote more than {LONGEST >> 20} MiB"
)
_LENGTH = struct.Struct("<Q")


class TemplateError(Exception):
    """A chat template raised, ran too long, or wrote too much; the text says which."""


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
    *,
    answer: bool = False,
    day: str | None = None,
) -> str:
    """`messages` as the chat template of `tokenizer` writes them, as `apply_chat_template` would.

    Args:
        arguments: Of the template's own.
        answer: Whether it goes on to where the assistant's answer begins.
        day: In place of the current time for a template that asks for it, `2020-01-01`.

    Raises `TemplateError`.
    """
    return _ask(tokenizer, messages, {**arguments, "add_generation_prompt": answer}, day=day)[0]


def render_marked(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> tuple[str, list[tuple[int, int]]]:
    """`render`, and where in it stand the parts that the template puts between `{% generation %}` and
    `{% endgeneration %}`: the first character of each and the one after its last.

    Raises `TemplateError`.
    """
    return _ask(tokenizer, messages, arguments, marked=True)


def _ask(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
    *,
    day: str | None = None,
    marked: bool = False,
) -> tuple[str, list[tuple[int, int]]]:
    template: Any = tokenizer.chat_template
    if not template:
        raise TemplateError("the tokenizer has no chat template")
    if len(str(template)) > MOST_TEMPLATE:
        raise TemplateError(f"the chat template has more than {MOST_TEMPLATE} characters")
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return _renderer().render(
        {
            "template": template,
            "special": special,
            "messages": list(messages),
            "arguments": dict(arguments),
            "marked": marked,
            "day": day,
            "seconds": SECONDS,
        }
    )


class _Renderer:
    """The process that renders, started at the first conversation and again after one that ended it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._endless: list[Any] = []
        """Templates that ended it: they are not waited for again."""

    def render(self, request: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        from opd.foreign import decoding, read_document, shown  # which the process that renders may not find

        data = json.dumps(request).encode()
        with self._lock:
            if request["template"] in self._endless:
                raise TemplateError(_ENDLESS)
            process = self._process or self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            answer = None
            with contextlib.suppress(BrokenPipeError):
                _send(process.stdin, data)
                answer = _received(process.stdout, LONGEST)
            if answer is None:
                self._end()
                self._endless.append(request["template"])
                raise TemplateError(_ENDLESS)
        with decoding(lambda cause: TemplateError(f"the chat template's process answered with {cause}")):
            said = read_document(answer, LONGEST)
            text, error = said.get("text"), shown(said.get("error"), 500)
            if not isinstance(text, str):
                raise TemplateError(f"the chat template raised {error}")
            return text, [(int(start), int(end)) for start, end in said.get("marks", ())]

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {name: os.environ[name] for name in _PASSED if name in os.environ}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            # -P: the modules beside this file are not the libraries of their names.
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the process that asks
        )
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    assert pipe is not None
                    pipe.close()
            process.wait()

    def close(self) -> None:
        if self.owner == os.getpid():  # a forked process ends nothing of its parent's
            self._end()


_shared: _Renderer | None = None
_making = threading.Lock()


def _renderer() -> _Renderer:
    """This process's own: a forked one does not share pipes with its parent."""
    global _shared
    with _making:
        if _shared is None or _shared.owner != os.getpid():
            _shared = _Renderer()
            atexit.register(_shared.close)
        return _shared


def _send(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def _received(pipe: IO[bytes], most: int) -> bytes | None:
    """The next message; `None` at the end, or where it is longer than `most` bytes."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size or _LENGTH.unpack(head)[0] > most:
        return None
    size = _LENGTH.unpack(head)[0]
    data = pipe.read(size)
    return data if len(data) == size else None


def _serve() -> None:
    """Render what comes on the standard input until it ends; the rest of the file is who asks."""
    import resource
    import signal
    from datetime import datetime
    from functools import partial
    from types import SimpleNamespace

    from transformers import PreTrainedTokenizerBase
    from transformers.utils import chat_template_utils

    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    taken = pages * resource.getpagesize() + MEMORY
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken if soft < 0 else min(soft, taken), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    clock = SimpleNamespace(now=datetime.now)
    chat_template_utils.datetime = clock  # pyright: ignore[reportPrivateImportUsage]
    while (request := _received(requests, 1 << 40)) is not None:
        asked = json.loads(request)
        day = asked["day"]
        clock.now = datetime.now if day is None else partial(datetime.fromisoformat, day)
        stand_in: Any = SimpleNamespace(chat_template=asked["template"], special_tokens_map=asked["special"])
        stand_in.get_chat_template = partial(PreTrainedTokenizerBase.get_chat_template, stand_in)
        # Nothing answers this signal: it ends the process, in the middle of whatever a library computes.
        signal.setitimer(signal.ITIMER_PROF, asked["seconds"])
        try:
            marks: list[Any] = []
            if asked["marked"]:
                chosen = stand_in.get_chat_template(None, asked["arguments"].get("tools"))
                said = [{k: v for k, v in m.items() if v is not None} for m in asked["messages"]]
                texts, found = chat_template_utils.render_jinja_template(
                    conversations=[said],
                    chat_template=chosen,
                    return_assistant_tokens_mask=True,
                    **{**asked["special"], **asked["arguments"]},
                )
                text, marks = texts[0], list(found[0])
            else:
                text = PreTrainedTokenizerBase.apply_chat_template(
                    stand_in,  # pyright: ignore[reportArgumentType]
                    asked["messages"],
                    tokenize=False,
                    **asked["arguments"],
                )
            answer = json.dumps({"text": str(text), "marks": marks})
        except MemoryError:
            answer = json.dumps({"error": f"a MemoryError: it may take {MEMORY >> 20} MiB"})
        except Exception as error:  # a template raises what it likes
            answer = json.dumps({"error": f"{type(error).__name__}: {str(error)[:400]}"})
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(answers, answer.encode())


if __name__ == "__main__":
    _serve()
