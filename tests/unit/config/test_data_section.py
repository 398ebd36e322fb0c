"""Phases, buckets and weights that cannot work are refused; those that can come back unchanged."""

from pathlib import Path
from typing import Any

import pytest

from foundling.config.data import PhaseConfig, phase_mixtures, phases_of
from foundling.config.errors import ConfigError
from foundling.config.load import (
    dev_config,
    dump_commented,
    dump_yaml,
    load_config,
    load_run_config,
    settings_help,
)

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a phase at the end": ({"data.phases": "[{at: 1, seq_len: 4}]"}, "begins nowhere"),
    "a phase at half a step": ({"data.phases": "[{at: 2.5, seq_len: 4}]"}, "begins nowhere"),
    "a phase before the run": ({"data.phases": "[{at: -1, seq_len: 4}]"}, "begins nowhere"),
    "a phase for nothing": ({"data.phases": "[{at: 0.5}]"}, "at 0.5 changes nothing"),
    "a phase without a place": (
        {"data.phases": "[{seq_len: 4}]"},
        "data.phases needs at; there are at, seq_len, sources",
    ),
    "an unknown field": (
        {"data.phases": "[{at: 0.5, sq: 4}]"},
        "unknown setting data.phases.sq; there are at",
    ),
    "a wrong type": ({"data.phases": "[{at: 0.5, seq_len: x}]"}, "seq_len must be a whole number"),
    "no list": ({"data.phases": "3"}, r"data.phases\[0\] must be a mapping"),
    "a negative length": (
        {"data.phases": "[{at: 0.5, seq_len: -4}]"},
        "data.phases.seq_len cannot be negative",
    ),
    "a weight of nothing": (
        {"data.phases": "[{at: 0.5, sources: {a: 0}}]"},
        "the weight of a in the phase of data.phases at 0.5 must be positive",
    ),
    "a length that does not divide the batch": (
        {"data.phases": "[{at: 0.5, seq_len: 100}]", "train.global_batch_tokens": "2560"},
        "2560 is not a multiple of the rows' seq_len 100",
    ),
    "rows longer than the model": (
        {
            "data.phases": "[{at: 0.5, seq_len: 512}]",
            "model.positions": "256",
        },
        "rows of 512 tokens and the model has 256 positions",
    ),
    "buckets without bucket": ({"data.bucket_tokens": "99"}, "no effect with data.packing bestfit"),
    "a bucket without room": (
        {"data.packing": "bucket", "data.bucket_tokens": "99"},
        "does not hold one row of 256",
    ),
    "falling buckets": ({"data.packing": "bucket", "data.buckets": "[5, 3]"}, "and rise"),
    "units that do not divide the batch": (
        {"data.packing": "bucket", "train.global_batch_tokens": "20480"},
        "20480 is not a multiple of data.bucket_tokens 16384",
    ),
    "weights of one": (
        {"data.weights_by": "tokens", "data.sources": "a"},
        "weights_by has no effect with one source",
    ),
    "an endless epoch": (
        {"data.follow": "60", "train.horizon": "1 epochs"},
        "train.horizon 1 epochs counts data that data.follow has not seen",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_work_is_refused_in_one_sentence(name: str) -> None:
    settings, words = BAD[name]
    with pytest.raises(ConfigError, match=words) as caught:
        load_config("hamlet", settings)
    assert "\n" not in str(caught.value)


def test_phases_survive_yaml_and_fill_in_what_they_leave_out(tmp_path: Path) -> None:
    config = load_config(
        "hamlet",
        {
            "data.sources": '{"data/a": 3, "data/b": 1}',
            "data.weights_by": "epochs",
            "data.packing": "bucket",
            "data.phases": '[{at: 0.5, seq_len: 512}, {at: 90, sources: {"data/b": 1}, '
            "packing: pad}]",
        },
    )
    assert config.data.phases[0] == PhaseConfig(at=0.5, seq_len=512)
    for dump in (dump_yaml, dump_commented):
        (tmp_path / "run.yaml").write_text(dump(config))
        assert load_run_config(tmp_path / "run.yaml") == config
    mixes = phase_mixtures(config.data, 256)
    assert [sorted(weights) for weights, _ in mixes] == [["data/a", "data/b"]] * 2 + [["data/b"]]
    assert [(cut.seq_len, cut.packing) for _, cut in mixes] == [
        (256, "bucket"),
        (512, "bucket"),
        (512, "pad"),
    ]
    assert mixes[1][1].edges == (256, 512)
    phases = phases_of(config.data, 256, 100)
    assert [(phase.first_step, phase.steps) for phase in phases] == [(0, 50), (50, 40), (90, 10)]
    with pytest.raises(ConfigError, match="at 90 would begin at step 90 of 60"):
        phases_of(config.data, 256, 60)
    assert "--data.phases" in settings_help("foundling train", every=True)


def test_dev_gives_each_phase_a_part_of_its_steps() -> None:
    phases = "[{at: 1000, seq_len: 512}, {at: 2000, packing: pad}]"
    full = load_config("llama-1.24b", {"data.phases": phases})
    config, said = dev_config(full, 5)
    found = phases_of(config.data, config.train.seq_len, 5)
    assert [phase.first_step for phase in found] == [0, 2, 3]
    assert "data.phases at 1000 and 2000 -> at 0.333333 and 0.666667" in said
    for steps, starts in ((1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (4, [0, 1, 3])):
        config, said = dev_config(full, steps)
        found = phases_of(config.data, config.train.seq_len, steps)
        assert [phase.first_step for phase in found] == starts
    assert "data.phases at 1000 and 2000 -> none" in dev_config(full, 1)[1]
