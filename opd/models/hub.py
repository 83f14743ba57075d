"""Read models and data files from the Hub: resolve a revision to a commit, and fetch the needed files.

It uses huggingface_hub, with its cache and its variables (`HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN`,
`HF_HUB_OFFLINE`). Only files that folder loaders read are requested, by name. A refused description comes
before any weights. Code, pickles and other files of a repository are never fetched. Failures between this
machine and the Hub become a sentence that a person can act on.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.config.hub_names import HubName, is_commit
from opd.errors import CheckpointError, ModelError, OpdError, StorageError, from_system
from opd.models.hf_folder import (
    ADAPTER_CONFIG,
    CHECKSUMS,
    INDEX,
    LOADED,
    SINGLE,
    read_checksums,
    refuse_code,
    weight_files,
)
from opd.redact import hide_secret
from opd.retry import Retry
from opd.storage.files import file_digest, write_atomic
from opd.storage.weight_folder import refuse_both
from opd.untrusted import is_file_name, object_path, safe_excerpt

if TYPE_CHECKING:
    from huggingface_hub import HfApi


AGAIN = "try again later, or set HF_HUB_OFFLINE=1 to use what is in the cache"


class UnreachableError(Exception):
    """No network, offline mode, or a server error of the Hub. It may pass."""


def is_transient(error: Exception) -> bool:
    """Return True if the Hub may answer differently a moment later."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    return is_transport(error)


def was_retried(error: Exception) -> bool:
    """Return True if huggingface_hub has retried several times before it raised `error`."""
    if not is_transport(error):
        return getattr(getattr(error, "response", None), "status_code", 0) in (408, 429)
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return bool(kinds & {"TimeoutException", "ConnectError", "RemoteProtocolError"})


def is_transport(error: BaseException) -> bool:
    """Return True for a network error of any HTTP library of huggingface_hub."""
    from huggingface_hub.errors import HfHubHTTPError

    of_http = next(base for base in HfHubHTTPError.__bases__ if base is not OSError)
    network = isinstance(error, of_http | ConnectionError | TimeoutError)
    return network and not isinstance(error, HfHubHTTPError)


def short_reason(error: BaseException) -> str:
    """Return the message of `error` on one short line."""
    return safe_excerpt(" ".join(str(error).split()) or type(error).__name__, 160)


def hub_error(name: HubName, error: Exception, of: str = "") -> Exception:
    """Return the exception to raise for `error` about `name`. `of` names the file, as `config.json of `."""
    if isinstance(error, OpdError):
        return error
    sentence = _of_repository(name, error) or _of_network(name, error, of)
    if sentence is None and from_system(error) is not None:
        return error
    kind = f"{type(error).__name__}: {short_reason(error)}"
    return StorageError(f"{sentence or f'{of}{name} cannot be had from the Hub ({kind})'}.")


def _of_repository(name: HubName, error: Exception) -> str | None:
    from huggingface_hub import constants, errors

    at = constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{name.repo} is gated: ask for access on its page at {at}, then give your token in HF_TOKEN or"
            " by `hf auth login`"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        nearby = f"no folder {name.repo} here and " if name.file is None else ""
        return (
            f"there is {nearby}no {name.repo_kind} of the name {name.repo} at {at} that this machine may see;"
            " check the spelling, or give a token in HF_TOKEN if it is private"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name.repo} has no revision {name.revision}; check the branch, tag or commit after the @"
    if isinstance(error, errors.HFValidationError):
        return f"{safe_excerpt(name)} cannot be a name on the Hub; write org/name or org/name@revision"
    return None


def _of_network(name: HubName, error: Exception, of: str) -> str | None:
    from huggingface_hub import constants, errors

    at = constants.ENDPOINT
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return f"{of}{name} is not at {at}, though it is listed there; {AGAIN}"
    if isinstance(error, errors.HfHubHTTPError):
        code = error.response.status_code
        mend = "check the token in HF_TOKEN and what it may do" if code in (401, 403) else AGAIN
        return f"{at} answers {of}{name} with status {code}; {mend}"
    if isinstance(error, OSError) and "Consistency check failed" in str(error):
        return f"{of}{name} did not come whole ({short_reason(error)}); run the command again"
    local = isinstance(error, errors.LocalEntryNotFoundError)
    if not (local or isinstance(error, UnreachableError) or is_transport(error)):
        return None
    cause = (error.__cause__ if local else None) or error
    return f"{of}{name} cannot be had from {at} ({short_reason(cause)}); {AGAIN}"


SECONDS = 10.0
"""Timeout of a request without any answer. A download has `HF_HUB_DOWNLOAD_TIMEOUT`."""
RETRY = Retry(attempts=4, pause=0.5, longest=8.0)
LARGEST = 256 * 2**20
"""Maximum bytes of a file that is not weights."""
_SMALL = LOADED - {SINGLE} | {CHECKSUMS}
_KEPT = (".safetensors", ".json", ".jinja", ".model", ".txt")
"""Suffixes of files in a folder's `checksums.json` that are fetched too."""
log = logging.getLogger("opd.models.hub")

Report = Callable[[int, int], None]
"""Called with (bytes here, bytes in all) while files are fetched."""


@dataclass(frozen=True, slots=True)
class HubSnapshot:
    """The local copy of a name on the Hub."""

    path: Path
    """A model's folder, or a data set's file, in the cache."""
    commit: str


@dataclass(frozen=True, slots=True)
class CommitListing:
    """The Hub's description of a commit."""

    commit: str
    sizes: Mapping[str, int]
    digests: Mapping[str, str]
    """sha256 of files in large-file storage, else git's sha1. A data set has none."""


def fetch_from_hub(
    name: HubName,
    commit: str | None = None,
    *,
    weights: bool = True,
    files: Collection[str] | None = None,
    report: Report = lambda done, total: None,
) -> HubSnapshot:
    """Return `name` on this machine. Download it if it is not in the cache.

    Args:
        commit: The required commit, whatever the revision is now.
        weights: Fetch a model's weights, and not only its tokenizer.
        files: Known files of `commit`. If all are here, the Hub is not asked.

    If the Hub cannot be reached, the cache is used and this is logged. Raises `ModelError`, `CheckpointError`
    or `StorageError` if there is no such repository, revision or file, if it may not be read, is no usable
    model, or is incomplete.
    """
    from huggingface_hub import get_token

    hide_secret(get_token())
    name = name if commit is None else name.at_revision(commit)
    if commit is not None and files is not None:
        path = _in_cache(
            name, commit, {*files, *_needed_files(name, weights)} if name.file is None else [name.file]
        )
        if path is not None:
            return HubSnapshot(path, commit)
    try:
        listing = listing_of(name)
    except UnreachableError as error:
        return _from_cache(name, weights, error)
    if name.file is not None:
        if name.file not in listing.sizes:
            raise StorageError(
                f"{name.repo} has no file {safe_excerpt(name.file)} at {name.revision}; check the name."
            )
        path = _Download(name, listing, report)([name.file])[0]
    else:
        path = _fetch_model(name, listing, weights, report)
    if name.commit is None and _last_commit(name) != listing.commit:
        # For use without network, as huggingface_hub does. A cache may be read-only.
        with contextlib.suppress(OSError):
            write_atomic(_repository_folder(name) / "refs" / name.revision, listing.commit.encode())
    return HubSnapshot(path, listing.commit)


def _fetch_model(name: HubName, listing: CommitListing, weights: bool, report: Report) -> Path:
    if weights:
        _refuse_contents(name, listing)
    download = _Download(name, listing, report)
    small = sorted(_SMALL & listing.sizes.keys())
    if not small:
        raise ModelError(f"{name} holds no tokenizer and no model; check that it is the repository you mean.")
    folder = download(small)[0].parent
    try:
        refuse_code(folder)
        others = [SINGLE] if INDEX not in listing.sizes else weight_files(folder)
        refuse_both("it", others, listing.sizes)
        listed = _listed_files(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from error
    wanted = list(dict.fromkeys([*others, *listed])) if weights else []
    missing = [file for file in wanted if file not in listing.sizes]
    if missing:
        raise CheckpointError(
            f"{name} has no {safe_excerpt(missing[0])}, which its own {INDEX} or {CHECKSUMS} names: it is"
            " not whole;"
            " choose another revision."
        )
    download([file for file in wanted if file not in small])
    return folder


def _listed_files(folder: Path) -> list[str]:
    """Return the files that a model's checksums list. Without them it would be incomplete."""
    return [object_path(file) for file in read_checksums(folder) if file.endswith(_KEPT)]


def _refuse_contents(name: HubName, listing: CommitListing) -> None:
    """Raise `ModelError` for a repository without a usable model, before anything is fetched."""
    files = listing.sizes
    if SINGLE in files or INDEX in files:
        if "config.json" not in files:
            raise ModelError(f"{name} has weights and no config.json; choose a model in transformers' form.")
        return
    if ADAPTER_CONFIG in files:
        raise ModelError(
            f"{name} is an adapter and no whole model; fetch it and its base with `hf download --local-dir`,"
            f" name the base's folder as base_model_name_or_path in its {ADAPTER_CONFIG}, and give its own."
        )
    if any(file.endswith(".gguf") for file in files):
        raise ModelError(
            f"{name} holds GGUF files, whose weights are quantised or laid out for another program, and not"
            " safetensors; give the model that they were made from, or convert one: see docs/recipes/hub.md."
        )
    pickles = sorted(file for file in files if file.endswith((".bin", ".pt", ".pth")))
    if pickles:
        raise ModelError(
            f"{name} holds its weights as {safe_excerpt(pickles[0])}, a pickle, which is never read; choose a"
            " revision with safetensors (the Hub's converter offers one as refs/pr/N), or convert the model."
        )
    raise ModelError(f"{name} holds neither {SINGLE} nor {INDEX}; check that it is the repository you mean.")


class _Download:
    """Fetches files of one commit into the cache, and compares each new one with the Hub's digest."""

    def __init__(self, name: HubName, listing: CommitListing, report: Report) -> None:
        self._name, self._listing, self._report = name.at_revision(listing.commit), listing, report
        self._done = self._total = 0

    def __call__(self, files: Iterable[str]) -> list[Path]:
        """Return the local paths of `files`, in order."""
        chosen = list(files)
        for file in chosen:
            size = self._listing.sizes[file]
            if not file.endswith(".safetensors") and size > LARGEST and self._name.file is None:
                raise StorageError(
                    f"{self._name}: {file} has {size} bytes, and no file of its kind has more than {LARGEST};"
                    " check that it is the repository you mean."
                )
            self._total += max(size, 0)
        return [self._fetch_file(file) for file in chosen]

    def _fetch_file(self, file: str) -> Path:
        start, cached = self._done, _in_cache(self._name, self._listing.commit, [file])

        def attempt() -> Path:
            self._done = start
            try:
                return self._download_file(file)
            except Exception as error:
                if is_transient(error) and not was_retried(error):
                    raise UnreachableError(short_reason(error)) from error
                raise

        try:
            path = RETRY.call(attempt, UnreachableError, lambda error, _: error)
        except Exception as error:
            raise hub_error(self._name, error, f"{safe_excerpt(file)} of ") from error
        if cached is None:
            self._verify_file(path, file)
        self._done = start + max(self._listing.sizes[file], 0)
        self._report(self._done, max(self._done, self._total))
        return path

    def _download_file(self, file: str) -> Path:
        from huggingface_hub import hf_hub_download

        name = self._name
        kind: Any = _counting_bar(self._count_bytes)
        downloaded = hf_hub_download(
            name.repo,
            file,
            repo_type=name.repo_kind,
            revision=name.revision,
            etag_timeout=SECONDS,
            tqdm_class=kind,
        )
        path = _snapshot_folder(name) / file
        if Path(downloaded).absolute() != path.absolute() or not path.is_file():
            raise StorageError(f"{safe_excerpt(file)} of {name} came as a file of another commit; {AGAIN}.")
        return path

    def _count_bytes(self, count: int) -> None:
        self._done += count
        self._report(self._done, max(self._done, self._total))

    def _verify_file(self, path: Path, file: str) -> None:
        """Raise `StorageError` and delete the new file at `path` if it differs from the Hub's description."""
        size, digest = self._listing.sizes[file], self._listing.digests.get(file) or path.resolve().name
        length = path.stat().st_size
        if (length == size or size < 0) and digest_like(path, digest) == digest:
            return
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise StorageError(
            f"{safe_excerpt(file)} of {self._name} did not come as the Hub says it is ({length} bytes where"
            " it says"
            f" {size}, or another digest); it was not kept: run the command again."
        )


def digest_like(path: Path, digest: str) -> str:
    """Return the digest of `path` of the same kind as `digest`, or `digest` itself if its kind is unknown."""
    if len(digest) == 64 and set(digest) <= set("0123456789abcdef"):
        return file_digest(path)
    if is_commit(digest):  # git's, for files outside large-file storage
        data = path.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    return digest


def _counting_bar(came: Callable[[int], None]) -> type:
    """Return a silent progress bar for huggingface_hub that reports the received bytes."""
    from huggingface_hub.utils import tqdm

    class CountingBar(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            came(int(n or 0))

    return CountingBar


def listing_of(name: HubName) -> CommitListing:
    """Return the Hub's listing of `name`. Raises `UnreachableError`, or the exception of `refusal`."""
    from huggingface_hub import HfApi, constants

    if constants.is_offline_mode():
        raise UnreachableError("HF_HUB_OFFLINE is set")
    api = HfApi()

    def attempt() -> CommitListing:
        try:
            return _request_listing(api, name)
        except Exception as error:
            if is_transient(error):
                raise UnreachableError(short_reason(error)) from error
            raise

    try:
        return RETRY.call(attempt, UnreachableError, lambda error, _: error)
    except (OpdError, UnreachableError):
        raise
    except Exception as error:
        raise hub_error(name, error) from error


def _request_listing(api: HfApi, name: HubName) -> CommitListing:
    info = api.repo_info(
        name.repo,
        repo_type=name.repo_kind,
        revision=name.revision,
        files_metadata=name.file is None,
        timeout=SECONDS,
    )
    if info.sha is None or not is_commit(info.sha):
        raise StorageError(f"the Hub's answer about {name} names no commit; check HF_ENDPOINT.")
    if name.commit not in (None, info.sha):
        raise StorageError(f"the Hub answers about another commit than {name}; check HF_ENDPOINT.")
    sizes: dict[str, int] = {}
    digests: dict[str, str] = {}
    for sibling in getattr(info, "siblings", None) or []:
        file = sibling.rfilename
        if name.file is None and not (is_file_name(file) or file.endswith(_KEPT)):
            continue
        lfs = sibling.lfs
        size = lfs.size if lfs is not None else sibling.size
        sizes[file] = size if isinstance(size, int) else -1
        digests[file] = (lfs.sha256 if lfs is not None else sibling.blob_id) or ""
    return CommitListing(info.sha, sizes, digests)


def _from_cache(name: HubName, weights: bool, error: UnreachableError) -> HubSnapshot:
    """Return the cached part of `name` if the Hub cannot be reached."""
    from huggingface_hub import constants

    commit = name.commit or _last_commit(name)
    path = (
        None if commit is None else _in_cache(name, commit, _needed_files(name.at_revision(commit), weights))
    )
    if commit is None or path is None:
        nearby = f" there is no folder {name.repo} here either:" if name.file is None else ""
        lack = "is not in the cache" if commit is None else "is not whole in the cache"
        raise StorageError(
            f"{name} {lack} ({constants.HF_HUB_CACHE}), and {constants.ENDPOINT} cannot be asked ({error});"
            f"{nearby} check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or copy it here and give its path."
        ) from error
    if not constants.is_offline_mode():
        log.warning(
            "%s cannot be asked of the Hub (%s); going on with the cached commit %s", name, error, commit
        )
    return HubSnapshot(path, commit)


def _needed_files(name: HubName, weights: bool) -> list[str]:
    """The files that make a cached snapshot complete. Weights count only if its own index lists them."""
    if name.file is not None:
        return [name.file]
    folder = _snapshot_folder(name)
    if not weights or not (folder / "config.json").is_file():
        return ["config.json"] if weights else []
    try:
        return ["config.json", *weight_files(folder), *_listed_files(folder)]
    except CheckpointError:
        return [SINGLE]


def _in_cache(name: HubName, commit: str, files: Iterable[str]) -> Path | None:
    """Return the folder or file of `name` at `commit`, if all of `files` are in the cache."""
    folder = _snapshot_folder(name.at_revision(commit))
    if not folder.is_dir() or not all((folder / file).is_file() for file in files):
        return None
    return folder if name.file is None else folder / name.file


def _snapshot_folder(name: HubName) -> Path:
    return _repository_folder(name) / "snapshots" / name.revision


def _last_commit(name: HubName) -> str | None:
    """Return the commit of `name`'s revision at the last answer of the Hub."""
    path = _repository_folder(name) / "refs" / name.revision
    if not path.is_file():
        return None
    with path.open("rb") as file:  # a commit, or any other content
        commit = file.read(64).decode("ascii", "replace").strip()
    return commit if is_commit(commit) else None


def _repository_folder(name: HubName) -> Path:
    from huggingface_hub import constants

    folder = f"{name.repo_kind}s--{name.repo.replace('/', '--')}"
    return Path(constants.HF_HUB_CACHE).expanduser().resolve() / folder
