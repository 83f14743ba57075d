"""What goes wrong between this machine and the Hub, in sentences that a person can act on."""

from __future__ import annotations

from typing import Any

from opd.config.hub_names import HubName
from opd.errors import OpdError, StorageError, from_system
from opd.foreign import shown

AGAIN = "try again later, or set HF_HUB_OFFLINE=1 to use what is in the cache"


class UnreachableError(Exception):
    """There is no network, it is switched off, or the Hub answers with errors of its own: it may pass."""


def passing(error: Exception) -> bool:
    """Whether the Hub may answer otherwise a moment later."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    return is_transport(error)


def asked_again(error: Exception) -> bool:
    """Whether huggingface_hub has asked for a file several times already before it raised `error`."""
    if not is_transport(error):
        return getattr(getattr(error, "response", None), "status_code", 0) in (408, 429)
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return bool(kinds & {"TimeoutException", "ConnectError", "RemoteProtocolError"})


def is_transport(error: BaseException) -> bool:
    """Whether `error` is the network's: of whichever HTTP library huggingface_hub has."""
    from huggingface_hub.errors import HfHubHTTPError

    of_http = next(base for base in HfHubHTTPError.__bases__ if base is not OSError)
    network = isinstance(error, of_http | ConnectionError | TimeoutError)
    return network and not isinstance(error, HfHubHTTPError)


def status(error: Any) -> str:
    """`status 503`."""
    return f"status {error.response.status_code}"


def reason(error: BaseException) -> str:
    """What `error` says, on one short line."""
    return shown(" ".join(str(error).split()) or type(error).__name__, 160)


def refusal(name: HubName, error: Exception, of: str = "") -> Exception:
    """What to raise in place of `error`, which `name` has met; `of`: in which part, as `config.json of `."""
    if isinstance(error, OpdError):
        return error
    sentence = _of_repository(name, error) or _of_answer(name, error, of) or _of_network(name, error, of)
    if sentence is None and from_system(error) is not None:
        return error
    kind = f"{type(error).__name__}: {reason(error)}"
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
        here = f"no folder {name.repo} here and " if name.file is None else ""
        return (
            f"there is {here}no {name.kind} of the name {name.repo} at {at} that this machine may see; check"
            " the spelling, or give a token in HF_TOKEN if it is private"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name.repo} has no revision {name.revision}; check the branch, tag or commit after the @"
    if isinstance(error, errors.HFValidationError):
        return f"{shown(name)} cannot be a name on the Hub; write org/name or org/name@revision"
    return None


def _of_answer(name: HubName, error: Exception, of: str) -> str | None:
    from huggingface_hub import constants, errors

    at = constants.ENDPOINT
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return f"{of}{name} is not at {at}, though it is listed there; {AGAIN}"
    if isinstance(error, errors.HfHubHTTPError):
        code = error.response.status_code
        mend = "check the token in HF_TOKEN and what it may do" if code in (401, 403) else AGAIN
        return f"{at} answers {of}{name} with {status(error)}; {mend}"
    if isinstance(error, OSError) and "Consistency check failed" in str(error):
        return f"{of}{name} did not come whole ({reason(error)}); run the command again"
    return None


def _of_network(name: HubName, error: Exception, of: str) -> str | None:
    from huggingface_hub import constants, errors

    local = isinstance(error, errors.LocalEntryNotFoundError)
    if not (local or isinstance(error, UnreachableError) or is_transport(error)):
        return None
    cause = (error.__cause__ if local else None) or error
    return f"{of}{name} cannot be had from {constants.ENDPOINT} ({reason(cause)}); {AGAIN}"
