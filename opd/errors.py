"""The errors a user can meet: few, each one sentence that says what is wrong, where, and how to mend it.

Every class also inherits the built-in type a caller would expect to catch. The command line prints the
sentence and exits with status 2; anything that is not an `OpdError` is a bug and keeps its traceback.
"""


class OpdError(Exception):
    """Base of every error `opd` raises on purpose."""


class ConfigError(OpdError, ValueError):
    """A recipe, an override or an option is wrong."""


class DataError(OpdError, ValueError):
    """A data set or a domain cannot be used."""


class ModelError(OpdError, ValueError):
    """A model, head or tokenizer cannot be used, or two of them do not fit together."""


class CheckpointError(OpdError, OSError):
    """A checkpoint is missing, incomplete or corrupt."""


class StorageError(OpdError, OSError):
    """A store, published model, log or cache cannot be read or written, or holds wrong bytes."""


class RewardError(OpdError, RuntimeError):
    """A reward function raised, timed out or returned something that is not a finite number."""


class TeacherError(OpdError, RuntimeError):
    """A teacher is missing, unreachable or returned something unusable."""


class RolloutError(OpdError, RuntimeError):
    """The rollout engine cannot serve a request."""


class LaunchError(OpdError, RuntimeError):
    """The processes of a run cannot be placed, reached or kept going."""


class PreemptedError(OpdError, RuntimeError):
    """The run was asked to stop and did; nothing acknowledged is lost."""


class TrainingError(OpdError, RuntimeError):
    """A training step cannot go on: no signal left, or a number that is not finite."""


class RanksError(OpdError, RuntimeError):
    """The processes of one run cannot go on together: one has ended, hangs, or cannot be reached."""


class RunFolderError(OpdError, OSError):
    """A run folder exists already, belongs to another run, or does not match the recipe."""


class MissingExtraError(OpdError, ImportError):
    """An optional dependency is needed; the sentence names the extra that brings it."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(feature, extra)

    def __str__(self) -> str:
        feature, extra = self.args
        return f"{feature} needs an optional dependency: install it with `pip install 'opd[{extra}]'`."
