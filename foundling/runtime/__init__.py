"""Where a run lives (directory, lock, log; no torch) and what it runs on (device, ranks)."""

from foundling.runtime.files import fsync_dir, replace_folder, sha256_file, write_text_atomic
from foundling.runtime.lock import RunLock
from foundling.runtime.log import say, warn
from foundling.runtime.rundir import RunDir

__all__ = [
    "RunDir",
    "RunLock",
    "fsync_dir",
    "replace_folder",
    "say",
    "sha256_file",
    "warn",
    "write_text_atomic",
]
