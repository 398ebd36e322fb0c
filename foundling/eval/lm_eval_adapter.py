"""The model class that lm-evaluation-harness sees: `--model foundling --model_args path=RUN`.

What is sent to the engine (BOS, left truncation, rolling windows, stop strings) follows the
harness's own `hf` model, so that scores can be laid beside published ones; a test holds the two
equal.
"""

import atexit
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import lm_eval.models  # noqa: F401  its own models are only looked up while there is no other
import torch
import torch.distributed as dist
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from foundling.checkpoint.bundle import Bundle, load_bundle
from foundling.config.errors import CheckpointError, ConfigError, DataError
from foundling.eval.task_scoring import evaluation_engine
from foundling.generate.request import Request
from foundling.generate.sampling import NOT_FINITE, Sampling, derived_seed
from foundling.generate.text import TextEngine
from foundling.runtime.device import DeviceChoice, choose_device
from foundling.runtime.dist import World, process_group, world_from_environment
from foundling.tokenizer.chat import CHAT_TEMPLATE, role_and_content
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


# Text written by the model until it says one of the stop strings.

DEFAULT_NEW_TOKENS = 256
"""The harness's own default."""
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


# The model class itself.

Encoded = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("foundling")
class FoundlingLM(TemplateLM):  # type: ignore[misc]
    """A run, a checkpoint or any other source of weights, scored where it is."""

    def __init__(
        self,
        path: str = "",
        device: str | None = None,
        dtype: str = "fp32",
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        batch_tokens: int | None = None,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        bundle: Bundle | None = None,
        **unknown: Any,
    ) -> None:
        """Load the model.

        path: RUN, RUN@STEP, a checkpoint or any other source that `foundling eval` takes
        device, dtype: auto, cpu, cuda or mps; fp32, bf16 or auto
        batch_size: most texts at a time; 1 (the harness's default) and auto leave it to the tokens
        batch_tokens: tokens of a step; halved when they do not fit
        max_length: tokens of context; by default what the weights were trained on
        add_bos_token: begin texts with BOS; by default as the model was trained
        bundle: what is loaded already, in place of a path
        """
        super().__init__()
        if unknown or not (path or bundle):
            wrong = f"{next(iter(unknown))} is not known" if unknown else "path is missing"
            raise ConfigError(
                f"--model_args {wrong}; give path=RUN and if needed dtype, batch_tokens,"
                " max_length or add_bos_token."
            )
        world = world_from_environment()
        choice = _device(device, dtype, world)
        logging.getLogger(__name__).info("foundling computes on %s", choice.reason)
        self._join(world, choice.device)
        self._device = choice.device
        self.bundle = bundle or load_bundle(path, choice.device)
        self.tokenizer = self.bundle.tokenizer
        # One of ours was trained with BOS, document by document; of another's, its tokenizer knows.
        begins = bool(self.bundle.meta) or self.tokenizer.adds_bos
        if add_bos_token is not None:  # from a command line it may come as text
            begins = str(add_bos_token).lower() in ("true", "1", "yes")
        self.wording = Wording(self.tokenizer, begins)
        model = self.bundle.model
        self.max_length = int(max_length or model.max_positions or self.bundle.context)
        self.engine = evaluation_engine(
            model,
            choice.device,
            dtype=choice.dtype,
            max_tokens=int(batch_tokens or 0),
            longest=self.max_length + 1,
            max_running=_rows(batch_size, max_batch_size),
        )

    def _join(self, world: World, device: torch.device) -> None:
        """Under torchrun every rank scores its share of the requests."""
        self._rank, self._world_size = world.rank, world.size
        if world.size > 1 and not dist.is_initialized():
            process_group(world, device).__enter__()
            atexit.register(dist.destroy_process_group)

    # What the harness asks about the model

    @property
    def eot_token_id(self) -> int:
        """The end of a text."""
        return int(self.tokenizer.eos_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has no context."""
        return int(self.tokenizer.bos_id)

    @property
    def max_gen_toks(self) -> int:
        """New tokens where a task does not say."""
        return DEFAULT_NEW_TOKENS

    @property
    def tokenizer_name(self) -> str:
        """Under which the harness keeps prompts: another tokenizer or template, another name."""
        return f"foundling-{self.tokenizer.fingerprint[:16]}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The form of a conversation, for the record; there is one."""
        return CHAT_TEMPLATE if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as the text that `tok_encode` understands."""
        return self.wording.chat(chat_history, add_generation_prompt)

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside the scores."""
        return {
            "model_source": str(self.bundle.path),
            "model_step": self.bundle.step,
            "model_num_parameters": sum(p.numel() for p in self.bundle.model.parameters()),
            "add_bos_token": self.wording.begins,
            "max_length": self.max_length,
        }

    # Ranks

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """One row a rank."""
        if self._world_size == 1:
            return tensor
        rows = [torch.empty_like(tensor) for _ in range(self._world_size)]
        dist.all_gather(rows, tensor)
        return torch.stack(rows)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """Everybody's object on rank `dst`, nothing elsewhere."""
        if self._world_size == 1:
            return [obj]
        found: list[Any] | None = [None] * self._world_size if self._rank == dst else None
        dist.gather_object(obj, found, dst)
        return found

    def barrier(self) -> None:
        """Wait for every rank."""
        if self._world_size > 1:
            dist.barrier()

    # Requests

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Ids of a prompt, begun with BOS as the model was trained unless told otherwise."""
        return self.wording.encode(string, add_special_tokens)

    def _loglikelihood_tokens(
        self, requests: list[Encoded], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        asked = [fitted(context, target, self.max_length) for _, context, target in requests]
        texts = [context + target for context, target in asked]
        answers = [(0.0, True)] * len(texts)
        with self._bar(len(texts), "scoring", disable_tqdm) as bar:
            for place, scores in self.engine.score(texts, [len(context) for context, _ in asked]):
                answers[place] = sum(scores.logprobs), scores.exact
                bar.update(1)
        for (words, _, _), answer in zip(requests, answers, strict=True):
            if words is not None:  # windows of a rolling text are no requests of their own
                self.cache_hook.add_partial("loglikelihood", words, answer)
        return answers

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-likelihood of whole texts, every token once; see docs/lm-eval.md for the BOS."""
        windows: list[Encoded] = []
        owners: list[int] = []
        for place, request in enumerate(requests):
            for pair in get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append((None, *make_disjoint_window(pair)))
                owners.append(place)
        totals = [0.0] * len(requests)
        found = self._loglikelihood_tokens(windows, disable_tqdm)
        for place, (logprob, _) in zip(owners, found, strict=True):
            totals[place] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each prompt, up to the task's stop strings."""
        text = TextEngine(self.engine, self.tokenizer)
        asked = [self._request(place, *request.args) for place, request in enumerate(requests)]
        # Longest first: what does not fit shows at once.
        order = sorted(range(len(asked)), key=lambda place: -len(asked[place][0].prompt))
        texts = [""] * len(requests)
        with self._bar(len(requests), "writing", disable_tqdm) as bar:
            for piece in text.stream([asked[place] for place in order]):
                if piece.error:
                    raise (CheckpointError if piece.error == NOT_FINITE else ConfigError)(
                        piece.error
                    )
                place = order[piece.number]
                texts[place] += piece.text
                if piece.finish:  # so that `--use_cache` has it if we are interrupted
                    args = requests[place].args
                    self.cache_hook.add_partial("generate_until", args, texts[place])
                    bar.update(1)
        return texts

    def _request(
        self, place: int, prompt: str, asked: Mapping[str, Any]
    ) -> tuple[Request, tuple[str, ...]]:
        """A prompt and its settings for the engine, and the stop strings."""
        how = manner(asked)
        room = self.max_length - how.max_new_tokens
        if room < 1:
            raise ConfigError(
                f"the task writes up to {how.max_new_tokens} tokens and the model sees"
                f" {self.max_length}; give --gen_kwargs max_gen_toks={self.max_length // 2} or"
                " less."
            )
        # Special tokens are not spelled in what is written; the harness looks for stop strings in
        # their names too, as its own Hugging Face models do.
        special = self.wording.special_ids
        named = {id for word, id in special.items() if any(stop in word for stop in how.until)}
        request = Request(
            prompt=self.wording.encode(prompt)[-room:],
            max_tokens=how.max_new_tokens,
            sampling=replace(how.sampling, seed=derived_seed(how.sampling.seed, place)),
            stop_ids=self.tokenizer.stop_ids | named,
        )
        return request, how.until

    def _bar(self, total: int, what: str, disabled: bool) -> Any:
        return tqdm(total=total, desc=what, disable=disabled or self._rank != 0)


def fitted(
    context: Sequence[int], target: Sequence[int], window: int
) -> tuple[list[int], list[int]]:
    """Both, the context cut on the left to what the model can see: `window` inputs, one more token
    in all."""
    if not context or not target:
        raise DataError("a context or a continuation to score is empty; give it a token.")
    if len(target) > window:
        raise DataError(
            f"a continuation has {len(target)} tokens and the model sees {window};"
            " give a larger max_length or shorter texts."
        )
    return list(context[-(window + 1 - len(target)) :]), list(target)


def _device(name: str | None, dtype: str, world: World) -> DeviceChoice:
    """The device of this rank. The harness says cuda:0 where nobody says, so that means auto."""
    if name in (None, "auto", "cuda:0"):
        return choose_device("auto", dtype, world.local_rank)
    kind, _, number = str(name).partition(":")
    return choose_device(kind, dtype, int(number) if number else world.local_rank)


def _rows(batch_size: int | str | None, max_batch_size: int | None) -> int:
    """Most texts at a time; 0 leaves them to the tokens. The harness says 1 where nobody says."""
    if batch_size is None or str(batch_size).startswith("auto"):
        return int(max_batch_size or 0)
    rows = int(batch_size)
    return 0 if rows == 1 else rows
