# SPDX-License-Identifier: Apache-2.0
"""Publish an artifact on the Hugging Face Hub, where `artifact` names it by its repository."""

from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id

from oscar_vllm.artifact import CONFIG_FILE, TENSOR_FILE
from oscar_vllm.errors import OscarConfigError


def check_repository(repository: str) -> None:
    """Refuse a repository that cannot be written to, before minutes are spent on calibration.

    Raises:
        OscarConfigError: its name is not valid, nobody is logged in, or the hub cannot be reached.

    """
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise OscarConfigError(f"--push-to-hub {repository!r}: {' '.join(str(error).split())}") from None
    try:
        HfApi().whoami()
    except (LocalTokenNotFoundError, HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split())
        raise OscarConfigError(
            f"--push-to-hub {repository}: not logged in, or the hub cannot be reached ({reason}); run `hf auth login`, "
            "or leave the option out and upload the folder later"
        ) from None


def push(directory: Path, repository: str) -> str:
    """Upload an artifact and its card in one commit; the repository is made if it is missing. Returns the commit's URL.

    Args:
        directory: what `calib.pipeline.calibrate` wrote.
        repository: ``NAME`` or ``ORGANIZATION/NAME``.

    Raises:
        OscarConfigError: the hub refuses; the folder is complete all the same.

    """
    files = [CommitOperationAdd(name, str(directory / name)) for name in (CONFIG_FILE, TENSOR_FILE, "README.md")]
    api = HfApi()
    try:
        api.create_repo(repository, exist_ok=True)
        commit = api.create_commit(repository, files, commit_message="KV cache calibration for oscar-vllm")
    except (HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split())
        raise OscarConfigError(
            f"the artifact is in {directory}, but --push-to-hub {repository} failed: {reason}"
        ) from None
    return commit.commit_url
