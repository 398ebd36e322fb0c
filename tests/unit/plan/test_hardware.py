"""The table of hardware, the user's file over it, and what was measured over both."""

from pathlib import Path

import pytest

from foundling.config.errors import ConfigError
from foundling.plan.hardware import TABLE, find_gpu, name_of_device

NAMED = {"a40", "a100-40", "a100-80", "h100-sxm", "h100-pcie", "h100-nvl", "h200", "b200"}
NAMED |= {"a6000", "mi250x", "mi300x", "rtx3090", "rtx4090", "rtx5090", "l4", "t4", "cpu"}


def test_every_gpu_of_the_issue_is_there_with_a_source() -> None:
    assert set(TABLE) == NAMED
    for gpu in TABLE.values():
        assert gpu.source
        assert gpu.peaks["fp32"] > 0
        assert gpu.memory > 0
        assert gpu.bandwidth > gpu.link
        if gpu.name not in ("cpu", "t4"):
            assert gpu.peaks["bf16"] >= gpu.peaks["fp32"]


def test_peaks_are_dense() -> None:
    """The sparse figures, twice as high, are the ones on the box."""
    assert TABLE["h100-sxm"].peaks["bf16"] == pytest.approx(989.4e12)
    assert TABLE["mi250x"].peaks["bf16"] == pytest.approx(191.5e12)


def test_names_people_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FOUNDLING_HOME", str(tmp_path))
    assert find_gpu("H100").name == "h100-sxm"
    assert find_gpu("4090").name == "rtx4090"
    with pytest.raises(ConfigError, match="did you mean h200"):
        find_gpu("h20")
    assert name_of_device("NVIDIA H200") == "h200"
    assert name_of_device("NVIDIA H100 80GB HBM3") == "h100-sxm"
    assert name_of_device("NVIDIA H100 PCIe") == "h100-pcie"
    assert name_of_device("NVIDIA A100-SXM4-40GB") == "a100-40"
    assert name_of_device("NVIDIA GeForce RTX 4090") == "rtx4090"
    assert name_of_device("NVIDIA RTX A6000") == find_gpu("rtx-a6000").name == "a6000"
    assert name_of_device("NVIDIA RTX 6000 Ada Generation") is None
    assert name_of_device("Voodoo 2") is None


def test_a_users_file_adds_and_overrides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "hardware.yaml"
    file.write_text("h200: {price: 2.5}\nmine: {like: h200, peaks: {bf16: 900e12}, per_node: 4}\n")
    monkeypatch.setenv("FOUNDLING_HARDWARE", str(file))
    monkeypatch.setenv("FOUNDLING_HOME", str(tmp_path))
    assert find_gpu("h200").price == 2.5
    mine = find_gpu("mine")
    assert (mine.peaks["bf16"], mine.per_node, mine.memory) == (9e14, 4, TABLE["h200"].memory)
    monkeypatch.delenv("FOUNDLING_HARDWARE")
    monkeypatch.chdir(tmp_path)
    assert find_gpu("h200").price == 2.5


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("mine: {price: 3}", "like"),
        ("h200: {prize: 3}", "prize"),
        ("h200: {price: much}", "price"),
        ("h200: {price: -1}", "above zero"),
        ("h200: 3", "h200"),
        ("h200: {peaks: 3}", "peaks"),
        ("h200: {peaks: {bf17: 9e14}}", "bf17, which is no dtype"),
    ],
)
def test_a_wrong_file_is_a_sentence(
    text: str, named: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "hardware.yaml"
    file.write_text(text)
    monkeypatch.setenv("FOUNDLING_HARDWARE", str(file))
    with pytest.raises(ConfigError, match=named):
        find_gpu("h200")
