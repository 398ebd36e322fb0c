"""There and back through every layout: the same bits, the same config, nothing left beside."""

from pathlib import Path

import pytest
import torch
from convert_samples import BASE, FAMILIES, META, as_file, as_layout, same, weights_of

from foundling.checkpoint.bundle import load_bundle
from foundling.checkpoint.convert import compare_models
from foundling.checkpoint.convert.convert import convert
from foundling.checkpoint.convert.detect import kind_of, open_source
from foundling.checkpoint.convert.meta import ffn_formula
from foundling.checkpoint.convert.model_source import Kind
from foundling.config.errors import CheckpointError, RunError


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if transformers were not installed."""
    monkeypatch.setattr(compare_models, "has_transformers", lambda: False)
    monkeypatch.setattr("foundling.checkpoint.convert.compare_models.LONGEST", 64)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("family", FAMILIES)
def test_native_to_others_and_back_is_bit_identical(family: str, tmp_path: Path) -> None:
    native = as_layout(tmp_path, FAMILIES[family], "native")
    kinds: list[Kind] = ["hf", "torch", "dcp"]
    for kind in [*kinds, *(["llama"] if family in META else [])]:
        there, back = tmp_path / f"there-{kind}", tmp_path / f"back-{kind}"
        _, found = convert(native, there, kind)  # type: ignore[arg-type]
        assert found.largest == 0.0
        told = "foundling, since transformers is not installed" if kind == "hf" else "foundling"
        assert found.result_through == told
        assert found.tensors == len(open_source(native).places)
        assert kind_of(there) == kind
        convert(there, back, "native")
        assert same(native, back)
    assert not [path for path in tmp_path.iterdir() if "tmp" in path.name]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("family", META)
def test_meta_to_native_to_meta_is_bit_identical(family: str, tmp_path: Path) -> None:
    meta = as_layout(tmp_path, FAMILIES[family], "llama")
    convert(meta, tmp_path / "run", "native")
    convert(tmp_path / "run", tmp_path / "again", "llama")
    one, other = (torch.load(f / "consolidated.00.pth") for f in (meta, tmp_path / "again"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    params = [(f / "params.json").read_text() for f in (meta, tmp_path / "again")]
    assert params[0] == params[1]


@pytest.mark.usefixtures("alone")
def test_precision_is_kept_or_asked_for(tmp_path: Path) -> None:
    file = as_file(tmp_path / "half.pt", BASE, torch.bfloat16)
    convert(file, tmp_path / "run", "native")
    assert {t.dtype for t in weights_of(tmp_path / "run").values()} == {torch.bfloat16}
    _, found = convert(tmp_path / "run", tmp_path / "hf", "hf", dtype="fp16")
    assert found.agrees
    stored = weights_of(tmp_path / "hf")
    expected = {name: t.half() for name, t in weights_of(file).items()}
    assert all(torch.equal(stored[name], expected[name]) for name in expected)


@pytest.mark.usefixtures("alone")
def test_shards_have_an_index_and_none_is_larger_than_asked_for(tmp_path: Path) -> None:
    file = as_file(tmp_path / "a.pt", BASE)
    convert(file, tmp_path / "hf", "hf", shard_bytes=50_000)
    shards = sorted((tmp_path / "hf").glob("model-*.safetensors"))
    assert len(shards) > 2
    assert all(shard.stat().st_size < 55_000 for shard in shards)
    assert same(file, tmp_path / "hf")
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=shards[1].name):
        open_source(tmp_path / "hf")


def test_transformers_own_reader_agrees_about_the_bytes(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    folder = as_layout(tmp_path, FAMILIES["qwen 2"], "hf")
    theirs = safetensors.load_file(folder / "model.safetensors")
    ours = open_source(folder).stored
    assert theirs.keys() == ours.specs.keys()
    assert all(torch.equal(theirs[name], ours.read(name)) for name in theirs)


def test_an_existing_target_is_refused(tmp_path: Path) -> None:
    file = as_file(tmp_path / "a.pt", BASE)
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        convert(file, tmp_path / "there", "hf")


@pytest.mark.parametrize("family", ["qwen 2", "depth", "wide heads"])
def test_meta_cannot_hold_other_families(family: str, tmp_path: Path) -> None:
    file = as_file(tmp_path / "a.pt", FAMILIES[family])
    with pytest.raises(CheckpointError, match="Meta's format"):
        convert(file, tmp_path / "there", "llama")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


@pytest.mark.parametrize("dim", [48, 64, 4096])
@pytest.mark.parametrize("width", [1, 100, 112, 127, 11008, 14336, 28672])
def test_metas_formula_gives_every_width(dim: int, width: int) -> None:
    multiplier, multiple = ffn_formula(dim, width)
    hidden = int(2 * (4 * dim) / 3)
    hidden = hidden if multiplier is None else int(multiplier * hidden)
    assert multiple * ((hidden + multiple - 1) // multiple) == width


def test_what_is_no_model_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="does not exist"):
        open_source(tmp_path / "nowhere")
    with pytest.raises(RunError, match="not a run"):
        open_source(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no weights"):
        open_source(tmp_path)
    (tmp_path / "x.bin").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="no file with a model in it"):
        open_source(tmp_path / "x.bin")
    for start in (b"PK\x03\x04", b"\x80\x02"):
        (tmp_path / "x.bin").write_bytes(start + b"s nothing")
        with pytest.raises(CheckpointError, match="cannot be read"):
            open_source(tmp_path / "x.bin")


def test_the_layers_read_from_the_disk_are_those_of_the_whole_model(tmp_path: Path) -> None:
    """The comparison's own forward pass, against the model that is built whole."""
    from foundling.checkpoint.convert.compare_models import our_logits

    for family, config in FAMILIES.items():
        source = open_source(as_file(tmp_path / "a.pt", config))
        from convert_samples import random_model

        tokens = torch.randint(211, (1, 90), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            expected = random_model(config)(tokens)[0]
        assert torch.allclose(our_logits(config, source.read, tokens), expected, atol=1e-6), family


def test_a_grown_vocabulary_travels(tmp_path: Path) -> None:
    grown = BASE.replace(vocab_size=219)
    folder = as_layout(tmp_path, grown, "hf")
    assert open_source(folder).model.vocab_size == 219
    with pytest.raises(CheckpointError, match="no tokenizer"):
        load_bundle(folder)
