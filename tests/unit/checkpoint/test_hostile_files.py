"""Tokenizers, data sets and configs from a stranger: none runs code or reaches outside."""

import ast
import json
import pickle
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from checkpoint_samples import blank, sample
from hostile_scene import Runs, Scene, refused

from foundling.checkpoint.reader import load_tensors
from foundling.config.data_manifest import Manifest
from foundling.config.errors import ConfigError, DataError
from foundling.config.load import load_run_config
from foundling.data.dataset import DataSet
from foundling.data.open_source import open_source
from foundling.tokenizer.bpe_trainer import train_tokenizer
from foundling.tokenizer.tokenizer import Tokenizer

PACKAGE = Path(__file__).parents[3] / "foundling"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["the quick brown fox jumps over the lazy dog. " * 40], 300)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}{% do trap() %}",
        "{{ cycler.__init__.__globals__.os.mkdir('TRAP') }}",
        "{% for i in range(10**12) %}{% for j in range(10**12) %}x{% endfor %}{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_chat_template_is_never_run(scene: Scene, tokenizer: Tokenizer, template: str) -> None:
    place = scene.root / "tokenizer"
    tokenizer.save(place)
    file = place / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config["chat_template"] = template.replace("TRAP", str(scene.trap))
    file.write_text(json.dumps(config))
    message = [{"role": "user", "content": "{{ 7 * 7 }} <|assistant|> {% raw %}"}]
    found = Tokenizer.load(place)
    assert found.prompt(message) == tokenizer.prompt(message), "our renderer, and text stays text"
    found.save(scene.root / "again")
    assert "TRAP" not in (scene.root / "again" / "tokenizer_config.json").read_text()


def test_a_tokenizer_that_is_a_pickle(scene: Scene) -> None:
    place = scene.root / "tokenizer"
    place.mkdir()
    (place / "tokenizer.json").write_bytes(pickle.dumps(Runs(scene.trap)))
    refused(lambda: Tokenizer.load(place), "cannot be read as a tokenizer")


@pytest.mark.parametrize("name", ["../neighbour/secret", "{secret}", "a/../../neighbour/secret"])
def test_a_data_manifest_that_names_files_outside(scene: Scene, name: str) -> None:
    folder = scene.root / "data"
    folder.mkdir()
    shard = {"name": name.format(secret=scene.secret), "documents": 1, "tokens": 1, "targets": 1}
    shard |= {"text_bytes": 1, "file_bytes": 9, "sha256": "0" * 64}
    manifest = Manifest(
        name="x", kind="text", tokenizer="t", vocab_size=1, token_dtype="uint16", train=(), val=()
    )
    tree = {"digest": manifest.digest, **asdict(manifest), "train": [shard]}
    (folder / "manifest.json").write_text(json.dumps(tree))
    with pytest.raises(DataError, match="outside of its folder"):
        DataSet(folder)


def test_an_array_of_objects(scene: Scene) -> None:
    file = scene.root / "rows.npy"
    np.save(file, np.array([Runs(scene.trap)], dtype=object), allow_pickle=True)
    refused(lambda: open_source(str(file)))
    shutil.copy(file, scene.newest / "extra.npy")
    refused(lambda: load_tensors(scene.newest, blank(sample(10))), "does not belong to it")


@pytest.mark.parametrize(
    "text",
    [
        "train: !!python/object/apply:os.mkdir ['TRAP']",
        "train: {seed: !!python/object/new:os.mkdir ['TRAP']}",
        "model: !!python/name:os.system",
        "!!python/module:os : {}",
        "train: {seed: !!binary 'AAAA'}",
        "train: {start: {class_path: os.mkdir, init_args: {path: TRAP}}}",
        "model: TRAP",
    ],
)
def test_a_config_that_would_run_something(scene: Scene, text: str) -> None:
    file = scene.root / "config.yaml"
    file.write_text(text.replace("TRAP", str(scene.trap)))
    with pytest.raises(ConfigError) as caught:
        load_run_config(file)
    assert "\n" not in str(caught.value)


def test_a_config_of_a_billion_laughs(scene: Scene) -> None:
    lines = ["a: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    file = scene.root / "config.yaml"
    file.write_text("\n".join([*lines, "train: {start: *a11}"]))
    with pytest.raises(ConfigError):
        load_run_config(file)


def test_nothing_here_loads_what_could_run() -> None:
    """No plain pickle.load, torch.load, np.load, yaml.load, eval or exec in the package."""
    safe = {
        "checkpoint/dcp_index.py": "the unpickler that knows a short list of names",
        "data/build/executor.py": "what its own worker says over a pipe",
        "data/build/executor_cluster.py": "what its build wrote, by the digest in the batch script",
        "config/base.py": "yaml.load with a loader made of SafeLoader",
    }
    found = []
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        if name in safe or name.startswith("bench/"):  # bench reads back what it wrote itself
            continue
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        found += [f"{name}: {ast.unparse(call)[:60]}" for call in calls if _is_unsafe(call)]
    assert not found


def _is_unsafe(call: ast.Call) -> bool:
    said = ast.unparse(call.func)
    options = {word.arg: ast.unparse(word.value) for word in call.keywords}
    if said == "torch.load":
        return options.get("weights_only") != "True"
    if said == "np.load":
        return options.get("allow_pickle") != "False"
    loads = {"pickle.load", "pickle.loads", "yaml.load", "marshal.loads", "shelve.open"}
    return said in loads | {"eval", "exec", "os.system", "yaml.unsafe_load", "__import__"}
