"""A model on the server: its engine, its questions, and the newer one of a live run.

What does not fit the memory is refused before any weights are read, with the plan's numbers.
`--follow` looks for a newer checkpoint now and then; a new engine takes the new requests and the
old one ends with its last. Rejected: new weights into the old engine, whose running answers would
be of two models.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from foundling.checkpoint.bundle import Bundle, load_bundle, model_of
from foundling.checkpoint.convert.detect import kind_of
from foundling.checkpoint.paths import checkpoint_root_of, run_of
from foundling.checkpoint.retention import latest
from foundling.config.errors import ConfigError, UserError
from foundling.eval.evaluate import QUIZ_SEED, find_material
from foundling.generate.prepare import Weights
from foundling.generate.request import Request
from foundling.generate.text import TextEngine, open_engine
from foundling.hamlet.quiz import QuizQuestion, quiz
from foundling.hamlet.village import Village
from foundling.plan.params import count_params
from foundling.plan.serving import STEP_TOKENS, ServingPlan, plan_serving, weight_bytes
from foundling.runtime.console import say, size, warn
from foundling.runtime.device import memory_free
from foundling.serve.answers import TokenTexts
from foundling.serve.engine_thread import EngineThread
from foundling.serve.metrics import ModelMetrics

FOLLOW_S = 10.0
"""Between two looks for a newer checkpoint."""
QUESTIONS = 40
"""About the village, that the page may offer."""


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """How engines are made."""

    device: torch.device
    weights: Weights | None = None
    cache_bytes: int = 0
    """Of keys and values, all models together, with --follow the newer ones too (0: what the memory
    leaves)."""
    max_running: int = 0
    max_length: int = 0
    """Tokens of a request, prompt and answer (0: the rows that the model was trained on)."""

    @property
    def precision(self) -> Weights:
        """Of the weights, where it is not said."""
        return self.weights or ("bf16" if self.device.type == "cuda" else "fp32")


@dataclass(frozen=True)
class Opened:
    """A loaded model and its engine."""

    bundle: Bundle
    thread: EngineThread
    context: int
    """Tokens of a request, prompt and answer."""

    @cached_property
    def texts(self) -> TokenTexts:
        """How its tokens are told."""
        return TokenTexts(self.bundle.tokenizer)


class ServedModel:
    """One of the server's models, by the name that requests call it."""

    def __init__(self, source: str, id: str, limits: EngineLimits, cache_bytes: int) -> None:
        self.source, self.id = source, id
        self.created = int(time.time())
        self.metrics = ModelMetrics()
        self._limits, self._cache_bytes = limits, cache_bytes
        self.now = self._open()

    def _open(self) -> Opened:
        bundle = load_bundle(self.source, self._limits.device)
        context = self._limits.max_length or bundle.context
        positions = bundle.model.max_positions
        if positions and context > positions:
            raise ConfigError(
                f"--max-length is {context:,} and {self.source} has {positions:,} positions; give"
                " at most those."
            )
        engine = open_engine(
            bundle.model,
            weights=self._limits.precision,
            cache_bytes=self._cache_bytes,
            max_running=self._limits.max_running,
            max_length=context,
        )
        # Once through, so that what does not fit fails now and the first client does not wait.
        # Of several tokens and requests: each kind of step compiles something of its own.
        few = Request(prompt=[bundle.tokenizer.bos_id], max_tokens=max(1, min(6, context - 1)))
        engine.complete([few])
        engine.complete([few, few])
        text = TextEngine(engine, bundle.tokenizer)
        return Opened(bundle, EngineThread(text, self.id, self.metrics), context)

    @property
    def can_chat(self) -> bool:
        """Whether it was taught to answer."""
        return self.now.bundle.is_chat

    @cached_property
    def questions(self) -> dict[str, QuizQuestion]:
        """Questions about the village that it was raised on; none for another model."""
        seed = find_material(self.now.bundle, "").village
        if seed is None:
            return {}
        return {one.prompt: one for one in quiz(Village(seed), QUIZ_SEED, QUESTIONS)}

    async def follow(self) -> None:
        """Take each newer whole checkpoint of a live run, for ever."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            try:
                opened = await asyncio.to_thread(self._newer)
            except (UserError, RuntimeError, MemoryError) as error:
                warn(f"{self.id} stays at step {self.now.bundle.step:,}: {error}")
                continue
            if opened is not None:
                old, self.now = self.now, opened
                old.thread.stop(when_idle=True)
                say(f"{self.id} is now of step {opened.bundle.step:,}")

    def _newer(self) -> Opened | None:
        newest = latest(checkpoint_root_of(run_of(self.source)))
        if newest is None or newest == self.now.bundle.path:
            return None
        return self._open()


def open_models(
    sources: Sequence[str], limits: EngineLimits, *, follow: bool
) -> dict[str, ServedModel]:
    """The models of these sources by their names; refused where they do not fit together."""
    if follow:
        for source in sources:
            if kind_of(source) != "native" or "@" in source:
                raise ConfigError(
                    f"--follow takes the newest checkpoint of a run, and {source} is none; give a"
                    " run directory."
                )
    plan = plan_models(sources, limits, follow=follow)
    if limits.cache_bytes > plan.cache:
        raise ConfigError(
            f"--cache-gb asks for {size(limits.cache_bytes)} of keys and values, and"
            f" {size(plan.cache)} are left beside {size(plan.weights)} of weights on"
            f" {limits.device}; ask for less."
        )
    engines = len(sources) * (2 if follow else 1)
    cache = (limits.cache_bytes or plan.cache) // engines
    names = _names(sources)
    return {
        name: ServedModel(source, name, limits, cache)
        for name, source in zip(names, sources, strict=True)
    }


def plan_models(sources: Sequence[str], limits: EngineLimits, *, follow: bool) -> ServingPlan:
    """What the models take of the memory that is free, weights as they are while they load."""
    shapes = [model_of(source) for source in sources]
    params = [count_params(shape).all for shape in shapes]
    free = memory_free(limits.device)
    # Weights come as fp32 and are made smaller, one model after the other.
    loading = max(params) * 4
    at_rest = sum(weight_bytes(shape, limits.precision) for shape in shapes) * (2 if follow else 1)
    if at_rest + loading > free:
        raise ConfigError(
            f"{' and '.join(sources)} need {size(at_rest + loading)} for {sum(params):,} weights"
            f" and their loading, and {size(free)} are free on {limits.device}; serve one model"
            " less, or use a larger device."
        )
    number = 4 if limits.precision == "fp32" else 2
    largest = max(range(len(shapes)), key=lambda at: params[at])
    return plan_serving(
        shapes[largest],
        sum(params),
        free,
        bytes_per_weight=at_rest / sum(params),
        bytes_per_number=number,
        step_tokens=STEP_TOKENS.get(limits.device.type, STEP_TOKENS["cpu"]),
    )


def _names(sources: Sequence[str]) -> list[str]:
    """A short name each: the last word of its path, and more of it where two end alike."""
    paths = [Path(source).resolve() for source in sources]
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        names = [f"{path.parent.name}/{path.name}" for path in paths]
    if len(set(names)) < len(names):
        names = [f"{name}-{number}" for number, name in enumerate(names, 1)]
    return names
