"""The engine: `generate` and `score` for many requests at once, on one scheduler and one cache.

Each step takes the scheduler's plan, sends its tokens through the model in one row, draws a token
for every request that is computed to its end, and judges the tokens of those that are scored. A
request that fails (logits that are no numbers, a grammar that cannot go on) ends alone with a
sentence. Evaluation, chat, the server and reinforcement learning all use this one; docs/engine.md
draws the way of a request.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from foundling.config.errors import CheckpointError, ConfigError, UserError
from foundling.generate.decode_graphs import AHEAD, LONGEST, DecodeGraphs
from foundling.generate.grammar import GrammarState
from foundling.generate.kv_cache import BlockManager, KVCache
from foundling.generate.request import (
    Completion,
    Finish,
    Output,
    Request,
    TokenScores,
    check_ids,
    check_request,
)
from foundling.generate.sampling import (
    BROKEN,
    NOT_FINITE,
    adjust,
    draw,
    draw_filtered,
    draw_greedy,
    judge,
    signed,
)
from foundling.generate.scheduler import RequestScheduler, SequenceChunk
from foundling.generate.scheduler import Sequence as Scheduled
from foundling.generate.step_attention import step_attention
from foundling.model.loss import SCORE_LOGITS, chunks
from foundling.model.transformer import Transformer
from foundling.parallel.tensor_parallel import tensor_ranks
from foundling.plan.serving import (
    BLOCK,
    CACHE_OF_FREE,
    MAX_RUNNING,
    STEP_TOKENS,
    block_counts,
    cache_groups,
)
from foundling.runtime.console import warn
from foundling.runtime.device import memory_free, ran_out, release_memory

NEVER = 2**62
LEAST_STEP = 64
"""Tokens of a step below which memory that runs out is an error."""


@dataclass(eq=False)
class _Live:
    """A request on its way."""

    request: Request
    sequence: Scheduled
    generated: int = 0
    grammar: GrammarState | None = None
    targets: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Tokens whose probability is wanted, the first of them at `sequence.judged_from`."""
    scores: TokenScores = field(default_factory=lambda: TokenScores([], [], []))
    """What was judged so far, in order."""
    top: int = 0
    scores_only: bool = False
    is_plain: bool = False
    """Whether temperature and seed say all about its tokens."""


class _Judged(NamedTuple):
    """Targets of a request that a step has come to."""

    live: _Live
    first: int
    end: int


class Engine:
    """Generates and scores with one model on one device."""

    def __init__(
        self,
        model: Transformer,
        device: torch.device | str | None = None,
        *,
        dtype: torch.dtype | None = None,
        cache_bytes: int = 0,
        max_length: int = 0,
        max_running: int = 0,
        step_tokens: int = 0,
        shares: bool = True,
        graphs: bool = False,
        before_step: Callable[[], None] = lambda: None,
    ) -> None:
        """`dtype` is the arithmetic of the matrix products, by autocast (None: the weights' own).
        `cache_bytes` bounds keys and values (0: a share of what is free), `max_length` the tokens
        of a request, `max_running` the requests that generate at a time and `step_tokens` what goes
        through the model at once (0: what suits the device). `shares` finds prefixes again, and
        `graphs` decodes by CUDA graphs, for a model that nobody else uses. `before_step` is called
        before each step, and may raise to give up."""
        self.model = model
        self.device = torch.device(device) if device else next(model.parameters()).device
        self.dtype = dtype
        kind = self.device.type
        self.is_cut = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        """Whether ranks compute every step together, and so none may act on its own."""
        self._row_multiple = tensor_ranks(model)
        config = model.config
        kv_heads = config.num_kv_heads // self._row_multiple
        windows, self._groups = cache_groups(config)
        running = max_running or MAX_RUNNING.get(kind, MAX_RUNNING["cpu"])
        tokens = step_tokens or STEP_TOKENS.get(kind, STEP_TOKENS["cpu"])
        number = dtype or model.head_weight.dtype
        self.max_length = max_length or model.max_positions or 0
        counts = block_counts(
            config,
            windows,
            cache_bytes or round(CACHE_OF_FREE * memory_free(self.device)),
            kv_heads=kv_heads,
            bytes_per_number=number.itemsize,
            max_running=running,
            max_length=self.max_length,
            step_tokens=tokens,
        )
        self.blocks = BlockManager(windows, counts, shares=shares)
        self.scheduler = RequestScheduler(self.blocks, step_tokens=tokens, max_running=running)
        self._kv_shape = (kv_heads, config.head_width, self.device, number)
        self._counts = counts
        self._cache: KVCache | None = None
        self._attention = step_attention(self.device)
        self._graphs: DecodeGraphs | None = None
        self._wants_graphs = graphs and kind == "cuda" and not self.is_cut
        self._live: dict[Scheduled, _Live] = {}
        self._by_number: dict[int, _Live] = {}
        self._ended_now: dict[int, _Live] = {}
        """Those that ended in the last step, of which may still be asked."""
        self._next_number = 0
        self._unread: list[Output] = []
        """Of requests whose steps were made for others."""
        self._before_step = before_step
        self.steps = 0
        self.reused_tokens = 0
        """Tokens of prompts that were found in the cache."""

    @property
    def cache(self) -> KVCache:
        """Keys and values, allocated when they are first needed."""
        if self._cache is None:
            self._cache = KVCache(self._groups, self._counts, *self._kv_shape)
        return self._cache

    # Requests one by one

    def submit(self, request: Request) -> int:
        """Take a request; its number, by which its outputs are known. A request that cannot be
        answered is refused with one sentence."""
        check_request(request, self.model.config.vocab_size, self.max_length)
        wants_prompt = request.prompt_logprobs is not None
        sequence = Scheduled(
            ids=list(request.prompt),
            longest=len(request.prompt) + request.max_tokens,
            judged_from=1 if wants_prompt else NEVER,
            table=self.blocks.new_table(),
            number=self._next_number,
        )
        live = _Live(request, sequence)
        live.is_plain = (
            request.sampling.is_plain
            and request.grammar is None
            and not request.logprobs
            and not request.min_tokens
        )
        if wants_prompt:
            live.targets = np.array(request.prompt[1:], np.int64)
            live.top = request.prompt_logprobs or 0
        if request.grammar is not None:
            live.grammar = request.grammar.begin()
        return self._add(live)

    def cancel(self, number: int) -> None:
        """Nobody wants this request any more: its blocks are free at once."""
        live = self._by_number.pop(number, None)
        self._unread = [output for output in self._unread if output.number != number]
        if live is not None:
            self._ended_now[number] = live
            self._drop(live)

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def prompt_scores(self, number: int) -> TokenScores | None:
        """What was asked about the prompt of a request that runs or ended in the last step, once
        all of it is known."""
        live = self._by_number.get(number) or self._ended_now.get(number)
        if live is None or len(live.scores.logprobs) < len(live.targets):
            return None
        return live.scores

    def prompt_reused(self, number: int) -> int:
        """Tokens of its prompt that were found in the cache, likewise."""
        live = self._by_number.get(number) or self._ended_now.get(number)
        return 0 if live is None else live.sequence.reused

    def step(self) -> list[Output]:
        """One step of all requests: the tokens and ends that it brought."""
        unread, self._unread = self._unread, []
        return unread + self._step()

    def _outputs_of(self, numbers: Container[int]) -> list[Output]:
        """The next outputs of these requests; those of others are kept for who asks for them."""
        outputs = self._unread or self._step()
        mine = [output for output in outputs if output.number in numbers]
        if outputs is self._unread and not mine:
            new = self._step()
            outputs, mine = outputs + new, [output for output in new if output.number in numbers]
        self._unread = [output for output in outputs if output.number not in numbers]
        return mine

    def _step(self) -> list[Output]:
        self._before_step()
        self._ended_now.clear()
        plan = self.scheduler.plan()
        if not plan:
            if self.has_work:
                raise RuntimeError("the engine has requests and no room for any of them")
            return []
        self.steps += 1
        try:
            # What ranks gather here may stay for training, which takes no inference tensors.
            with torch.no_grad() if self.is_cut else torch.inference_mode(), self._autocast():
                outputs = self._run(plan)
        except BaseException as error:
            # Blocks that were named for this step hold nothing, and no prefix can be believed.
            self.scheduler.start_again()
            if self.is_cut or not (
                isinstance(error, MemoryError | RuntimeError) and ran_out(error)
            ):
                raise
            if self.scheduler.step_tokens <= LEAST_STEP:
                raise ConfigError(
                    f"memory does not suffice for a step of {LEAST_STEP} tokens beside a cache of"
                    f" {BLOCK * max(self._counts):,}; use a smaller cache, --dtype bf16 or a"
                    " larger device."
                ) from None
        else:
            return outputs
        # Outside of the handler: its traceback would keep the tensors that are in the way.
        self.scheduler.step_tokens //= 2
        release_memory()
        warn(f"memory ran out; from now on {self.scheduler.step_tokens:,} tokens a step.")
        return []

    # Many requests at once

    def generate(self, requests: Iterable[Request]) -> Iterator[Output]:
        """The outputs of these requests as they come, numbered by their place; whoever stops
        listening cancels the rest."""
        places: dict[int, int] = {}
        try:
            for place, request in enumerate(requests):
                places[self.submit(request)] = place
            with self.in_use():
                while places:
                    for output in self._outputs_of(places):
                        place = places[output.number]
                        if output.finish:
                            del places[output.number]
                        yield Output(place, *output[1:])
        finally:
            for number in places:
                self.cancel(number)

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """What the model writes after each prompt, all of it."""
        found = dict(self.completions(requests))
        return [found[place] for place in range(len(requests))]

    def completions(self, requests: Iterable[Request]) -> Iterator[tuple[int, Completion]]:
        """(place, what the model writes after that prompt) as each is done."""
        ids = defaultdict[int, list[int]](list)
        logprobs = defaultdict[int, list[float]](list)
        for output in self.generate(requests):
            place = output.number
            if output.id is not None:
                ids[place].append(output.id)
                if output.logprob is not None:
                    logprobs[place].append(output.logprob)
            if output.finish == "error":
                raise _failure(output.error)
            if output.finish:
                yield (
                    place,
                    Completion(ids[place], output.finish, logprobs[place], output.stop_id),
                )

    def score(
        self, texts: Sequence[ArrayLike], starts: Sequence[int], *, top: int = 0
    ) -> Iterator[tuple[int, TokenScores]]:
        """(place, scores) of each text as it is done: what the model thinks of its tokens from
        `start` on, which is at least 1. Equal texts are computed once and score equally."""
        # By what stands before the judged tokens: texts that share it share its keys and values.
        contexts: dict[bytes, dict[tuple[bytes, int], list[int]]] = {}
        arrays = [np.ascontiguousarray(text, np.int64) for text in texts]
        for place, (text, start) in enumerate(zip(arrays, starts, strict=True)):
            if start >= len(text):
                yield place, TokenScores([], [], [])
                continue
            copies = contexts.setdefault(text[:start].tobytes(), {})
            copies.setdefault((text.tobytes(), start), []).append(place)
        # Long ones first: what does not fit shows at once, and neighbours are of like length.
        groups = [
            sorted(copies.values(), key=lambda places: -len(arrays[places[0]]))
            for copies in contexts.values()
        ]
        groups.sort(key=lambda group: -len(arrays[group[0][0]]))
        by_number: dict[int, list[int]] = {}
        try:
            for places in (places for group in groups for places in group):
                text, start = arrays[places[0]], starts[places[0]]
                by_number[self._submit_score(text, start, top)] = places
            with self.in_use():
                while by_number:
                    for output in self._outputs_of(by_number):
                        live = self._by_number.pop(output.number)
                        if output.finish == "error":
                            raise _failure(output.error)
                        for place in by_number.pop(output.number):
                            yield place, live.scores
        finally:
            for number in by_number:
                self.cancel(number)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """The model evaluates inside, and is left as it was found."""
        if not self.model.training:
            yield
            return
        self.model.eval()
        try:
            yield
        finally:
            self.model.train()

    def forget(self) -> None:
        """The weights have changed: nothing that was computed is true any more."""
        self.scheduler.start_again()

    def _submit_score(self, text: NDArray[np.int64], start: int, top: int) -> int:
        if start < 1:
            raise ConfigError("the first token of a text follows nothing and cannot be judged.")
        check_ids(text, self.model.config.vocab_size, self.model.max_positions)
        sequence = Scheduled(
            ids=text[:-1].tolist(),
            longest=len(text) - 1,
            judged_from=start,
            table=self.blocks.new_table(),
            number=self._next_number,
        )
        request = Request(prompt=sequence.ids, max_tokens=0)
        live = _Live(request, sequence, targets=text[start:], top=top, scores_only=True)
        return self._add(live)

    def _add(self, live: _Live) -> int:
        self.scheduler.add(live.sequence)
        self._live[live.sequence] = live
        self._by_number[live.sequence.number] = live
        self._next_number += 1
        return live.sequence.number

    def _drop(self, live: _Live) -> None:
        self.scheduler.remove(live.sequence)
        self._live.pop(live.sequence, None)

    # One step

    def _run(self, plan: Sequence[SequenceChunk]) -> list[Output]:
        if (
            self._wants_graphs
            and all(
                chunk.size == 1 and chunk.ends and chunk.sequence.computed < LONGEST - AHEAD
                for chunk in plan
            )
            and all(self._live[chunk.sequence].generated for chunk in plan)
        ):
            return self._run_graph(plan)
        states, drawn, judged = self._states(plan)
        outputs = []
        if judged:
            outputs += self._judge_all(states[: len(states) - len(drawn)], judged)
        logits = None
        if drawn:
            logits = self.model.next_logits(states[len(states) - len(drawn) :])
        self._advance(plan)
        if logits is not None:
            lives = [self._live[chunk.sequence] for chunk in drawn]
            outputs += self._taken(lives, self._drawn(lives, logits), logits)
        return outputs

    def _run_graph(self, plan: Sequence[SequenceChunk]) -> list[Output]:
        if self._graphs is None:
            self._graphs = DecodeGraphs(
                self.model, self.cache, self.blocks, self.scheduler.max_running, self.device
            )
        lives = [self._live[chunk.sequence] for chunk in plan]
        sequences = [chunk.sequence for chunk in plan]
        samplings = [live.request.sampling for live in lives]
        if not all(live.is_plain for live in lives):
            _, _, logits = self._graphs.run(sequences, samplings)
            self._advance(plan)
            logits = logits.float()
            return self._taken(lives, self._drawn(lives, logits), logits)
        launches = self._launches(lives)
        tokens, logprobs, _ = self._graphs.run(sequences, samplings, launches)
        outputs = []
        for ids, chances in zip(tokens, logprobs, strict=True):
            for live, token, logprob in zip(lives, ids, chances, strict=True):
                if live.sequence in self._live:  # not ended by a token before
                    live.sequence.computed += 1
                    told = logprob if live.request.logprobs is not None else None
                    outputs.append(self._take(live, token, told, {} if told else None))
        return outputs

    def _launches(self, lives: Sequence[_Live]) -> int:
        """How many steps can follow each other unseen: there is room, and nobody is at the end."""
        left = min(live.request.max_tokens - live.generated for live in lives)
        for live in lives if left >= AHEAD else ():
            sequence = live.sequence
            if not self.blocks.reserve(
                sequence.table, sequence.computed, sequence.computed + AHEAD
            ):
                return 1
        return AHEAD if left >= AHEAD else 1

    def _states(
        self, plan: Sequence[SequenceChunk]
    ) -> tuple[Tensor, list[SequenceChunk], list[_Judged]]:
        """Hidden states of the places that are judged and then of those that are drawn after; the
        chunks to draw for, and what is judged."""
        total = sum(chunk.size for chunk in plan)
        padded = -(-total // self._row_multiple) * self._row_multiple
        tokens = torch.zeros(1, padded, dtype=torch.int64)
        at = 0
        drawn, judged = list[SequenceChunk](), list[_Judged]()
        flat, places, ends = list[int](), list[NDArray[np.int64]](), list[int]()
        for chunk in plan:
            sequence, live = chunk.sequence, self._live[chunk.sequence]
            start, end = sequence.computed, sequence.computed + chunk.size
            flat += sequence.ids[start:end]
            # The state at a position judges the token after it; after a preemption some is known.
            first = len(live.scores.logprobs)
            upto = min(len(live.targets), end + 1 - sequence.judged_from)
            if first < upto:
                judged.append(_Judged(live, first, upto))
                begin = at + sequence.judged_from + first - 1 - start
                places.append(np.arange(begin, begin + upto - first))
            if chunk.ends and not live.scores_only:
                drawn.append(chunk)
                ends.append(at + chunk.size - 1)
            at += chunk.size
        tokens[0, :total] = torch.tensor(flat)
        step = self._attention(self.cache, self.blocks, plan, self.device, padded)
        where = torch.from_numpy(np.concatenate([*places, np.array(ends, np.int64)]))
        where = where.to(self.device, non_blocking=True)
        states = self.model.states_at(tokens.to(self.device, non_blocking=True), where, step)
        return states, drawn, judged

    def _advance(self, plan: Sequence[SequenceChunk]) -> None:
        for chunk in plan:
            chunk.sequence.computed += chunk.size

    def _judge_all(self, states: Tensor, judged: Sequence[_Judged]) -> list[Output]:
        """Log-probabilities of the judged tokens; the ends of texts that were only scored."""
        wanted = np.concatenate([part.live.targets[part.first : part.end] for part in judged])
        targets = torch.from_numpy(wanted).to(self.device)
        top = max(part.live.top for part in judged)
        logprobs, best, likeliest = list[float](), list[bool](), list[dict[int, float]]()
        for rows in chunks(states, self.model.head_weight, SCORE_LOGITS):
            logits = self.model.next_logits(states[rows])
            found = judge(logits, targets[rows], top)
            for all_, some in zip((logprobs, best, likeliest), found, strict=True):
                all_ += some  # type: ignore[operator]
        at, outputs = 0, list[Output]()
        for live, first, end in judged:
            rows = slice(at, at := at + end - first)
            scores = live.scores
            scores.logprobs.extend(logprobs[rows])
            scores.likeliest.extend(best[rows])
            scores.top.extend(dict(list(one.items())[: live.top]) for one in likeliest[rows])
            broken = any(one != one for one in logprobs[rows])
            if live.scores_only and (end == len(live.targets) or broken):
                self._drop(live)
                error = NOT_FINITE if broken else ""
                finish: Finish = "error" if broken else "stop"
                outputs.append(Output(live.sequence.number, finish=finish, error=error))
        return outputs

    def _drawn(self, lives: Sequence[_Live], logits: Tensor) -> list[int]:
        """A token for each row, by each request's own rules; logits are adjusted in place."""
        for row, live in enumerate(lives):
            request, ids = live.request, live.sequence.ids
            if request.sampling.penalises or request.sampling.logit_bias:
                split = len(request.prompt)
                adjust(logits[row], request.sampling, ids[:split], ids[split:])
            if live.generated < request.min_tokens and request.stop_ids:
                logits[row, list(request.stop_ids)] = float("-inf")
            if live.grammar is not None:
                live.grammar.mask(logits[row])
        samplings = [live.request.sampling for live in lives]
        if all(s.temperature == 0 for s in samplings):
            return draw_greedy(logits).tolist()
        # The position that the new token will have.
        positions = torch.tensor([len(live.sequence.ids) for live in lives], device=self.device)
        if any(s.filters for s in samplings):
            return draw_filtered(logits, samplings, positions).tolist()
        temperatures = torch.tensor([s.temperature for s in samplings], device=self.device)
        seeds = torch.tensor([signed(s.seed) for s in samplings], device=self.device)
        return draw(logits, temperatures, seeds, positions).tolist()

    def _taken(self, lives: Sequence[_Live], tokens: Sequence[int], logits: Tensor) -> list[Output]:
        """Append each request's token, or end it."""
        told = self._told(lives, tokens, logits)
        return [
            self._take(live, token, *told.get(row, (None, None)))
            for row, (live, token) in enumerate(zip(lives, tokens, strict=True))
        ]

    def _take(
        self, live: _Live, token: int, logprob: float | None, top: Mapping[int, float] | None
    ) -> Output:
        request, sequence = live.request, live.sequence
        number = sequence.number
        if token == BROKEN:
            why = live.grammar.error if live.grammar is not None else ""
            return self._ended(live, Output(number, finish="error", error=why or NOT_FINITE))
        if live.generated == 0:
            self.reused_tokens += sequence.reused
        if token in request.stop_ids:
            return self._ended(live, Output(number, None, logprob, top, "stop", token))
        sequence.ids.append(token)
        live.generated += 1
        finish: Finish | None = None
        if live.grammar is not None and live.grammar.take(token):
            finish = "stop"
        elif live.generated >= request.max_tokens:
            finish = "length"
        output = Output(number, token, logprob, top, finish)
        return self._ended(live, output) if finish else output

    def _ended(self, live: _Live, output: Output) -> Output:
        if self._by_number.pop(live.sequence.number, None):
            self._ended_now[live.sequence.number] = live
        self._drop(live)
        return output

    def _told(
        self, lives: Sequence[_Live], tokens: Sequence[int], logits: Tensor
    ) -> dict[int, tuple[float, dict[int, float] | None]]:
        """By row, the log-probability of its token and of the likeliest ones, where asked for."""
        rows = [row for row, live in enumerate(lives) if live.request.logprobs is not None]
        rows = [row for row in rows if tokens[row] != BROKEN]
        if not rows:
            return {}
        most = max(lives[row].request.logprobs or 0 for row in rows)
        targets = torch.tensor([tokens[row] for row in rows], device=self.device)
        logprobs, _, top = judge(logits[rows], targets, most)
        return {
            row: (logprobs[n], dict(list(top[n].items())[: lives[row].request.logprobs or 0]))
            for n, row in enumerate(rows)
        }

    def _autocast(self) -> AbstractContextManager[object]:
        if self.dtype is None or self.dtype == self.model.head_weight.dtype:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)


def _failure(error: str) -> UserError:
    """What to raise for a request that failed."""
    return CheckpointError(error) if error == NOT_FINITE else ConfigError(error)
