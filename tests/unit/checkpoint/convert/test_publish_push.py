"""--push against a local server with the hub's protocol."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from convert_samples import BASE, as_file, as_layout

from foundling.checkpoint.convert.publish import check_name, push
from foundling.cli.main import run_verb
from foundling.config.errors import CheckpointError, ConfigError
from tests.unit.checkpoint.convert.upload_server import UploadServer

# huggingface_hub hands httpx a file in a way that httpx is going to give up.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[UploadServer]:
    from huggingface_hub import constants

    server = UploadServer()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setenv("HF_TOKEN", server.token)
    yield server
    server.close()


def test_a_folder_is_uploaded_whole(tmp_path: Path, server: UploadServer) -> None:
    folder = as_layout(tmp_path, BASE, "hf")
    address = push(folder, "someone/small")
    assert address.endswith("someone/small")
    files = server.repos["models/someone/small"].revisions["main"]
    mine = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {name: files[name] for name in mine} == mine
    assert [r.method for r in server.requests if r.path.startswith("/upload/")] == ["PUT"]
    push(folder, "someone/small")  # once more is no error


def test_the_verb_converts_and_pushes(
    tmp_path: Path, server: UploadServer, capsys: pytest.CaptureFixture[str]
) -> None:
    file = as_file(tmp_path / "a.pt", BASE)
    run_verb(["convert", str(file), str(tmp_path / "hf"), "--to", "hf", "--push", "someone/small"])
    assert "uploaded to" in capsys.readouterr().out
    card = server.repos["models/someone/small"].revisions["main"]["README.md"].decode()
    assert 'from_pretrained("someone/small")' in card


def test_a_refused_upload_is_a_sentence_and_the_folder_stays(
    tmp_path: Path, server: UploadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = as_layout(tmp_path, BASE, "hf")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(CheckpointError, match="was not uploaded to someone/small"):
        push(folder, "someone/small")
    monkeypatch.setenv("HF_TOKEN", server.token)
    server.lose_bytes = True
    with pytest.raises(CheckpointError, match="was not uploaded"):
        push(folder, "someone/small")
    assert (folder / "model.safetensors").is_file()


def test_private_is_not_pushed_into_a_public_repository(
    tmp_path: Path, server: UploadServer
) -> None:
    folder = as_layout(tmp_path, BASE, "hf")
    server.add("models/someone/open", {".gitattributes": b""})
    with pytest.raises(CheckpointError, match="is public"):
        push(folder, "someone/open", private=True)
    push(folder, "someone/closed", private=True)
    assert "README.md" in server.repos["models/someone/closed"].revisions["main"]
    assert "README.md" not in server.repos["models/someone/open"].revisions["main"]


def test_without_a_network_it_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    folder = as_layout(tmp_path, BASE, "hf")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", "hf_any")
    with pytest.raises(CheckpointError, match=r"was not uploaded .*refused.*`hf upload"):
        push(folder, "someone/small")


@pytest.mark.parametrize("name", ["a/b--c", "a/.b", "a/b.git", "small", "a/b/c", "", "/x", "a b/c"])
def test_a_name_is_checked_before_anything_else(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="OWNER/NAME"):
        check_name(name)


def test_push_wants_hf(tmp_path: Path) -> None:
    words = ["convert", str(tmp_path), str(tmp_path / "b"), "--to", "dcp", "--push", "a/b"]
    with pytest.raises(ConfigError, match="--to hf"):
        run_verb(words)
