"""Muon and AdamW in 8 bits under every layout: the same update as in one process, the same bits
after a resume, and a checkpoint that goes on under another layout."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layout_checks import ALONE, LAYOUTS, TINY, Proving, farthest, same_bits, same_data
from optim_ranks import take_steps
from worlds import World

from foundling.config.model import ModelConfig
from foundling.config.optim import OptimConfig
from foundling.config.parallel import ParallelConfig
from foundling.config.run import RunConfig
from foundling.config.load import load_config

OPTIMIZERS = {
    "muon": OptimConfig(name="muon", lr_of={"embedding": 0.02}),
    "adamw8bit": OptimConfig(name="adamw8bit", clip=0.0),
}
SHAPE = ModelConfig(vocab_size=50, dim=128, layers=3, heads=2, ffn_dim=256)
UPDATED = ["ddp 2", "fsdp 2", "tensor 2", "fsdp 4", "hsdp 2 x 2", "fsdp x tensor 2 x 2"]
RESUMED = ["fsdp 2", "tensor 2"]
SAVED = 4


@pytest.fixture(scope="module")
def prove(
    village: Any, opened: dict[int, World], tmp_path_factory: pytest.TempPathFactory
) -> Proving:
    home = tmp_path_factory.mktemp("optimizers")
    clock = {"train.horizon": "6", "checkpoint.every": str(SAVED), "eval.every": "6"}
    shape = {"model.dim": "128", "model.heads": "2", "model.ffn-dim": "128"}
    config = load_config("hamlet", {**TINY, **clock, **shape})
    config = config.replace(data={"sources": {str(village.text): 1.0}})
    return Proving(home, config, opened)


def planned(kind: str, layout: str) -> RunConfig:
    """Where nothing is tensor-parallel, value gates of one row: a rank has all, the others none."""
    parallel = ParallelConfig(**LAYOUTS[layout][1])
    model = SHAPE if parallel.tensor > 1 else SHAPE.replace(kv_heads=1, value_embeds=True)
    return RunConfig(model=model, optim=OPTIMIZERS[kind], parallel=parallel)


@pytest.fixture(scope="module")
def alone(prove: Proving) -> dict[tuple[str, bool], dict[str, Any]]:
    found = {}
    for kind in OPTIMIZERS:
        for layout in (ALONE, "tensor 2"):
            config = planned(kind, layout).replace(parallel=ParallelConfig())
            found[kind, layout != ALONE] = prove.worlds[1].run(take_steps, config)[0]
    return found


@pytest.mark.parametrize("layout", UPDATED)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_layout_updates_as_one_process_does(
    kind: str, layout: str, prove: Proving, alone: dict[tuple[str, bool], dict[str, Any]]
) -> None:
    results = prove.worlds[LAYOUTS[layout][0]].run(take_steps, planned(kind, layout))
    wanted = alone[kind, "tensor" in layout]
    for found in results:
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            param = name.partition(".")[2].partition(".exp_avg")[0]
            if f"optim.{param}.exp_avg_codes" in wanted:
                # Number by number, so the same bits where no norm of all of them comes in.
                np.testing.assert_array_equal(found[name], value, err_msg=name)
            else:
                np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("kind", ["muon", pytest.param("adamw8bit", marks=pytest.mark.full)])
def test_a_run_resumes_to_the_bit_and_goes_on_under_another_layout(
    kind: str, prove: Proving
) -> None:
    home = prove.home / kind
    home.mkdir()
    optim = prove.config.optim.replace(name=OPTIMIZERS[kind].name)
    mine = Proving(home, prove.config.replace(optim=optim), prove.worlds)
    whole: dict[str, Path] = {name: mine.whole(name) for name in (ALONE, *RESUMED)}
    for name, other in zip(RESUMED, (*RESUMED[1:], RESUMED[0]), strict=True):
        same_bits(whole[name], mine.moved(name, name, SAVED))
        moved = mine.moved(name, other, SAVED)
        for run in (whole[name], moved):
            same_data(whole[ALONE], run)
            assert farthest(whole[ALONE], run) < 1e-4, run.name
    same_bits(whole[ALONE], mine.moved(ALONE, ALONE, SAVED))
