"""Weights by rows, tokens, documents and epochs: what is asked for is what is read."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unique_data import write_data

from foundling.config.data import DataConfig, packing_spec_of
from foundling.config.mixture import row_weights
from foundling.config.packing_spec import PackedSize
from foundling.data.batch_reader import BatchReader
from foundling.data.dataset import DataSet
from foundling.data.order import reopen_order

NAMES = ("a", "b", "c")
sizes_of_sources = st.tuples(
    *(
        st.builds(
            lambda units, tokens, documents: PackedSize(units, units * 99, tokens, documents),
            st.integers(1, 10_000),
            st.integers(1, 10**7),
            st.integers(1, 10**5),
        )
        for _ in NAMES
    )
)


@settings(max_examples=100, deadline=None)
@given(
    sizes_of_sources,
    st.tuples(*(st.floats(0.1, 10) for _ in NAMES)),
    st.sampled_from(["rows", "tokens", "documents", "epochs"]),
)
def test_weights_share_out_what_they_are_given_by(
    sizes: tuple[PackedSize, ...], shares: tuple[float, ...], by: str
) -> None:
    given_sizes, weights = (
        dict(zip(NAMES, sizes, strict=True)),
        dict(zip(NAMES, shares, strict=True)),
    )
    rows = row_weights(weights, by, given_sizes)  # type: ignore[arg-type]
    if by == "rows":
        assert rows == weights
    total = {
        name: {
            "rows": rows[name],
            "tokens": rows[name] * size.tokens / size.units,
            "documents": rows[name] * size.documents / size.units,
            "epochs": rows[name] / size.units,
        }[by]
        for name, size in given_sizes.items()
    }
    for name in NAMES:
        share = total[name] / sum(total.values())
        assert share == pytest.approx(weights[name] / sum(weights.values()))


@pytest.mark.parametrize("by", ["rows", "tokens", "documents", "epochs"])
def test_what_a_run_reads_has_the_shares_that_were_asked_for(tmp_path: Path, by: str) -> None:
    lengths = {"a": [[40] * 60], "b": [[7] * 300], "c": [[15, 90] * 80]}
    sources: dict[str, DataSet] = {
        name: write_data(tmp_path / name, shards, name=name) for name, shards in lengths.items()
    }
    weights = {"a": 3.0, "b": 2.0, "c": 5.0}
    data = DataConfig(sources=weights, weights_by=by, packing="bestfit")  # type: ignore[arg-type]
    spec, steps, rows = packing_spec_of(64, "bestfit"), 400, 30
    order = reopen_order(
        (), sources, data, seed=1, seq_len=64, steps=steps, global_batch_tokens=rows * 64
    )
    loader = BatchReader(sources, order, micro_tokens=rows * 64)
    read: dict[str, Counter[str]] = {name: Counter() for name in sources}
    for step in range(steps):
        for batch in loader.step(step):
            for name, units in batch.units.items():
                read[name].update(rows=units, tokens=batch.by_source[name].tokens)
    sizes = {name: data_set.size(spec) for name, data_set in sources.items()}
    for name in sources:
        read[name]["documents"] = round(
            read[name]["rows"] * sizes[name].documents / sizes[name].units
        )
        read[name]["epochs"] = round(1e6 * read[name]["rows"] / sizes[name].units)
    total = sum(read[name][by] for name in sources)
    for name in sources:
        assert read[name][by] / total == pytest.approx(weights[name] / 10, abs=0.004)
    found = order.epochs(order.sample_of(steps))
    for name in sources:
        part = read[name]["epochs"] / read["a"]["epochs"]
        assert found[name] / found["a"] == pytest.approx(part, rel=0.01)
