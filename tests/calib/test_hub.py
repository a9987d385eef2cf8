# SPDX-License-Identifier: Apache-2.0
"""Publishing: refused early when it cannot work, one commit with exactly the artifact when it can."""

from types import SimpleNamespace

import pytest
from huggingface_hub.errors import LocalTokenNotFoundError

from calib import hub
from calib.__main__ import main
from oscar_vllm.artifact import CONFIG_FILE, TENSOR_FILE
from oscar_vllm.errors import OscarConfigError


class Hub:
    """Stands in for the hub's API; keeps what was sent."""

    def __init__(self, *, logged_in: bool = True, broken: bool = False) -> None:
        self.logged_in, self.broken, self.commits = logged_in, broken, []

    def whoami(self):
        if not self.logged_in:
            raise LocalTokenNotFoundError("Token is required,\nbut no token found")

    def create_repo(self, repository, exist_ok):
        assert exist_ok

    def create_commit(self, repository, operations, commit_message):
        if self.broken:
            raise OSError("connection\nreset")
        files = {operation.path_in_repo: operation for operation in operations}
        assert "oscar" in commit_message
        self.commits.append((repository, files))
        return SimpleNamespace(commit_url="https://hub/commit/1")


@pytest.mark.parametrize(
    ("repository", "logged_in", "message"),
    [
        ("a b", True, "--push-to-hub 'a b': "),
        ("me/cache", False, "--push-to-hub me/cache: not logged in.*hf auth login"),
    ],
)
def test_what_cannot_work_is_refused_before_calibrating(monkeypatch, capsys, tmp_path, repository, logged_in, message):
    monkeypatch.setattr(hub, "HfApi", lambda: Hub(logged_in=logged_in))
    with pytest.raises(OscarConfigError, match=message):
        hub.check_repository(repository)
    arguments = ["--model", "never/read", "--output-dir", str(tmp_path / "out"), "--push-to-hub", repository]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: --push-to-hub ")
    assert error.count("\n") == 1


def test_one_commit_with_the_artifact_and_its_card(monkeypatch, tmp_path):
    for name in (CONFIG_FILE, TENSOR_FILE, "README.md", "calibration_statistics.safetensors"):
        (tmp_path / name).write_text(name)
    api = Hub()
    monkeypatch.setattr(hub, "HfApi", lambda: api)
    assert hub.push(tmp_path, "me/cache") == "https://hub/commit/1"
    ((repository, files),) = api.commits
    assert repository == "me/cache"
    assert set(files) == {CONFIG_FILE, TENSOR_FILE, "README.md"}
    api.broken = True
    with pytest.raises(OscarConfigError, match=f"the artifact is in {tmp_path}, but .* failed: connection reset"):
        hub.push(tmp_path, "me/cache")
