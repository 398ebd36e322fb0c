"""Generation for lm-evaluation-harness: its strings and chats as tokens, replies as it wants
them."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foundling.checkpoint.bundle import Bundle
from foundling.config.errors import ConfigError
from foundling.eval.oom_retry import run_with_fewer_rows
from foundling.generate.engine import Engine
from foundling.generate.sampling import Sampling
from foundling.model.transformer import Transformer
from foundling.runtime.device import ran_out
from foundling.tokenizer.chat import role_and_content
from foundling.tokenizer.tokenizer import Tokenizer

# Text to tokens as the harness wants them: prompts as strings, chats among them.
#
# The harness hands every prompt over as one string, so a rendered chat comes back as text that
# spells its special tokens. Text that begins with the BOS token's text is such a chat and is read
# with its special tokens; all other text is text, whatever it spells.


class Wording:
    """One tokenizer's way with the harness's strings."""

    def __init__(self, tokenizer: Tokenizer, begins: bool) -> None:
        self.tokenizer = tokenizer
        self.begins = begins
        """Whether plain text is begun with BOS."""
        self.bos = tokenizer.names["bos"]
        ids = {tokenizer.names[role]: id for role, id in tokenizer.special_ids.items()}
        self.special_ids = {**ids, **tokenizer.extra_ids}
        """Special tokens by their text."""
        longest_first = sorted(self.special_ids, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def encode(self, text: str, begin: bool | None = None) -> list[int]:
        """Ids of a prompt; `begin` overrides whether plain text gets a BOS."""
        if text.startswith(self.bos):
            return self._chat(text)
        ids = self.tokenizer.encode(text)
        return [self.tokenizer.bos_id, *ids] if (self.begins if begin is None else begin) else ids

    def _chat(self, text: str) -> list[int]:
        parts = self._special.split(text)
        plain = iter(self.tokenizer.encode_batch(parts[::2]))
        ids: list[int] = []
        for number, part in enumerate(parts):
            ids += [self.special_ids[part]] if number % 2 else next(plain)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """What was said, without special tokens."""
        return self.tokenizer.decode(ids, skip_special=True)

    def chat(self, messages: Sequence[Mapping[str, str]], opens: bool = True) -> str:
        """A conversation as text: the assistant's turn opened behind it, or (not `opens`) its last
        message left open to be gone on with."""
        names = self.tokenizer.names
        turns = []
        for message in messages:
            role, content = role_and_content(message)
            turns.append(names[role] + content + names["end"])
        if opens:
            turns.append(names["assistant"])
        elif turns:
            turns[-1] = turns[-1].removesuffix(names["end"])
        return self.bos + "".join(turns)


def begins_with_bos(bundle: Bundle) -> bool:
    """Whether the model expects BOS before a text: one of ours was trained so, document by
    document; of another's, its tokenizer knows."""
    return bool(bundle.meta) or bundle.tokenizer.adds_bos


# Text written by the model until it says one of the stop strings.

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
