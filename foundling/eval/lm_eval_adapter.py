"""The model class that lm-evaluation-harness sees: `--model foundling --model_args path=RUN`.

Everything but the conversation with the harness is in the files beside this one. What is sent to
the model (BOS, left truncation, rolling windows, stop strings) follows the harness's own `hf`
model, so that scores can be laid beside published ones; a test holds the two equal.
"""

import atexit
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
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
from foundling.config.errors import ConfigError
from foundling.eval.lm_eval_generation import Wording, Writer, begins_with_bos, manner
from foundling.eval.lm_eval_scoring import HarnessSpan, TokenScorer
from foundling.runtime.device import DeviceChoice, choose
from foundling.runtime.dist import World, joined, world_from_environment
from foundling.tokenizer.chat import CHAT_TEMPLATE

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
        batch_size: most rows of a batch; 1 (the harness's default) and auto leave it to the tokens
        batch_tokens: positions of a batch; halved when they do not fit
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
        asked = add_bos_token
        self.wording = Wording(
            self.tokenizer, begins_with_bos(self.bundle) if asked is None else _truth(asked)
        )
        model = self.bundle.model
        self.max_length = int(max_length or model.max_positions or self.bundle.context)
        rows = _rows(batch_size, max_batch_size)
        shared: dict[str, Any] = {"window": self.max_length, "dtype": choice.dtype, "rows": rows}
        self.scorer = TokenScorer(model, choice.device, positions=int(batch_tokens or 0), **shared)
        self.writer = Writer(model, self.wording, choice.device, **shared)

    def _join(self, world: World, device: torch.device) -> None:
        """Under torchrun every rank scores its share of the requests."""
        self._rank, self._world_size = world.rank, world.size
        if world.size > 1 and not dist.is_initialized():
            joined(world, device).__enter__()
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
        return manner({}).max_new_tokens

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
        spans = [HarnessSpan(tuple(context), tuple(target)) for _, context, target in requests]
        with self._bar(len(spans), "scoring", disable_tqdm) as bar:
            scores = self.scorer.score(spans, bar.update)
        answers = [(score.logprob, score.is_greedy) for score in scores]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts is not None:  # windows of a rolling text are no requests of their own
                self.cache_hook.add_partial("loglikelihood", texts, answer)
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
        texts = [""] * len(requests)
        alike: dict[str, list[int]] = defaultdict(list)
        for place, request in enumerate(requests):
            alike[repr(request.args[1])].append(place)
        with self._bar(len(requests), "writing", disable_tqdm) as bar:
            for places in alike.values():
                asked = requests[places[0]].args[1]
                prompts = [requests[place].args[0] for place in places]
                done = self._keeper(requests, places, texts, bar.update)
                self.writer.write(prompts, manner(asked), done)
        return texts

    def _keeper(
        self,
        requests: Sequence[Instance],
        places: Sequence[int],
        texts: list[str],
        progress: Callable[[int], Any],
    ) -> Callable[[int, str], None]:
        """What takes each text as it comes, so that `--use_cache` has it if we are interrupted."""

        def keep(number: int, text: str) -> None:
            texts[places[number]] = text
            args = requests[places[number]].args
            self.cache_hook.add_partial("generate_until", args, text)
            progress(1)

        return keep

    def _bar(self, total: int, what: str, disabled: bool) -> Any:
        return tqdm(total=total, desc=what, disable=disabled or self._rank != 0)


def _device(name: str | None, dtype: str, world: World) -> DeviceChoice:
    """The device of this rank. The harness says cuda:0 where nobody says, so that means auto."""
    if name in (None, "auto", "cuda:0"):
        return choose("auto", dtype, world.local_rank)
    kind, _, number = str(name).partition(":")
    return choose(kind, dtype, int(number) if number else world.local_rank)


def _truth(value: Any) -> bool:
    """A flag as it comes from a command line."""
    return value if isinstance(value, bool) else str(value).lower() in ("true", "1", "yes")


def _rows(batch_size: int | str | None, max_batch_size: int | None) -> int:
    """Most rows of a batch; 0 leaves them to the tokens. The harness says 1 where nobody says."""
    if batch_size is None or str(batch_size).startswith("auto"):
        return int(max_batch_size or 0)
    rows = int(batch_size)
    return 0 if rows == 1 else rows
