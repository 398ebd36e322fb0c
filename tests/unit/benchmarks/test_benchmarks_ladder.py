"""`benchmarks.ladder`: what each rung is asked, and what is made of its answer."""

import io
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import ladder, ladder_rung
from benchmarks.ladder import LADDER, bench_ladder, describe_ladder
from benchmarks.ladder_rung import climb, compile_loss, largest_batch
from foundling.cli.main import run_one
from foundling.config.load import dump_yaml, load_config
from foundling.config.model import ModelConfig
from foundling.config.run import RunConfig
from foundling.model.loss import IGNORE
from foundling.model.transformer import Transformer
from foundling.parallel.losses import LossModule, plain_loss
from foundling.profiling.step_runner import StepRunner
from foundling.runtime.device import choose_device
from foundling.runtime.processes import ChildResult


def test_each_rung_adds_what_its_name_says() -> None:
    config = load_config("llama-1.24b", {})
    rungs = [rung.config(config) for rung in LADDER]
    assert [c.train.compiles for c in rungs] == [False, True, True, True, True, True]
    assert [c.train.dtype for c in rungs] == ["fp32", "fp32", *["auto"] * 4]
    assert [rung.fused for rung in LADDER] == [False, False, False, True, True, True]
    assert [c.parallel.recompute for c in rungs] == [*["none"] * 4, "every-2", "all"]
    assert all(c.train.kernels.loss == "plain" for c in rungs)
    # Theirs kept every score in fp32; nobody reaches their speed so in bf16.
    for masks in ("attention", "attention_masked"):
        assert [getattr(c.train.kernels, masks) for c in rungs] == ["math", "math", *["auto"] * 4]
    for rung in LADDER:  # their own arithmetic, to the figure they printed
        told = rung.batch * 2048 / rung.step_s
        assert told == pytest.approx(rung.tokens_per_s, rel=0.01)


def test_a_rung_that_fails_leaves_the_rest(small: RunConfig) -> None:
    asked = []

    def start(given: str) -> ChildResult:
        asked.append(json.loads(given))
        if len(asked) == 1:
            return ChildResult(1, "", "Traceback\nboom", 1.0)
        here = {"dtype": "float32"}
        row = {"rows": 8, "step_s": 0.5, "reserved": 2e9, "allocated": 1e9, "tokens_per_s": 256.0}
        return ChildResult(
            0, "noise\n" + json.dumps({"same": None, "largest": row, "chosen": [], **here}), "", 1.0
        )

    found = list(
        bench_ladder(small, steps=2, most=8, memory_gb=0, limit_s=9, only=(1, 3), start=start)
    )
    assert [one.name for one in found] == ["fp32, eager", "+ bf16"]
    assert [given["batch"] for given in asked] == [3, 8]
    assert found[0].refusal == "boom"
    lines = describe_ladder(found, "here")
    assert any("62,400" in line and "2.0 GB" in line for line in lines)
    assert "fp32, eager: boom" in lines
    assert "float32 stands in for bf16: the default on this device" in lines
    assert any("8 (--most)" in line for line in lines)


def test_a_rung_climbs_in_a_process_of_its_own(small: RunConfig) -> None:
    (found,) = bench_ladder(small, steps=1, most=4, memory_gb=0, limit_s=120, only=(1,))
    assert found.refusal == ""
    assert found.same is not None
    assert found.largest is not None
    assert (found.same["rows"], found.largest["rows"]) == (3, 4)
    assert found.largest["tokens_per_s"] == pytest.approx(4 * 32 / found.largest["step_s"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own imports
def test_a_compiled_rung_has_the_eager_rungs_loss() -> None:
    """Whole logits go through a compiled loss there: the gradients must be the plain ones."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 8, 96, generator=generator)
    targets = torch.randint(96, (2, 8), generator=generator)
    targets[0, :3] = IGNORE
    model = Transformer(ModelConfig(vocab_size=96, dim=32, layers=1, heads=2, ffn_dim=64))
    module = LossModule(model, "plain")
    found = []
    for compiles in (False, True):
        if compiles:
            compile_loss(module)
        given = logits.clone().requires_grad_()
        total, count = module.of_logits(given, targets)
        total.backward()
        assert given.grad is not None
        found.append((total.detach(), count, given.grad))
    assert module.of_logits is not plain_loss
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager)
    assert found[1][2].norm() > 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("rung", "compiled"), [(1, False), (2, True)])
def test_the_loss_is_compiled_where_the_rung_is(
    rung: int, compiled: bool, small: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[torch.nn.Module] = []
    monkeypatch.setattr(ladder_rung, "tie_to_parent", lambda: None)
    monkeypatch.setattr(ladder_rung, "climb", lambda runner, asked: {"same": None, "largest": None})
    monkeypatch.setattr(ladder_rung, "compile_loss", told.append)
    config = LADDER[rung - 1].config(small).model_dump_json()
    asked = {"config": config, "fused": True, "memory_gb": 0}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(asked)))
    ladder_rung.main()
    assert bool(told) is compiled


def test_a_rung_whose_moments_never_fit_says_so(small: RunConfig, no_moments: list[int]) -> None:
    runner = StepRunner(small, choose_device("cpu", "fp32"))
    found = climb(runner, {"batch": 3, "most": 4, "steps": 1})
    assert found == {"same": None, "largest": None}
    answer = json.dumps({**found, "chosen": [], "dtype": "float32"})
    (rung,) = bench_ladder(
        small,
        steps=1,
        most=4,
        memory_gb=0,
        limit_s=9,
        only=(1,),
        start=lambda _: ChildResult(0, answer, "", 1.0),
    )
    assert "not even one row fits" in rung.refusal


def test_a_ladder_on_which_nobody_climbs_fails(
    small: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(dump_yaml(small))
    answers = [ChildResult(1, "", "boom", 1.0)]
    monkeypatch.setattr("benchmarks.ladder.run_child", lambda *_, **__: answers[-1])
    words = ("benchmarks.ladder", ladder.PROGRAM, [str(file), "--only", "1,2"])
    with pytest.raises(SystemExit) as ended:
        run_one(*words)
    assert ended.value.code == 1
    row = {"rows": 4, "step_s": 0.5, "reserved": 2e9, "allocated": 1e9, "tokens_per_s": 256.0}
    lines = ["attention by math (WARNING: slow)", "compile blocks (the default on CUDA)"]
    found = {"same": row, "largest": row, "chosen": lines, "dtype": "float32"}
    answers.append(ChildResult(0, json.dumps(found), "", 1.0))
    run_one(*words)
    told = capsys.readouterr().err
    assert told.count("warning: attention by math (WARNING: slow)") == 2, "of each rung"
    assert told.count("chosen: compile blocks") == 2


@given(
    st.integers(0, 70),
    st.integers(1, 64),
    st.integers(0, 50),
    st.booleans(),
    st.floats(0.5, 1.5),
)
def test_the_largest_that_fits_is_found_to_the_row(
    end: int, most: int, fixed: int, knows_room: bool, bend: float
) -> None:
    asked: list[int] = []

    def peak(rows: int) -> int | None:
        asked.append(rows)
        assert 1 <= rows <= most
        return int(fixed + 10 * rows**bend) if rows <= end else None

    room = int(fixed + 10 * end**bend) if knows_room else 0
    assert largest_batch(peak, most=most, room=room) == min(end, most)
    assert len(asked) == len(set(asked))


def test_a_straight_line_needs_few_tries() -> None:
    asked: list[int] = []

    def peak(rows: int) -> int | None:
        asked.append(rows)
        return 20 + 3 * rows if rows <= 43 else None

    assert largest_batch(peak, most=256, room=20 + 3 * 43 + 2, known={16: 68}) == 43
    assert len(asked) <= 4
