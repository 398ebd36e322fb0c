"""What can go wrong by the user's hand, and the exit code each mistake ends with.

    UserError (exit code 2)      one sentence that names the thing, the value and the remedy
      ConfigError                a key, a type or a combination of settings
        IdleError                a setting that another one makes idle
      DataError                  a source, shard, manifest or tokenizer that cannot be used
      CheckpointError            a checkpoint that is missing, torn or does not fit
      RunError                   a run directory that is locked, finished or of another kind
        LostError                what a run needs is gone or damaged
        NotScoredError           models without scores of one task, which cannot be told apart

Everything else that escapes is a bug of ours and keeps its traceback.
"""


class UserError(Exception):
    """A mistake the user can repair; the command line prints one sentence and exits with 2."""

    exit_code = 2


class ConfigError(UserError):
    """A setting that is unknown, of the wrong type, or without effect."""


class IdleError(ConfigError):
    """A setting that another one makes idle, by its name."""

    def __init__(self, setting: str, when: str, remedy: str) -> None:
        super().__init__(f"{setting} has no effect {when}; {remedy}.")
        self.setting = setting


class DataError(UserError):
    """Text, shards, a manifest or a tokenizer that cannot be used as they are."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or of another shape."""


class RunError(UserError):
    """A run directory that is in use, finished, or not a run at all."""


class NotScoredError(RunError):
    """Two models have no scores of the same task."""


class LostError(RunError):
    """Data or checkpoints that a run needs are gone or damaged; exit code 65."""

    exit_code = 65
