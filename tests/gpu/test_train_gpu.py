"""The same promises on a GPU: it trains, resumes to the same bits when asked to, and speaks.

Run with `make test-gpu` on a machine that has one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from killed_run import assert_goes_on_to_the_same_bits

from foundling.checkpoint.bundle import load_bundle
from foundling.config.data import PhaseConfig
from foundling.config.run import RunConfig
from foundling.generate.engine import Engine
from foundling.generate.request import Request
from foundling.runtime.run_dir import RunDir, read_lines
from foundling.runtime.run_reader import read_events
from foundling.train.loop import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def on_gpu(config: RunConfig, **changes: object) -> RunConfig:
    return config.replace(train={"device": "cuda", **changes})  # type: ignore[arg-type]


def test_segments_of_memory_can_grow() -> None:
    """In a process of its own: this one's allocator is at work already."""
    script = (
        "import torch; from foundling.runtime.device import choose_device;"
        " choose_device('cuda', 'bf16');"
        " kept = torch.empty(1 << 26, device='cuda');"
        " print(*{one['is_expandable'] for one in torch.cuda.memory_snapshot()})"
    )
    free = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    command = [sys.executable, "-c", script]
    told = subprocess.run(command, env=free, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["True"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_it_learns_as_the_cpu_does(dtype: str, tiny: RunConfig, tmp_path: Path) -> None:
    train(tiny, RunDir(tmp_path / "cpu"))
    train(on_gpu(tiny, dtype=dtype), RunDir(tmp_path / "gpu"))
    cpu, gpu = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("cpu", "gpu"))
    # Sums in another order, which Adam's first steps amplify: 2e-4 after eight of them.
    tolerance = 5e-4 if dtype == "fp32" else 1e-2
    for left, right in zip(cpu, gpu, strict=True):
        assert right["loss"] == pytest.approx(left["loss"], rel=tolerance)
        assert right["tokens"] == left["tokens"]
        assert right["memory_reserved"] >= right["memory_allocated"] > 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_killed_run_goes_on_to_the_same_bits(
    dtype: str, tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = on_gpu(tiny, dtype=dtype, deterministic=True)
    assert_goes_on_to_the_same_bits(config, tmp_path, monkeypatch)


def test_blocks_compile_and_agree(tiny: RunConfig, tmp_path: Path) -> None:
    train(on_gpu(tiny, dtype="fp32"), RunDir(tmp_path / "eager"))
    train(on_gpu(tiny, dtype="fp32", compile=True), RunDir(tmp_path / "compiled"))
    eager, compiled = (read_lines(tmp_path / n / "metrics.jsonl") for n in ("eager", "compiled"))
    for left, right in zip(eager, compiled, strict=True):
        assert right["loss"] == pytest.approx(left["loss"], rel=1e-4)


def test_compiled_blocks_live_through_a_change_of_rows(tiny: RunConfig, tmp_path: Path) -> None:
    phases = (PhaseConfig(at=0.5, seq_len=128),)
    longer = tiny.replace(data={"phases": phases})
    train(on_gpu(longer, dtype="fp32"), RunDir(tmp_path / "eager"))
    train(on_gpu(longer, dtype="fp32", compile=True), RunDir(tmp_path / "compiled"))
    eager, compiled = (read_lines(tmp_path / n / "metrics.jsonl") for n in ("eager", "compiled"))
    assert [line["seq_len"] for line in compiled] == [64] * 4 + [128] * 4
    for left, right in zip(eager, compiled, strict=True):
        assert right["loss"] == pytest.approx(left["loss"], rel=1e-4)


def test_evaluation_and_samples_stay_inside_the_trainings_memory(
    tiny: RunConfig, tmp_path: Path
) -> None:
    """003 lost a run to a validation that did not fit."""
    config = on_gpu(tiny, dtype="bf16", batch_size=64, global_batch_tokens=0).replace(
        eval=tiny.eval.replace(every=4, prompts=("About",)),
        data=tiny.data.replace(allow_repeat=100),
    )
    run = RunDir(tmp_path / "run")
    train(config, run)
    trained = max(line["memory_peak"] for line in read_lines(run.metrics_path))
    scored = [line["memory_eval_peak"] for line in read_events(run).measured["evaluated"]]
    assert len(scored) >= 2
    assert 0 < max(scored) <= trained
    reserved = [line["memory_peak_reserved"] for line in read_lines(run.metrics_path)]
    assert reserved[-1] <= 1.1 * reserved[2]


def test_it_speaks_on_the_gpu_as_on_the_cpu(tiny: RunConfig, tmp_path: Path) -> None:
    train(on_gpu(tiny, dtype="fp32"), RunDir(tmp_path / "run"))
    said = []
    for device in ("cpu", "cuda"):
        bundle = load_bundle(tmp_path / "run", device)
        prompt = [bundle.tokenizer.bos_id, *bundle.tokenizer.encode("About")]
        found = Engine(bundle.model, device).complete(
            [Request(prompt=prompt, max_tokens=12), Request(prompt=prompt[:1], max_tokens=12)]
        )
        said.append([completion.ids for completion in found])
    assert said[0] == said[1]
