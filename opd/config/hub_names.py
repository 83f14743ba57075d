"""Names of models and files on the Hub, in recipes and in folders of the Hub's cache.

org/name                                    a model: the newest commit of its branch `main`
org/name@REVISION                           a branch, a tag, `refs/pr/N` or a commit
hf://org/name@REVISION                      the same, whatever folders there are
hf://datasets/org/name@REVISION/FILE        a file of a data set; `@REVISION` may be left out
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_MODEL = re.compile(
    rf"(?P<scheme>hf://(?:models/)?)?(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[A-Za-z0-9][\w./-]{{0,199}}))?",
    re.ASCII,
)
_FILE = re.compile(
    rf"hf://datasets/(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[A-Za-z0-9][\w.-]{{0,199}}))?/(?P<file>[^\0\\]+)",
    re.ASCII,
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CACHED = re.compile(r"(models|datasets)--(.+)--(.+)")
_LOCAL = (".jinja", ".jsonl", ".parquet", ".json", ".yaml", ".safetensors", ".gguf")
"""Suffixes of files that are no repositories."""
_RUNS = "runs/"
"""Default folder of runs."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on the Hub, or with `file` a file of a data set."""

    repo: str
    """`org/name`."""
    revision: str = "main"
    file: str | None = None

    @property
    def repo_kind(self) -> Literal["model", "dataset"]:
        return "model" if self.file is None else "dataset"

    @property
    def commit(self) -> str | None:
        """The commit, if the revision is one."""
        return self.revision if is_commit(self.revision) else None

    def at_revision(self, revision: str) -> HubName:
        return replace(self, revision=revision)

    def __str__(self) -> str:
        if self.file is None:
            return f"{self.repo}@{self.revision}"
        return f"hf://datasets/{self.repo}@{self.revision}/{self.file}"


def is_commit(text: str) -> bool:
    """Return True if `text` is the full hash of a commit."""
    return _COMMIT.fullmatch(text) is not None


def hub_name(text: str) -> HubName | None:
    """Parse a name on the Hub. Return `None` for everything else, such as a path that exists here."""
    match = _FILE.fullmatch(text)
    if match is not None:
        parts = match["file"].split("/")
        usual = all(part not in ("", ".", "..") for part in parts) and _is_repo(match["repo"])
        return HubName(match["repo"], match["revision"] or "main", match["file"]) if usual else None
    match = _MODEL.fullmatch(text)
    if match is None or not _is_repo(match["repo"]) or ".." in (match["revision"] or ""):
        return None
    if match["scheme"] is None and (text.startswith(_RUNS) or text.endswith(_LOCAL) or _is_here(text)):
        return None
    return HubName(match["repo"], match["revision"] or "main")


def cached_name(path: str | Path) -> HubName | None:
    """The Hub's name of a path inside its cache, `.../models--ORG--NAME/snapshots/COMMIT`, or `None`."""
    parts = Path(path).parts
    for at, part in enumerate(parts[:-2]):
        match = _CACHED.fullmatch(part)
        if match is None or parts[at + 1] != "snapshots" or not is_commit(parts[at + 2]):
            continue
        repo, inner = f"{match[2]}/{match[3]}", "/".join(parts[at + 3 :])
        if (match[1] == "datasets") == bool(inner):
            return HubName(repo, parts[at + 2], inner or None)
    return None


def display_path(path: str) -> str:
    """Return `path` for display: a path in the Hub's cache becomes its name there, with its commit."""
    name = cached_name(path)
    return path if name is None else str(name)


def _is_repo(repo: str) -> bool:
    kind = repo.partition("/")[0] in ("models", "datasets", "spaces")  # no organisations
    return not kind and "--" not in repo and ".." not in repo and not repo.endswith(".git")


def _is_here(text: str) -> bool:
    try:
        return Path(text).exists() or Path(text).is_symlink()
    except (OSError, ValueError):
        return False
