"""A TARGET and flags become one config, and a mistake becomes one sentence."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from foundling.config.base import whole_number
from foundling.config.data_manifest import Manifest
from foundling.config.errors import ConfigError
from foundling.config.load import (
    SECTIONS,
    dev_config,
    differences,
    dump_yaml,
    load_config,
    settings_help,
)
from foundling.config.presets import PRESETS
from foundling.config.run import RunConfig
from foundling.config.train import TrainConfig
from foundling.plan.supply import known_sizes


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_its_own_yaml(name: str, tmp_path: Path) -> None:
    config = load_config(name)
    path = tmp_path / "run.yaml"
    path.write_text(dump_yaml(config))
    assert load_config(str(path)) == config


def test_precedence_is_preset_file_flag(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("preset: hamlet\ntrain:\n  seq-len: 128\n  batch_size: 4\n")
    config = load_config(str(path), {"train.batch-size": "2"})
    assert config.model == load_config("hamlet").model
    assert (config.train.seq_len, config.train.batch_size) == (128, 2)


def test_a_horizon_given_above_replaces_the_one_below() -> None:
    config = load_config("hamlet", {"train.horizon": "7"})
    assert (config.train.horizon_in("steps"), config.train.horizon_in("tokens")) == (7, 0)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("20B tokens", "20B tokens"),
        ("20_000_000_000 tokens", "20B tokens"),
        ("123456 tokens", "123456 tokens"),
        ("1 epoch", "1 epochs"),
        ("2.5epochs", "2.5 epochs"),
        ("20 tokens/param", "20 tokens/param"),
        ("1e19 flops", "1e+19 flops"),
        ("8 hours", "8 hours"),
        ("40  dollars", "40 dollars"),
        ("500 steps", "500 steps"),
        ("1e3", "1K steps"),
        ("7", "7 steps"),
        ("0", ""),
        ("", ""),
    ],
)
def test_a_horizon_is_a_number_and_its_unit(text: str, kept: str) -> None:
    train = TrainConfig(horizon=text)
    assert train.horizon == kept
    assert TrainConfig(horizon=kept) == train


@pytest.mark.parametrize(
    "text", ["many", "2.5 tokens", "2.5", "-1", "1 day", "1e400 tokens", "B tokens", "1.2.3", "nan"]
)
def test_what_is_no_horizon_is_told_what_is(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^train\.horizon must be a number of steps, or such as"):
        TrainConfig(horizon=text)


@pytest.mark.parametrize(
    ("set_below", "switch", "value"),
    [
        ("eval: {every: 9, tokens: 100}", "eval.every", "0"),
        ("eval: {prompts: [a]}", "eval.every", "0"),
        ("eval: {tasks: [core], tasks_every: 9, tasks_limit: 3}", "eval.tasks", "[]"),
        ("log: {wandb: online, project: mine}", "log.wandb", "off"),
        ("model: {rope_scaling: {factor: 8, high: 5}}", "model.positions", "512"),
        ("optim: {name: muon, momentum: 0.9}", "optim.name", "adamw"),
        ("optim: {schedule: wsd, decay_share: 0.3}", "optim.schedule", "cosine"),
        ("parallel: {shard: 2, reshard: false}", "parallel.shard", "1"),
        ("data: {packing: bucket, bucket_tokens: 9999}", "data.packing", "concat"),
        ("train: {float8: tensorwise, float8_skip: [attn]}", "train.float8", "none"),
    ],
)
def test_what_a_file_set_can_be_switched_off(
    set_below: str, switch: str, value: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"preset: hamlet\n{set_below}\n")
    load_config(str(file))
    section = switch.partition(".")[0]
    found, wanted = (load_config(target, {switch: value}) for target in (str(file), "hamlet"))
    assert getattr(found, section) == getattr(wanted, section)


def test_what_was_idle_before_the_switch_stays_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    for text, flags in (
        ("eval: {every: 0, tokens: 100}", {}),
        ("eval: {every: 0, tokens: 100}", {"eval.every": "0"}),
        ("eval: {every: 9, tokens: 100}", {"eval.every": "0", "eval.tokens": "50"}),
    ):
        file.write_text(f"preset: hamlet\n{text}\n")
        with pytest.raises(ConfigError, match=r"eval\.tokens has no effect"):
            load_config(str(file), flags)


def test_dashes_and_underscores_are_the_same(tmp_path: Path) -> None:
    assert load_config("hamlet", {"train.seq-len": "64"}) == load_config(
        "hamlet", {"train.seq_len": "64"}
    )
    for key in ("seq-len", "seq_len"):
        path = tmp_path / f"{key}.yaml"
        path.write_text(f"train: {{{key}: 64, horizon: 3}}\n")
        assert load_config(str(path)).train.seq_len == 64


@pytest.mark.parametrize(
    ("text", "value"), [("300", 300), ("20B", 20 * 10**9), ("3.5M", 3_500_000), ("1e6", 10**6)]
)
def test_numbers_as_people_write_them(text: str, value: int) -> None:
    assert whole_number(text) == value
    train = load_config("hamlet", {"train.horizon": f"{text} tokens"}).train
    assert train.horizon_in("tokens") == value


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        (
            "train.compile",
            "foo",
            r"one of auto, off, blocks, model, graphs, not 'foo'",
        ),
        ("train.horizon", "1e400", "a number of steps, or such as 20B tokens"),
        ("train.global_batch_tokens", "9e999B", "a whole number such as 300"),
    ],
)
def test_a_wrong_value_is_told_in_our_words(setting: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"{setting} must be {said}"):
        load_config("hamlet", {setting: value})


def test_a_list_needs_no_brackets() -> None:
    eight = {"train.float8": "tensorwise"}
    for text in ("attn", "attn,layers.0", "[attn, layers.0]"):
        wanted = ("attn",) if text == "attn" else ("attn", "layers.0")
        found = load_config("llama-1.24b", {**eight, "train.float8-skip": text})
        assert found.train.float8_skip == wanted
    bucketed = {"data.packing": "bucket"}
    for text in ("64", "64,128", "[64, 128]", "(64,128)", "64,128,"):
        found = load_config("hamlet", {**bucketed, "data.buckets": text})
        assert found.data.buckets == ((64,) if text == "64" else (64, 128))
    longer = {**bucketed, "train.seq-len": "2000", "data.buckets": "1K,2e3"}
    assert load_config("hamlet", longer).data.buckets == (1000, 2000)
    assert load_config(
        "llama-1.24b", {**eight, "train.float8-skip": "attn,"}
    ).train.float8_skip == ("attn",)


@given(st.integers(min_value=0, max_value=10**15))
def test_whole_numbers_are_exact(value: int) -> None:
    assert whole_number(str(value)) == value


MISTAKES = {
    "unknown field": ({"train.seqlen": "4"}, "train.seq_len"),
    "field of another section": ({"train.lr": "4"}, "optim.lr"),
    "unknown section": ({"trian.steps": "4"}, "train"),
    "wrong type": ({"train.horizon": "many"}, "train.horizon"),
    "fraction for a whole number": ({"train.horizon": "2.5 tokens"}, "20B tokens"),
    "not an option": ({"data.packing": "tight"}, "concat, bestfit"),
    "no effect: decay": ({"optim.decay-share": "0.3"}, "optim.decay_share"),
    "no effect: final": (
        {"optim.schedule": "constant", "optim.final-lr-share": "0.1"},
        "optim.final_lr_share",
    ),
    "no effect: project": ({"log.project": "x"}, "log.project"),
    "half a step of warm-up": ({"optim.warmup": "5.5"}, "optim.warmup is a share below 1 or"),
    "a rate of no part": ({"optim.lr-of.haed": "1"}, "one of embedding, head, vector"),
    "negative": ({"train.horizon": "-1"}, "train.horizon"),
    "batch not of rows": ({"train.global-batch-tokens": "1000"}, "global_batch_tokens"),
    "heads do not divide": ({"model.heads": "5"}, "model.dim"),
    "kv heads do not divide": ({"model.kv-heads": "4"}, "model.kv_heads"),
    "not a setting": ({"steps": "3"}, "train.horizon"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_sentence_that_names_the_thing(case: str) -> None:
    flags, named = MISTAKES[case]
    with pytest.raises(ConfigError) as caught:
        load_config("clm-60m", flags)
    sentence = str(caught.value)
    assert named in sentence
    assert "\n" not in sentence
    assert sentence.endswith((".", "?"))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("train: {horizon: 3, horizon: 4}", "given twice"),
        ("train: [1, 2]", "section train"),
        ("train: {horizon: 3", "not valid YAML"),
        ("- a", "must hold sections"),
        ("preset: hamlte\ntrain: {horizon: 3}", "hamlet"),
        ("schema: 99\ntrain: {horizon: 3}", "schema 99"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
        ("train: " + "[" * 20_000 + "]" * 20_000, "nested too deeply"),
        ("train: " + "{a: " * 20_000 + "}" * 20_000, "nested too deeply"),
    ],
    ids=lambda text: text[:30],
)
def test_a_bad_file_is_refused(text: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=named):
        load_config(str(path))


def test_a_missing_file_and_an_unknown_preset() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config("nowhere.yaml")
    with pytest.raises(ConfigError, match="did you mean hamlet"):
        load_config("hamlte")


def test_yaml_off_is_a_word(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("log: {wandb: off}\ntrain: {horizon: 1, compile: off}\n")
    config = load_config(str(path))
    assert config.log.wandb == "off"
    assert config.train.compile == "off"


def test_a_mapping_and_a_list_can_be_flags() -> None:
    flags = {"data.sources": '{"a/b": 2, "c": 1.5}', "eval.prompts": '["Once upon", "Dear"]'}
    config = load_config("hamlet", flags)
    assert config.data.sources == {"a/b": 2.0, "c": 1.5}
    assert config.eval.prompts == ("Once upon", "Dear")


def test_differences_name_the_field() -> None:
    old = load_config("hamlet")
    new = old.replace(optim={"lr": 0.5})
    assert [(c.field, c.old, c.new) for c in differences(old, new)] == [
        ("optim.lr", old.optim.lr, 0.5)
    ]


def test_dev_shrinks_and_says_so() -> None:
    config, said = dev_config(load_config("llama-1.24b"), 5)
    assert (config.train.horizon_in("steps"), config.train.horizon_in("tokens")) == (5, 0)
    assert config.train.global_batch_tokens == 0
    assert "train.horizon 20B tokens -> 5 steps" in said
    assert "global_batch_tokens" in said


def test_every_field_has_help() -> None:
    text = settings_help("foundling train", every=True)
    assert "--train.kernels.attention-masked" in text
    assert "--model.init.outputs" in text
    for section, kind in SECTIONS.items():
        for name in kind.model_fields:
            flag = f"--{section}.{name.replace('_', '-')}"
            line = next(line for line in text.splitlines() if line.split()[:1] == [flag])
            assert len(line.split()) > 3, f"{flag} has no help"


def test_the_default_config_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RunConfig().train.seq_len = 3  # type: ignore[misc]


def test_what_is_read_twice_is_equal_and_not_the_same_object() -> None:
    one, other = (load_config("hamlet", {"data.sources": '{"a": 1.0}'}) for _ in range(2))
    one.data.sources["b"] = 2.0
    assert other.data.sources == {"a": 1.0}
    assert load_config("hamlet", {"data.sources": '{"a": 1.0}'}).data.sources == {"a": 1.0}
    assert load_config("hamlet", {"train.horizon": "3"}).train.horizon_in("steps") == 3
    assert load_config("hamlet", {"train.horizon": "4"}).train.horizon_in("steps") == 4


@pytest.mark.parametrize("where", ["flags", "file"])
def test_a_depth_presets_rates_follow_the_batch_that_was_set(where: str, tmp_path: Path) -> None:
    """The square root of the batch, but for what the user set; and one line says so."""
    preset, told = load_config("depth-12"), list[str]()
    target, flags = "depth-12", {"train.global-batch-tokens": "131072", "optim.lr-of.head": "0.5"}
    if where == "file":
        target, flags = str(tmp_path / "run.yaml"), {}
        Path(target).write_text(
            "preset: depth-12\ntrain: {global-batch-tokens: 131072}\noptim: {lr-of: {head: 0.5}}\n"
        )
    config = load_config(target, flags, told.append)
    assert preset.train.global_batch_tokens == 4 * config.train.global_batch_tokens
    assert config.optim.lr == pytest.approx(preset.optim.lr / 2)
    for name in ("embedding", "vector"):
        assert config.optim.lr_of[name] == pytest.approx(preset.optim.lr_of[name] / 2)  # type: ignore[index]
    assert config.optim.lr_of["head"] == 0.5
    assert config.optim.weight_decay == preset.optim.weight_decay
    (line,) = told
    assert "131,072 tokens a step" in line
    assert "optim.lr 0.01, optim.lr_of.embedding 0.15, optim.lr_of.vector 0.005" in line


@pytest.mark.parametrize(
    "flags",
    [
        {"train.batch-size": "4"},
        {"train.global-batch-tokens": "524288"},
        {"train.global-batch-tokens": "131072", "optim.name": "adamw", "optim.lr": "1e-3",
         "optim.lr-of": "{}", "optim.weight-decay": "0.2",
         "optim.cautious-decay": "false", "optim.muon-scale": "rms"},
    ],
)  # fmt: skip
def test_rates_that_nothing_moves_stay_and_nothing_is_said(flags: dict[str, str]) -> None:
    told = list[str]()
    optim = load_config("depth-12", flags, told.append).optim
    assert optim.lr == float(flags.get("optim.lr", 0.02))
    assert bool(optim.lr_of) == (optim.name == "muon")
    assert not told


def test_a_batch_left_to_the_processes_is_told_beside_rates_of_another() -> None:
    told = list[str]()
    assert load_config("depth-12", {"train.global-batch-tokens": "0"}, told.append).optim.lr == 0.02
    load_config("hamlet", {"model.layers": "2", "optim.name": "muon"}, told.append)
    assert len(told) == 1
    assert "global_batch_tokens 0" in told[0]


@pytest.mark.parametrize("target", ["qwen2-0.5b-gpt2", "tinygpt-524m"])
def test_a_presets_vocabulary_grows_to_the_tokenizers(target: str, tmp_path: Path) -> None:
    """foundling's own GPT-2 data have its special tokens too: more than either account had."""
    Manifest(
        name="text", kind="text", tokenizer="x", vocab_size=50264, token_dtype="uint16",
        train=(), val=(),
    ).save(tmp_path)  # fmt: skip
    data, told = {"data.sources": str(tmp_path)}, list[str]()
    alone = load_config(target, {}, told.append).model.vocab_size
    assert alone in (50257, 50258)
    assert told == []
    assert load_config(target, data, told.append).model.vocab_size == 50264
    assert told == [
        f"the preset's model.vocab_size {alone:,} grows to the tokenizer's 50,264 tokens."
    ]
    path = tmp_path / "run.yaml"
    path.write_text(f"preset: {target}\nmodel: {{vocab-size: 50258}}\n")
    for own in (
        load_config(target, {**data, "model.vocab-size": "50258"}),
        load_config(str(path), data),
    ):
        assert own.model.vocab_size == 50258
        with pytest.raises(ConfigError, match=r"50258 and the tokenizer has 50264"):
            known_sizes(own)
    larger = load_config("depth-12", data, told.append).model.vocab_size
    assert load_config("llama-1.24b", data, told.append).model.vocab_size == 131072
    assert (larger, len(told)) == (50264, 2)


def test_weights_bring_their_shape_and_a_vocabulary_that_may_grow(tmp_path: Path) -> None:
    """However they are named; what is set beside them is left, for training to refuse."""
    own = {"dim": 96, "layers": 3, "heads": 4, "vocab_size": 4096}

    def shape_of(source: str) -> dict[str, int]:
        assert source == "work/run"
        return own

    def shape(target: str, **settings: str) -> dict[str, int]:
        more = {name.replace("__", "."): value for name, value in settings.items()}
        model = load_config(target, more, shape_of=shape_of).model
        return {name: getattr(model, name) for name in own}

    file = tmp_path / "run.yaml"
    file.write_text("preset: hamlet-chat\ntrain: {start: work/run}\n")
    assert shape("hamlet-chat", train__start="work/run") == shape(str(file)) == own
    (tmp_path / "whole.yaml").write_text(
        dump_yaml(load_config("hamlet-chat", {"train.start": "x"}))
    )
    assert shape(str(tmp_path / "whole.yaml"), train__start="work/run") == own
    assert shape("hamlet-chat", train__start="work/run", model__dim="32")["dim"] == 32
    Manifest(
        name="text", kind="chat", tokenizer="x", vocab_size=4100, token_dtype="uint16",
        train=(), val=(),
    ).save(tmp_path)  # fmt: skip
    grown = shape("hamlet-chat", train__start="work/run", data__sources=str(tmp_path))
    assert grown == {**own, "vocab_size": 4100}
