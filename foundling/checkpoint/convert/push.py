"""An exported folder to the hub, by huggingface_hub: large files as LFS, all in one commit."""

import re
from pathlib import Path

from foundling.config import CheckpointError, ConfigError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def check_name(name: str) -> None:
    """Refuse what is no OWNER/NAME, before hours are spent on converting."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    if not _NAME.fullmatch(name):
        raise ConfigError(f"--push {name!r} is no OWNER/NAME.")
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(f"--push {name!r} is no OWNER/NAME of the hub: {error}") from None


def push(folder: Path, name: str, *, private: bool = False) -> str:
    """Create the repository if it is not there and upload the folder; its address."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import LocalTokenNotFoundError

    api = HfApi()
    try:
        address = api.create_repo(name, private=private, exist_ok=True, repo_type="model")
        # One that was there already stays what it was.
        if private and not api.model_info(name).private:
            raise CheckpointError(
                f"{folder} is written and was not uploaded: {name} exists already and is public,"
                " and --private was asked; make it private or give another name."
            )
        api.upload_folder(
            folder_path=folder, repo_id=name, commit_message="Upload by foundling convert"
        )
    except LocalTokenNotFoundError:
        raise _refused(folder, name, "no token; run `hf auth login` or set HF_TOKEN") from None
    except CheckpointError:
        raise
    except Exception as error:  # the network, the disk or the hub: its library has many words
        raise _refused(folder, name, _first_line(error)) from None
    return str(address)


def _refused(folder: Path, name: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{folder} is written and was not uploaded to {name}: {why}; upload it later with"
        f" `hf upload {name} {folder}`."
    )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")
