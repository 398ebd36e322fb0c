"""What saving costs, as the plan says it."""

import pytest
from asking import said

from foundling.config.load import load_config
from foundling.plan.forecast import PlanOptions, study
from foundling.plan.roofline import COEFFICIENTS as K
from foundling.plan.speed import compile_s
from foundling.plan.supply import COPY_RATE, plan_saving


def test_eight_billion_parameters_on_64_nodes() -> None:
    found = study(load_config("llama3.1-8b"), "mi250x", PlanOptions(nodes=64))
    saving = found.saving
    assert saving.checkpoint_bytes == 12 * 8_030_261_248
    assert saving.rank_bytes == saving.checkpoint_bytes // 512
    assert saving.stall_s < 0.1
    assert saving.share < 1e-4
    assert found.to_json()["saving"]["write_s"] == pytest.approx(
        12 * 8.03e9 / 64 / 0.75e9, rel=0.01
    )


def test_one_rank_copies_it_all_and_is_warned_of_a_short_interval() -> None:
    settings = {"checkpoint.every": "3", "train.batch-size": "4", "train.global-batch-tokens": "0"}
    config = load_config("llama-1.24b", settings)
    alone = plan_saving(config, ranks=1, nodes=1, step_s=0.5)
    assert alone.rank_bytes == alone.checkpoint_bytes
    assert alone.stall_s == pytest.approx(alone.checkpoint_bytes / COPY_RATE)
    assert alone.share == pytest.approx(alone.stall_s / 1.5)
    told = " ".join(study(config, "h200", PlanOptions()).warnings)
    assert "stops training for 0.3 s" in told
    assert "training will wait for the disk" in told


def test_all_of_a_run_is_planned_beside_its_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """1,000 steps, saved and scored every 200: five saves, of which the last is waited for."""
    settings = {"train.horizon": "1000", "eval.tokens": "65536", "train.batch-size": "16"}
    found = study(load_config("llama-1.24b", settings), "h200", PlanOptions(gpus=1))
    wall, saving, step_s = found.wall, found.saving, found.choice.speed.step_s
    assert wall is not None
    assert found.horizon is not None
    assert wall.train_s == pytest.approx(1000 * step_s)
    assert wall.save_s == pytest.approx(5 * (saving.stall_s + K.save_s) + saving.write_s)
    token_s = step_s / found.horizon.positions_per_step / 3
    assert wall.eval_s == pytest.approx(5 * 65536 * token_s)
    assert found.to_json()["wall"]["start_s"] == wall.start_s > 1
    assert compile_s("cuda", "model") > compile_s("cuda", "blocks") == wall.compile_s > 1
    told = said(capsys, "plan llama-1.24b --gpu h200 --train.horizon 1000 --train.compile off")
    assert f"beside them: start {wall.start_s:.0f} s, compilation 0 s, saves" in told
