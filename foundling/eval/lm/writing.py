"""Text written by the model until it says one of the stop strings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foundling.config import ConfigError
from foundling.eval.halving import run_with_fewer_rows
from foundling.eval.lm.wording import Wording
from foundling.generate import Engine, Sampling
from foundling.model import Transformer
from foundling.runtime.shortage import ran_out

DEFAULT_NEW_TOKENS = 256
"""The harness's own default."""
BLOCK = 256
"""Prompts that are answered before any answer is handed on."""
KNOWN = {"temperature", "top_k", "top_p", "min_p", "seed", "do_sample", "until", "max_gen_toks"}
NEUTRAL: Mapping[str, Any] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1,
    "length_penalty": 1,
    "use_cache": True,
    "early_stopping": False,
}
"""What other engines take and ours does not have, with the value that changes nothing."""
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@dataclass(frozen=True)
class Manner:
    """How to write: the harness's `generation_kwargs`, understood."""

    until: tuple[str, ...]
    max_new_tokens: int
    sampling: Sampling


def manner(asked: Mapping[str, Any]) -> Manner:
    """Read a task's generation settings; one that we cannot honour is refused by name."""
    given = dict(asked)
    lengths = [given.pop(name, None) for name in _LENGTHS]
    most = next((int(length) for length in lengths if length is not None), DEFAULT_NEW_TOKENS)
    for name, value in given.items():
        if name not in KNOWN and (name not in NEUTRAL or value != NEUTRAL[name]):
            raise ConfigError(
                f"the task asks for {name}={value}, which foundling's generation does not have;"
                f" override it with --gen_kwargs or leave the task out."
            )
    until = given.get("until") or ()
    temperature = float(given.get("temperature") or 0.0)
    if not given.get("do_sample", temperature > 0):
        temperature = 0.0
    chosen: dict[str, Any] = {"seed": int(given.get("seed", 0)), "temperature": temperature}
    if temperature:  # the filters change nothing where the likeliest token is taken
        chosen |= {
            name: kind(given[name])
            for name, kind in (("top_k", int), ("top_p", float), ("min_p", float))
            if given.get(name) is not None
        }
    words = (until,) if isinstance(until, str) else tuple(until)
    return Manner(tuple(word for word in words if word), most, Sampling(**chosen))


class Writer:
    """Continues prompts with one model on one device."""

    def __init__(
        self,
        model: Transformer,
        wording: Wording,
        device: torch.device,
        *,
        window: int,
        dtype: torch.dtype = torch.float32,
        rows: int = 0,
    ) -> None:
        self.wording, self.window = wording, window
        arithmetic = None if dtype == torch.float32 else dtype
        self.engine = Engine(model, device, dtype=arithmetic)
        if rows:
            self.engine.max_batch = rows

    def write(
        self,
        prompts: Sequence[str],
        manner: Manner,
        done: Callable[[int, str], None],
    ) -> None:
        """Continue every prompt, longest first; `done` is told (place, text) a block at a time."""
        room = self.window - manner.max_new_tokens
        if room < 1:
            raise ConfigError(
                f"the task writes up to {manner.max_new_tokens} tokens and the model sees"
                f" {self.window}; give --gen_kwargs max_gen_toks={self.window // 2} or less."
            )
        ids = [self.wording.encode(prompt)[-room:] for prompt in prompts]
        order = sorted(range(len(ids)), key=lambda place: -len(ids[place]))
        for first in range(0, len(order), BLOCK):
            places = order[first : first + BLOCK]
            # A prompt's randomness is keyed by its place in a block, so blocks have other seeds.
            sampling = manner.sampling
            seeded = Sampling(**{**vars(sampling), "seed": sampling.seed + 1_000_003 * first})
            for place, text in zip(
                places, self._block([ids[place] for place in places], manner, seeded), strict=True
            ):
                done(place, text)

    def _block(
        self, prompts: Sequence[Sequence[int]], manner: Manner, sampling: Sampling
    ) -> list[str]:
        try:
            return run_with_fewer_rows(
                self.engine, len(prompts), lambda: self._texts(prompts, manner, sampling)
            )
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not ran_out(error):
                raise
            raise ConfigError(
                "one prompt does not fit into memory; give a smaller max_length or use another"
                " device."
            ) from None

    def _texts(
        self, prompts: Sequence[Sequence[int]], manner: Manner, sampling: Sampling
    ) -> list[str]:
        wording = self.wording
        # A token has a byte or more, so a stop string has at most as many tokens as bytes.
        tail = max((len(word.encode()) for word in manner.until), default=0) + 1
        said: list[list[int]] = [[] for _ in prompts]

        def heard(row: int, token: int) -> bool:
            said[row].append(token)
            # Special tokens are spelled out here, because a stop string may be one.
            text = wording.tokenizer.decode(said[row][-tail:])
            return any(word in text for word in manner.until)

        found = self.engine.generate(
            prompts,
            manner.max_new_tokens,
            sampling,
            wording.tokenizer.stop_ids,
            heard if manner.until else None,
        )
        return [_cut(wording.decode(completion.ids), manner.until) for completion in found]


def _cut(text: str, until: Sequence[str]) -> str:
    for word in until:
        text = text.partition(word)[0]
    return text
