"""Keep secrets out of all output: errors, logs, run folders, reports, model cards.

A secret is known by its form (the part of a URL before `@`, parameters and headers with telling names) or by
its value (those of the environment and those that the program has used, if they are more than a word). Values
in memory stay as they are.
"""

from __future__ import annotations

import base64
import html
import json
import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote

HIDDEN = "***"

_LEAST = 6
"""Least characters of a secret. Shorter values occur in ordinary words, so only their form shows them."""
_WORD = re.compile(r"(?:[a-z_]+|[A-Z_]+|[A-Z][a-z]+)\Z")
_LONG_WORD = 16
"""Least characters of a secret of letters alone. A shorter one (`accuracy`) also needs the form of one."""
_NAMED = r"(?:(?:api|access|private)[_-]?key|secret|passw(?:or)?d|passphrase|token|signature|credential)"
_ENVIRONMENT = re.compile(rf"(?:{_NAMED}|_key|_pwd|_pat)(?:_id)?s?$", re.IGNORECASE)
_FIELD = re.compile(
    r"(?:.*[_-])?(?:api[_-]?key|secret(?:[_-]?access)?(?:[_-]?key)?|passw(?:or)?d|passphrase|auth[_-]?token"
    r"|(?:access|session|refresh|bearer|bot|id|hf|github|gitlab|slack)[_-]?token|private[_-]?key|pwd|bearer"
    r"|authorization)|token",
    re.IGNORECASE,
)
# Texts of any length and from anybody are searched: none of these looks at a character more than a few times.
_USER = re.compile(r"(://)[^\s/?#\"'<>]*@")
_PARAMETER = re.compile(r"([?&;](?P<name>[^=&?;#\s\"'<>]*+)=)[^&#\s\"'<>]++")
_TELLING = re.compile(rf"{_NAMED}|sig|auth|pwd", re.IGNORECASE)
_HEADER = re.compile(
    r"((?:authorization|x-api-key|api-key|x-amz-security-token)[\\\"']*\s*+[:=]\s*+[\\\"']*)"
    r"(?:(?:bearer|basic|token)\s+)?[^\s\\\"',;}<]+",
    re.IGNORECASE,
)
_FORM = re.compile(
    r"(?<![\w-])(?:hf_[A-Za-z0-9]{30}|gh[a-z]_[A-Za-z0-9]{30}|github_pat_[A-Za-z0-9_]{30}|glpat-[A-Za-z0-9_-]{20}"
    r"|sk-[A-Za-z0-9_-]{20}|xox[a-z]-[A-Za-z0-9-]{10}|A[KS]IA[A-Z0-9]{16}|eyJ[A-Za-z0-9_-]{10,}\.eyJ)[\w.-]*"
)
"""Keys that well-known services give out."""
_BEARER = re.compile(r"\b(bearer\s+)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
_PASSWORD = re.compile(r"://[^\s/?#:@]*:([^\s/?#@]+)@")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")

_values: set[str] = set()
_pattern: re.Pattern[str] | None = None


def hide_secret(secret: str | None) -> None:
    """Never write `secret` from now on, in any encoding."""
    global _pattern
    if not secret or len(secret) < _LEAST or secret in _values:
        return
    if len(secret) < _LONG_WORD and _WORD.match(secret):
        return
    _values.update({secret, quote(secret, safe=""), quote(secret), html.escape(secret), unquote(secret)})
    _values.update({json.dumps(secret)[1:-1], repr(secret)[1:-1]})
    _values.add(html.escape(secret).replace("&quot;", "&#34;").replace("&#x27;", "&#39;"))  # of templates
    _values.add(base64.b64encode(secret.encode(errors="surrogateescape")).decode())  # `Basic`
    longest_first = sorted((value for value in _values if len(value) >= _LEAST), key=len, reverse=True)
    _pattern = re.compile("|".join(map(re.escape, longest_first)))


def redact(text: str) -> str:
    """Return `text` with every secret in it as `***`. A second call changes nothing."""
    return _by_form(text if _pattern is None else _pattern.sub(HIDDEN, text))


def _by_form(text: str) -> str:
    if "://" in text:
        text = _PARAMETER.sub(_without_value, _USER.sub(rf"\g<1>{HIDDEN}@", text))
    text = _FORM.sub(HIDDEN, text)
    return _BEARER.sub(rf"\g<1>{HIDDEN}", _HEADER.sub(rf"\g<1>{HIDDEN}", text))


def _without_value(match: re.Match[str]) -> str:
    return match[1] + HIDDEN if _TELLING.search(match["name"]) else match[0]


def redact_json(value: object) -> Any:
    """Copy a JSON value with every secret in it as `***`. A string under a key that names a secret is hidden
    as a whole. Keys stay, because they explain the values, unless they have the form of a secret.

    Nothing is learned: if a model writes a URL with the password `accuracy`, no word is hidden elsewhere.
    """
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        copied: dict[Any, Any] = {}
        for key, item in value.items():
            shown = redact_json(item)
            if isinstance(key, str):
                if isinstance(item, str) and _FIELD.fullmatch(key):
                    shown = HIDDEN
                key = redact(key) if "://" in key else _by_form(key)
            copied[key] = shown
        return copied
    if isinstance(value, list | tuple):
        return [redact_json(item) for item in value]
    return value


def hide_recipe_secrets(value: object) -> None:
    """Hide the secrets that `value`, a recipe as JSON, gives away: passwords in URLs, secret fields, and the
    environment variables that it names.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(item, str) and _FIELD.fullmatch(str(key)):
                hide_secret(item)
            if isinstance(item, str) and str(key).endswith("_env"):
                hide_secret(os.environ.get(item))
            hide_recipe_secrets(item)
    elif isinstance(value, list | tuple):
        for item in value:
            hide_recipe_secrets(item)
    elif isinstance(value, str):
        _hide_url_secrets(value)


def _hide_url_secrets(text: str) -> None:
    """Hide the secrets in a URL, however oddly written, and passwords in a text that holds URLs."""
    _hide_passwords(text)
    start = _URL.match(text)
    if start is None:
        return
    user, at, _ = text[start.end() :].partition("?")[0].rpartition("@")
    if at and "/" not in user.partition(":")[0]:
        hide_secret(user)
        hide_secret(user.partition(":")[2])
        hide_secret(unquote(user.partition(":")[2]))
    for match in _PARAMETER.finditer(text):
        if _TELLING.search(match["name"]):
            hide_secret(match[0][len(match[1]) :])


def _hide_passwords(text: str) -> None:
    for match in _PASSWORD.finditer(text):
        hide_secret(match[1])
        hide_secret(unquote(match[1]))


for _name, _value in os.environ.items():
    if _ENVIRONMENT.search(_name) and not _value.startswith("/"):
        hide_secret(_value)
    _hide_passwords(_value)  # of a proxy, of a data base
