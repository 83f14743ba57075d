"""Passwords, keys and tokens: in memory they work, in nothing that is written can they be found."""

import contextlib
import html
import io
import json
import logging
import os
import subprocess
import sys
import threading
from base64 import b64encode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recipes import tiny_recipe, write_recipe

from opd import redact as redact_module
from opd.errors import ConfigError, MissingExtraError, OpdError, RunFolderError, StorageError
from opd.output import guard_streams, streams_into
from opd.pipelines.commands.exit_status import one_line
from opd.pipelines.records.run_folder import RunFolder
from opd.redact import HIDDEN, hide_recipe_secrets, hide_secret, redact, redact_json
from opd.served.http_client import _answer_excerpt
from opd.untrusted import safe_excerpt

SIGNS = st.characters(min_codepoint=33, max_codepoint=126)
SECRETS = st.text(SIGNS, min_size=8, max_size=40).filter(
    lambda s: HIDDEN not in s and len(set(s)) > 4 and not s.replace("_", "").isalpha()
)
PLAIN = st.text("abcdefghijklmnopqrstuvwxyzABCDEFGHXYZ0123456789-._~", min_size=12, max_size=40)


@pytest.fixture(autouse=True)
def forgetful(monkeypatch):
    """Each test begins with nothing learned."""
    monkeypatch.setattr(redact_module, "_values", set())
    monkeypatch.setattr(redact_module, "_pattern", None)


@given(secret=PLAIN.filter(lambda s: len(set(s)) > 6), user=st.sampled_from(["bob", "", "a.b"]))
def test_a_secret_is_told_by_its_form(secret, user):
    for text in (
        f"https://{user}:{secret}@host:80/path is away",
        f"s3://{secret}@bucket/x",
        f'{{"url": "postgres://{user}:{secret}@h/db"}}',
        f"GET http://h/x?api_key={secret}&y=1 failed",
        f"http://h/x?a=1&X-Amz-Signature={secret}",
        f"Authorization: Bearer {secret}",
        f"{{'authorization': 'Basic {secret}'}}",
        f"x-api-key: {secret}",
        f"the server said: bearer {secret}",
        f'{{\\"x-api-key\\": \\"{secret}\\"}}',
    ):
        found = redact(text)
        assert secret not in found, text
        assert HIDDEN in found
        assert redact(found) == found


@pytest.mark.parametrize(
    "key",
    ["hf_" + "aB3" * 11, "ghp_" + "aB3" * 12, "github_pat_" + "aB3_" * 12, "glpat-" + "aB3-" * 5,
     "sk-proj-" + "aB3_" * 8, "xoxb-1234567890-aB3", "AKIA" + "B3" * 8,
     "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIx.aB3-_"],
)  # fmt: skip
def test_a_key_of_a_well_known_service_is_told_by_its_form(key):
    assert redact(f"params: {key}, and more") == f"params: {HIDDEN}, and more"


@pytest.mark.some(18)
@pytest.mark.parametrize(
    "part",
    ["a", "token", "?token", "://", "authorization ", "x-api-key: ", "bearer ", "eyJ", "eyJ-", "sk-", "xoxb-",
     " ", "\\", "?a=", "@", "://@", "x:", ";sig"],
)  # fmt: skip
@pytest.mark.parametrize("start", ["://", "?token", "authorization", "x-api-key:", "bearer "])
def test_a_text_of_any_length_is_searched_in_a_moment(start, part):
    """What others wrote is printed too. A search of quadratic time would last an hour here."""
    redact(f"://{start}" + part * (300_000 // len(part)))


@given(secret=SECRETS)
def test_a_known_secret_is_found_in_whatever_encoding(secret):
    hide_secret(secret)
    for written in (secret, quote(secret), quote(secret, safe=""), html.escape(secret), repr(secret),
                    json.dumps(secret), json.dumps({"a": [secret]})):  # fmt: skip
        found = redact(f"it said {written}!")
        assert secret not in found
        assert redact(found) == found
    basic = b64encode(secret.encode()).decode()  # as a header has it
    assert basic not in redact(f"I got {basic}.")


def test_nothing_is_left_of_a_secret_that_begins_as_another():
    for secret in ("correct-horse", "correct-horse-battery"):
        hide_secret(secret)
    assert redact("correct-horse-battery, correct-horse") == f"{HIDDEN}, {HIDDEN}"


@given(secret=SECRETS.filter(lambda s: "?" not in s), user=st.sampled_from(["bob", "a.b"]))
def test_the_password_of_a_url_in_a_recipe_is_learned_however_it_is_written(secret, user):
    """Also with `/`, `@` or `#` in it, which a URL must not have."""
    hide_recipe_secrets({"storage": {"published": f"sftp://{user}:{secret}@host/x"}})
    assert secret not in redact(f"cannot log in with {secret}, sorry")
    url = f"sftp://{user}:{secret}@host/x"
    assert secret not in json.dumps(redact_json({"a": [url, secret], url: 1}))


def test_a_secret_in_a_variable_that_a_recipe_names_is_learned(monkeypatch):
    monkeypatch.setenv("OWN_ENDPOINT_WORD", "correct-horse")
    hide_recipe_secrets({"teachers": [{"api_key_env": "OWN_ENDPOINT_WORD"}]})
    assert redact("correct-horse of OWN_ENDPOINT_WORD") == f"{HIDDEN} of OWN_ENDPOINT_WORD"


def test_the_password_of_a_url_within_a_text_of_a_recipe_is_learned():
    hide_recipe_secrets({"stop": ["see https://bob:correct-horse@host/x and ftp://a:p%40ss-word@h"]})
    assert redact("correct-horse, p@ss-word") == f"{HIDDEN}, {HIDDEN}"


@pytest.mark.parametrize(
    "text",
    ["s3://bucket/a@b/c", "http://127.0.0.1:30000/generate answered 500", "4 tokens and 3 keys",
     "pad_token: <pad>", "max_new_tokens=5", "/home/a@b/c", "user@host: no secret", "sha256 0123456789abcdef",
     "key = value", "x: ***"],
)  # fmt: skip
def test_what_is_no_secret_stays(text):
    assert redact(text) == text


def test_what_a_model_has_written_hides_no_word_elsewhere():
    written = {"answers": ["http://bob:accuracy@host/x"], "accuracy": "accuracy"}
    assert redact_json(written) == {"answers": [f"http://{HIDDEN}@host/x"], "accuracy": "accuracy"}
    assert redact_json(written) == redact_json(redact_json(written))


@pytest.mark.parametrize("word", ["accuracy", "student_tokens", "merged", "PASSWORD", "Specialist"])
def test_a_word_for_a_secret_changes_no_other_word(word):
    """Of the environment, or of a URL: there its form gives it away."""
    hide_secret(word)
    hide_recipe_secrets({"url": f"https://bob:{word}@host/x"})
    results = {"accuracy": 0.5, "kind": "merged", word: [f"the {word} of"]}
    assert redact_json(results) == results
    assert redact(f"https://bob:{word}@host/x?token={word}") == f"https://{HIDDEN}@host/x?token={HIDDEN}"


def test_no_key_of_a_result_becomes_another():
    """Whatever is secret: who reads the results asks for them by name."""
    hide_secret("specialist:math-v1")
    hide_secret("prompts_per_domain")
    found = redact_json({"specialist:math-v1": {"prompts_per_domain": "specialist:math-v1"}})
    assert found == {"specialist:math-v1": {"prompts_per_domain": HIDDEN}}


def test_fields_that_name_a_secret_are_hidden_and_others_are_not():
    found = redact_json(
        {"api_key": "x", "secret_access_key": "y", "api_key_env": "KEY", "eos_token": "</s>", "n": 1,
         "token": "z", "hf_token": "z", "pwd": "z", "aggregation": "token"}
    )  # fmt: skip
    assert found == {
        "api_key": HIDDEN, "secret_access_key": HIDDEN, "api_key_env": "KEY", "eos_token": "</s>", "n": 1,
        "token": HIDDEN, "hf_token": HIDDEN, "pwd": HIDDEN, "aggregation": "token",
    }  # fmt: skip


@pytest.mark.parametrize("kind", [OpdError, StorageError, RunFolderError])
def test_an_error_holds_no_secret_wherever_it_is_written(kind):
    error = kind("ftp://bob:hunter2-hunter2@host/x cannot be read")
    assert str(error) == f"ftp://{HIDDEN}@host/x cannot be read"
    assert "hunter2" not in str(MissingExtraError("ftp://bob:hunter2-hunter2@host", "s3"))


@pytest.mark.parametrize("at", range(40, 110, 3))
def test_a_secret_is_hidden_before_a_text_is_cut(at):
    hide_secret("0123456789abcdef" * 4)
    for cut in (
        safe_excerpt,
        lambda text: one_line(text + "x" * 5000),
        lambda text: _answer_excerpt(text.encode()),
    ):
        found = cut("x" * at + "0123456789abcdef" * 4 + " is not known")
        assert "0123" not in found
    assert "0123" not in one_line("x" * (600 - at) + "0123456789abcdef" * 4 + "x" * 5000)
    assert "0123" not in _answer_excerpt(b"x" * (300 - at) + b"0123456789abcdef" * 4)
    assert "0123" not in _answer_excerpt(b"0123456789abcdef" * 4 * 2000)


def test_passwords_of_urls_in_the_environment_are_known(tmp_path):
    """Of a proxy, say: libraries put it into their errors in forms of their own."""
    program = (
        "from opd.redact import redact; print(redact('correct-horse deploy.example deployer p@ss-word'))"
    )
    environment = {"HTTPS_PROXY": "http://bob:correct-horse@proxy", "MIRROR": "ssh://deployer@deploy.example",
                   "DB": "postgres://u:p%40ss-word@h/db"}  # fmt: skip
    said = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | environment, capture_output=True, text=True
    )
    assert said.stdout == f"{HIDDEN} deploy.example deployer {HIDDEN}\n"


def test_loggers_that_were_there_first_write_no_secret(capsys):
    """Those of libraries keep the stream of the process that imported them."""
    logger, said = logging.getLogger("early"), io.StringIO()
    handler = logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    hide_secret("correct-horse-battery")
    with streams_of_its_own():
        guard_streams()
        logger.warning("first correct-horse-battery")
        with streams_into(said):
            logger.warning("second correct-horse-battery")
        logger.warning("third")
    logger.removeHandler(handler)
    assert capsys.readouterr().err == f"first {HIDDEN}\nthird\n"
    assert said.getvalue() == f"second {HIDDEN}\n"


@contextlib.contextmanager
def streams_of_its_own():
    """The streams of the block are its own."""
    with contextlib.redirect_stdout(sys.stdout), contextlib.redirect_stderr(sys.stderr):
        yield


def recipe_with(password: str, host: str = "host"):
    return tiny_recipe(storage={"published": f"sftp://bob:{password}@{host}/models"})


def test_a_run_folder_holds_no_password_and_resumes_with_another(tmp_path):
    first = recipe_with("correct-horse-battery")
    with RunFolder.create(tmp_path / "run", first) as folder:
        folder.mark_done("base", {"settings": {"url": first.storage.published}})
        folder.write_results({"name": first.storage.published}, [])
    written = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert b"correct-horse" not in written
    assert b"sftp://***@host/models" in written
    assert first.storage.published == "sftp://bob:correct-horse-battery@host/models"
    for password in ("correct-horse-battery", "another-password"):
        RunFolder.resume(tmp_path / "run", recipe_with(password)).close()
    with pytest.raises(RunFolderError, match=r"was started with storage\.published") as caught:
        RunFolder.resume(tmp_path / "run", recipe_with("another-password", "elsewhere"))
    assert "password" not in str(caught.value)


def command(tmp_path: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    return subprocess.run(
        [sys.executable, "-m", "opd.pipelines.cli", *words],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
    )


def leaks(secret: str, folder: Path, said: subprocess.CompletedProcess[str]) -> list[str]:
    """Where `secret` can be read: files below `folder`, and what the command printed."""
    found = [
        str(path)
        for path in folder.rglob("*")
        if path.is_file() and (secret.encode() in path.read_bytes() or secret in path.name)
    ]
    return found + [name for name in ("stdout", "stderr") if secret in getattr(said, name)]


SMALL = {
    "base": {"steps": 30, "batch_size": 16},
    "specialist": {"steps": 1, "prompts_per_step": 8, "group_size": 4, "checkpoint_every": 1},
    "distill": {"steps": 1, "prompts_per_domain": 2},
    "baselines": {"methods": []},
    "evaluation": {"prompts_per_domain": 4, "every": 1, "curve_prompts": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_a_whole_run_writes_no_secret(tmp_path, fails):
    """A URL with a password among its settings, and a reward that prints the key of its service."""
    password, token = "correct-horse-battery", "tok-0123456789abcdef"
    domain = {"source": "procedural:sort", "params": {"digits": 3}, "prompts": 200, "reward": "leaky:reward"}
    (tmp_path / "run").mkdir()
    recipe = write_recipe(
        tmp_path / "run" / "recipe.yaml",
        name=f"see https://bob:{password}@host/x",
        domains={"sort": domain},
        runtime={"workers": 2},
        **SMALL,
    )
    os.rename(recipe, tmp_path / "recipe.yaml")
    environment = {"LEAKY_TOKEN": token} | ({"LEAKY_FAILS": "1"} if fails else {})
    said = command(tmp_path, "run", "recipe.yaml", "--out", "run", **environment)
    assert (said.returncode != 0) == fails, said.stderr[-2000:]
    assert not leaks(token, tmp_path / "run", said)
    assert not leaks(password, tmp_path / "run", said)
    assert HIDDEN in said.stderr or HIDDEN in (tmp_path / "run" / "config.json").read_text()
    if not fails:
        assert "***@host/x" in (tmp_path / "run" / "report.html").read_text()


def test_a_key_that_a_server_echoes_is_not_shown(tmp_path, monkeypatch):
    pytest.importorskip("aiohttp")
    key, password = "key-0123456789abcdef", "correct-horse-battery"

    class Echo(BaseHTTPRequestHandler):
        def answer(self) -> None:
            said = f"I do not know {self.headers['Authorization']} of {self.path}".encode()
            self.send_response(403)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        do_POST = answer  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        import asyncio

        from opd.errors import TeacherError
        from opd.served.http_client import PoolOptions
        from opd.served.http_pool import HTTPPool

        monkeypatch.setenv("MY_SERVERS", key)
        where = f"127.0.0.1:{server.server_port}"

        async def ask(url: str, variable: str | None) -> None:
            pool = HTTPPool("teacher math", PoolOptions([url], variable), TeacherError)
            try:
                await pool.post_json("/generate", {}, 1, lambda answer: answer, 2**20)
            finally:
                await pool.close()

        with pytest.raises(TeacherError, match=r"I do not know Bearer \*\*\*") as caught:
            asyncio.run(ask(f"http://{where}", "MY_SERVERS"))
        assert key not in str(caught.value)
        url = f"http://bob:{password}@{where}"
        hide_recipe_secrets({"urls": [url]})
        with pytest.raises(TeacherError, match=r"http://\*\*\*@127") as caught:
            asyncio.run(ask(url, None))
        assert password not in str(caught.value)
        with pytest.raises(ConfigError, match="both a password in a URL and api_key_env") as caught:
            asyncio.run(ask(url, "MY_SERVERS"))
        assert password not in str(caught.value)
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
def test_a_dry_run_and_a_wrong_recipe_print_no_password(tmp_path):
    password = "correct/horse@battery"
    write_recipe(tmp_path / "recipe.yaml", storage={"published": f"sftp://bob:{password}@host/x"})
    for words in (["--dry-run"], ["--dry-run", "--storage.published.x", "1"], ["--dry-run", "--seed", "x"]):
        said = command(tmp_path, "run", "recipe.yaml", *words)
        assert password not in said.stdout + said.stderr
        assert (said.returncode == 0) == (words == ["--dry-run"])
