"""Raise a language model from nothing: the verbs of the command line, for Python programs.

    import foundling

    foundling.build_data("books.txt", "work/data", tokenizer="work/tokenizer")
    data = {"sources": {"work/data": 1}}
    foundling.train("hamlet", "runs/a", data=data, train={"horizon": "1 epoch"})
    print(foundling.load("runs/a").generate("Once upon a time"))

The names of `__all__` are public and no others (docs/python.md). Each function calls what its verb
calls, and a mistake raises `foundling.config.errors.UserError` with the verb's own sentence. All is
imported inside the functions, so that `import foundling` is instant and loads no torch.

A `target` (str or Path) is a preset, a YAML file or a run directory; settings are a dict a section,
as in a YAML file: train={"horizon": 100}, optim={"lr": 1e-3}.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foundling.checkpoint.convert.compare_models import Comparison
    from foundling.config.data_manifest import Manifest
    from foundling.config.run import RunConfig
    from foundling.generate.prepare import Weights
    from foundling.generate.text import TextModel
    from foundling.runtime.run_reader import RunData
    from foundling.runtime.versions import __version__

__all__ = [
    "RunConfig", "__version__", "build_data", "convert", "evaluate",
    "load", "load_config", "plan", "read_run", "train",
]  # fmt: skip


def load(
    source: str | Path, *, device: str = "auto", weights: "Weights | None" = None
) -> "TextModel":
    """A trained model, ready to `.generate(prompts)`, `.chat(messages)`, `.stream(prompt)` and
    `.score(texts)`.

    source (str or Path): a run, RUN@STEP, a checkpoint, or a Hugging Face, Meta or DCP folder or
    torch.save file; device (str): auto, cpu, cuda or mps; weights (str): fp32, bf16 or int8 (None:
    bf16 on CUDA, else fp32).
    """
    from foundling.checkpoint.bundle import load_bundle
    from foundling.generate.text import TextModel
    from foundling.runtime.device import choose_device

    bundle = load_bundle(source, choose_device(device, "fp32").device)
    return TextModel(bundle.model, bundle.tokenizer, bundle.context, weights=weights)


def train(
    config: "RunConfig | str | Path",
    run: str | Path,
    *,
    nproc: int | None = None,
    **settings: Mapping[str, Any],
) -> None:
    """Pretrain or fine-tune to the horizon; go on where `run` holds a run that was interrupted.

    config (RunConfig, or a target with settings); run (str or Path): the run directory; nproc
    (int): processes on this machine (None: one a GPU), of which a single one is this process. A
    signal or time limit raises `foundling.runtime.exits.EndOfRun` after a save: call it again.
    """
    from foundling.config.errors import ConfigError
    from foundling.config.run import RunConfig
    from foundling.launch.train_job import job_of
    from foundling.runtime.run_dir import RunDir

    if not isinstance(config, RunConfig):
        config = load_config(config, **settings)
    elif settings:
        raise ConfigError("settings change a preset, a file or a run; give them to load_config.")
    with job_of(config, Path(run), nproc=nproc) as trains_here:
        if trains_here:
            from foundling.train import loop

            loop.train(config, RunDir(run))


def plan(
    target: str | Path,
    *,
    gpu: str = "",
    gpus: int | None = None,
    nodes: Sequence[int] = (),
    price: float | None = None,
    what_if: Sequence[str] = (),
    **settings: Mapping[str, Any],
) -> dict[str, Any]:
    """What a run is, needs, takes and costs, as `plan --json` prints it (dict).

    gpu (str): hardware to plan for, such as "h200" or "h100,h200"; gpus (int): of a node; nodes
    (list of int): several are compared; price (float): dollars an hour for a GPU; what_if
    (list of str): values to compare, as "train.batch_size=8,16".
    """
    from foundling.cli.options import comma_list, config_of
    from foundling.plan.forecast import PlanOptions
    from foundling.plan.summary import PlanRequest, answer_json
    from foundling.tokenizer.tokenizer import Tokenizer

    given = _by_name(settings)
    request = PlanRequest(
        resolved=lambda changes: config_of(str(target), {**given, **changes}),
        gpus=tuple(comma_list(gpu)),
        asked=PlanOptions(gpus=gpus, price=price),
        nodes=tuple(nodes),
        what_if=tuple(what_if),
        fingerprint=lambda folder: Tokenizer.load(folder).fingerprint,
    )
    return answer_json(request)


def evaluate(source: str | Path, tasks: str | Sequence[str], **options: Any) -> dict[str, Any]:
    """Scores of a model by task, as scores.json holds them (dict).

    source (str or Path): as of `load`; tasks (list of str, or one str with commas): "core,bpb", or
    "gsm8k=test.jsonl" with its file; options: fields of `foundling.eval.evaluate.EvalRequest`, such
    as limit, shots (int), device, data (str), out (Path) or fresh (bool).
    """
    from foundling.cli.options import comma_list
    from foundling.eval.evaluate import EvalRequest, score

    words = comma_list(tasks) if isinstance(tasks, str) else list(tasks)
    return score(EvalRequest(source=str(source), tasks=words, **options))


def build_data(
    sources: str | Sequence[str],
    output: str | Path,
    tokenizer: str | Path | None = None,
    *,
    tokens: int | None = None,
    documents: int | None = None,
    val_share: float = 0.02,
    seed: int = 1,
    reading: Mapping[str, Any] | None = None,
    **options: Any,
) -> "Manifest":
    """Build a data set out of text or chats, or go on with a build that was interrupted.

    sources (list of str, or one str): files, folders, patterns, hamlet, hf://datasets/ names or
    recipes; output (str or Path): the folder; tokenizer (str or Path): folder or hf://OWNER/NAME;
    tokens, documents (int): how much at most; val_share (float): of rows held out; seed (int): of
    the shuffle; reading (dict): text, template, where, schema, max_chars, stream; options: those of
    `foundling.data.build.build.build_from_specs`, such as workers (int) or filters (list of str).
    """
    from foundling.data.build.build import build_from_specs
    from foundling.data.open_source import Specs

    specs = Specs(
        specs=(sources,) if isinstance(sources, str) else tuple(sources),
        options=dict(reading or {}),
        seed=seed,
        documents=documents,
        val_share=val_share,
    )
    return build_from_specs(specs, tokenizer, Path(output), max_tokens=tokens, **options)


def convert(source: str | Path, to: str, output: str | Path, **options: Any) -> "Comparison":
    """Write a model in another layout; what was compared, or CheckpointError and nothing written.

    source (str or Path): as of `load`; to (str): native, hf, llama, torch or dcp; output (str or
    Path): folder, or file for torch, which must not exist; options: dtype (str: fp32, bf16, fp16),
    shape (str: preset, config or model that says what a bare source does not), shard_bytes (int).
    """
    from foundling.checkpoint.convert import convert as conversion

    _, compared = conversion.convert(source, Path(output), to, **options)  # type: ignore[arg-type]
    return compared


def read_run(path: str | Path) -> "RunData":
    """What a run directory (str or Path) holds, whole or not: config, metrics, events, scores."""
    from foundling.runtime.run_dir import RunDir
    from foundling.runtime.run_reader import read_run

    return read_run(RunDir(path))


def load_config(target: str | Path, **settings: Mapping[str, Any]) -> "RunConfig":
    """The config of a target and settings, checked: what `train` would run."""
    from foundling.cli.options import config_of
    from foundling.runtime.console import warn

    return config_of(str(target), _by_name(settings), tell=warn)


def _by_name(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """{"train": {"seq_len": 8}} as {"train.seq_len": 8}, which is how flags are given."""
    from foundling.config.errors import ConfigError

    for section, fields in settings.items():
        if not isinstance(fields, Mapping):
            raise ConfigError(f"{section} is a section; give it fields, as {section}={{...}}.")
    return {
        f"{s}.{name}": value for s, fields in settings.items() for name, value in fields.items()
    }


def __getattr__(name: str) -> Any:
    if name == "RunConfig":
        from foundling.config.run import RunConfig

        return RunConfig
    if name == "__version__":
        from foundling.runtime.versions import __version__

        return __version__
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)


class _Package(ModuleType):
    """Keeps `train` and `plan`, functions here and folders beside: the first import from such a
    folder has python bind the folder's name, where the function must stay."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
