"""The engine: `generate` and `score` for many requests at once, on one scheduler and one cache.

Each step takes the scheduler's plan, sends its tokens through the model in one row, draws a token
for every request that is computed to its end, and judges the tokens of those that are scored. A
request that fails (logits that are no numbers, a grammar that cannot go on) ends alone with a
sentence. Evaluation, chat, the server and reinforcement learning all use this one; docs/engine.md
draws the way of a request.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from foundling.config.errors import CheckpointError, ConfigError, UserError
from foundling.generate.decode_graphs import AHEAD, LONGEST_IN_GRAPH, MOST_ROWS, DecodeGraphs
from foundling.generate.kv_cache import BlockManager, KVCache
from foundling.generate.request import (
    Completion,
    Finish,
    JudgedPart,
    LiveRequest,
    Output,
    Request,
    TokenScores,
    check_ids,
    check_request,
    in_groups,
)
from foundling.generate.sampling import (
    NO_TOKEN,
    NOT_FINITE,
    NOTHING_LEFT,
    adjust,
    draw_each,
    judge,
)
from foundling.generate.scheduler import RequestScheduler, ScheduledSequence, SequenceChunk
from foundling.generate.step_attention import step_attention
from foundling.model.loss import SCORE_LOGITS, chunks
from foundling.model.transformer import Transformer
from foundling.parallel.tensor_parallel import tensor_parallel_size
from foundling.plan.serving import (
    BLOCK,
    CACHE_OF_FREE,
    DEFAULT_LENGTH,
    MAX_RUNNING,
    STEP_TOKENS,
    block_counts,
    cache_groups,
    requests_held,
    step_that_fits,
)
from foundling.runtime.console import size, warn
from foundling.runtime.device import free_cached_memory, is_out_of_memory, memory_free

NEVER = 2**62
LEAST_STEP = 64
"""Tokens of a step below which memory that runs out is an error."""
TAKEN = (
    "the outputs of these requests were read by someone else: step() gives those of all requests,"
    " so use either it or generate, score and stream at a time."
)
TokenLogprobs = tuple[float | None, dict[int, float] | None]
"""Of a drawn token, and of the likeliest ones; None where they are not asked for."""


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
        self._row_multiple = tensor_parallel_size(model)
        if min(cache_bytes, max_length, max_running, step_tokens) < 0:
            raise ConfigError(
                "a limit of the engine is below zero; give more, or 0 for what suits."
            )
        config = model.config
        kv_heads = config.num_kv_heads // self._row_multiple
        windows, self._groups = cache_groups(config)
        running = max_running or MAX_RUNNING.get(kind, MAX_RUNNING["cpu"])
        tokens = step_tokens or STEP_TOKENS.get(kind, STEP_TOKENS["cpu"])
        number = dtype or model.head_weight.dtype
        lengths = [length for length in (max_length, model.max_positions) if length]
        self.max_length = min(lengths, default=0)
        """Tokens of a request at most, prompt and answer; 0: as many as the cache holds."""
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
        tokens = step_that_fits(windows, counts, self.max_length, tokens)
        longest = self.max_length or DEFAULT_LENGTH
        self.blocks = BlockManager(
            windows, counts, shares=shares,
            capacity=longest * requests_held(windows, counts, longest, tokens),
        )  # fmt: skip
        self.scheduler = RequestScheduler(self.blocks, step_tokens=tokens, max_running=running)
        self._kv_shape = (kv_heads, config.head_width, self.device, number)
        self._counts = counts
        self._cache: KVCache | None = None
        self._attention = step_attention(self.device)
        self._graphs: DecodeGraphs | None = None
        self._wants_graphs = graphs and kind == "cuda" and not self.is_cut
        self._live: dict[ScheduledSequence, LiveRequest] = {}
        self._by_number: dict[int, LiveRequest] = {}
        self._ended: dict[int, LiveRequest] = {}
        """Those that ended in the last step, or whose outputs were not read: they may be asked
        about."""
        self._next_number = 0
        self._unread: list[Output] = []
        """Of requests whose steps were made for others."""
        self._before_step = before_step
        self._users = 0
        self._trains = False
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
        request = check_request(request, self.model.config.vocab_size, self.max_length)
        wants_prompt = request.prompt_logprobs is not None
        sequence = ScheduledSequence(
            ids=list(request.prompt),
            longest=len(request.prompt) + request.max_tokens,
            judged_from=1 if wants_prompt else NEVER,
            table=self.blocks.new_table(),
            number=self._next_number,
        )
        live = LiveRequest(request, sequence)
        live.can_draw_in_graph = (
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
            self._ended[number] = live
            self._drop(live)

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, or has outputs that nobody has read."""
        return bool(self.scheduler.waiting or self.scheduler.running or self._unread)

    @property
    def longest(self) -> int:
        """Tokens of the longest request that can be answered, prompt and answer together."""
        return min(self.max_length or self.blocks.capacity, self.blocks.capacity)

    def prompt_scores(self, number: int) -> TokenScores | None:
        """What was asked about the prompt of a request that runs or has just ended, once all of it
        is known."""
        live = self._by_number.get(number) or self._ended.get(number)
        if live is None or len(live.scores.logprobs) < len(live.targets):
            return None
        return live.scores

    def prompt_reused(self, number: int) -> int:
        """Tokens of its prompt that were found in the cache, likewise."""
        live = self._by_number.get(number) or self._ended.get(number)
        return 0 if live is None else live.sequence.reused or 0

    def step(self) -> list[Output]:
        """One step of all requests: the tokens and ends that it brought, whosever they are."""
        new = self._step()
        outputs, self._unread = self._unread + new, []
        return outputs

    def outputs_of(self, numbers: Collection[int]) -> list[Output]:
        """The next outputs of these requests, after a step if there are none yet; those of others
        are kept for who asks for them."""
        if not any(output.number in numbers for output in self._unread):
            if not any(number in self._by_number for number in numbers):
                raise RuntimeError(TAKEN)
            self._unread += self._step()
        mine = [output for output in self._unread if output.number in numbers]
        self._unread = [output for output in self._unread if output.number not in numbers]
        return mine

    def _step(self) -> list[Output]:
        self._before_step()
        unread = {output.number for output in self._unread}
        self._ended = {n: live for n, live in self._ended.items() if n in unread}
        plan = self.scheduler.plan()
        if not plan:
            if self.scheduler.waiting or self.scheduler.running:
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
                isinstance(error, MemoryError | RuntimeError) and is_out_of_memory(error)
            ):
                raise
            if self.scheduler.step_tokens <= LEAST_STEP:
                held, tokens = self.cache.bytes, BLOCK * max(self._counts)
                raise ConfigError(
                    f"memory does not suffice for a step of {LEAST_STEP} tokens beside a cache of"
                    f" {tokens:,} ({size(held)}; {size(memory_free(self.device))} are free). One of"
                    f" {tokens // 2:,} leaves {size(held / 2)} more: give it {held // 2:,} bytes,"
                    " or use --dtype bf16 or a larger device."
                ) from None
        else:
            return outputs
        # Outside of the handler: its traceback would keep the tensors that are in the way.
        self.scheduler.step_tokens //= 2
        free_cached_memory()
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
                    for output in self.outputs_of(places):
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
        arrays = [np.ascontiguousarray(text, np.int64) for text in texts]
        for place, (text, start) in enumerate(zip(arrays, starts, strict=True)):
            if start >= len(text):
                yield place, TokenScores([], [], [])
        by_number: dict[int, list[int]] = {}
        try:
            for places in in_groups(arrays, starts):
                number = self._submit_score(arrays[places[0]], starts[places[0]], top)
                by_number[number] = places
            with self.in_use():
                while by_number:
                    for output in self.outputs_of(by_number):
                        if output.scores is None:
                            raise _failure(output.error)
                        for place in by_number.pop(output.number):
                            yield place, output.scores
        finally:
            for number in by_number:
                self.cancel(number)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """The model evaluates while anyone is inside, and is left as it was found."""
        if not self._users:
            self._trains = self.model.training
        self._users += 1
        try:
            if self._trains:
                self.model.eval()
            yield
        finally:
            self._users -= 1
            if self._trains and not self._users:
                self.model.train()

    def forget(self) -> None:
        """The weights have changed: nothing that was computed is true any more."""
        self.scheduler.start_again()
        for live in self._live.values():
            live.scores = TokenScores([], [], [])

    def _submit_score(self, text: NDArray[np.int64], start: int, top: int) -> int:
        if start < 1:
            raise ConfigError("the first token of a text follows nothing and cannot be judged.")
        check_ids(text, self.model.config.vocab_size, self.model.max_positions)
        sequence = ScheduledSequence(
            ids=text[:-1].tolist(),
            longest=len(text) - 1,
            judged_from=start,
            table=self.blocks.new_table(),
            number=self._next_number,
        )
        request = Request(prompt=sequence.ids, max_tokens=0)
        live = LiveRequest(request, sequence, targets=text[start:], top=top, scores_only=True)
        return self._add(live)

    def _add(self, live: LiveRequest) -> int:
        self.scheduler.add(live.sequence)
        self._live[live.sequence] = live
        self._by_number[live.sequence.number] = live
        self._next_number += 1
        return live.sequence.number

    def _drop(self, live: LiveRequest) -> None:
        self.scheduler.remove(live.sequence)
        self._live.pop(live.sequence, None)

    # One step

    def _run(self, plan: Sequence[SequenceChunk]) -> list[Output]:
        if (
            self._wants_graphs
            and len(plan) <= MOST_ROWS
            and all(
                chunk.size == 1
                and chunk.ends
                and chunk.sequence.computed < LONGEST_IN_GRAPH - AHEAD
                for chunk in plan
            )
            and all(self._live[chunk.sequence].generated for chunk in plan)
        ):
            return self._run_graph(plan)
        states, drawn, judged = self._states(plan)
        split = len(states) - len(drawn)
        # All is computed before anything is handed out: memory may run out on the way.
        scores = self._judged(states[:split], judged) if judged else None
        lives = [self._live[chunk.sequence] for chunk in drawn]
        take = self._drawn(lives, self.model.next_logits(states[split:])) if drawn else list
        self._advance(plan)
        return [*(self._scored(judged, scores) if scores else ()), *take()]

    def _run_graph(self, plan: Sequence[SequenceChunk]) -> list[Output]:
        if self._graphs is None:
            most = min(self.scheduler.max_running, MOST_ROWS)
            self._graphs = DecodeGraphs(self.model, self.cache, self.blocks, most, self.device)
        lives = [self._live[chunk.sequence] for chunk in plan]
        sequences = [chunk.sequence for chunk in plan]
        samplings = [live.request.sampling for live in lives]
        if not all(live.can_draw_in_graph for live in lives):
            _, _, logits = self._graphs.run(sequences, samplings)
            take = self._drawn(lives, logits.float())
            self._advance(plan)
            return take()
        launches = self._launches(lives)
        tokens, logprobs, _ = self._graphs.run(sequences, samplings, launches)
        outputs = []
        for ids, chances in zip(tokens, logprobs, strict=True):
            for live, token, logprob in zip(lives, ids, chances, strict=True):
                if live.sequence in self._live:  # not ended by a token before
                    live.sequence.computed += 1
                    told = live.request.logprobs is not None
                    outputs.append(self._take(live, token, (logprob, {}) if told else (None, None)))
        return outputs

    def _launches(self, lives: Sequence[LiveRequest]) -> int:
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
    ) -> tuple[Tensor, list[SequenceChunk], list[JudgedPart]]:
        """Hidden states of the places that are judged and then of those that are drawn after; the
        chunks to draw for, and what is judged."""
        total = sum(chunk.size for chunk in plan)
        padded = -(-total // self._row_multiple) * self._row_multiple
        tokens = torch.zeros(1, padded, dtype=torch.int64)
        at = 0
        drawn, judged = list[SequenceChunk](), list[JudgedPart]()
        flat, places, ends = list[int](), list[NDArray[np.int64]](), list[int]()
        for chunk in plan:
            sequence, live = chunk.sequence, self._live[chunk.sequence]
            start, end = sequence.computed, sequence.computed + chunk.size
            flat += sequence.ids[start:end]
            # The state at a position judges the token after it; after a preemption some is known.
            first = len(live.scores.logprobs)
            upto = min(len(live.targets), end + 1 - sequence.judged_from)
            if first < upto:
                judged.append(JudgedPart(live, first, upto))
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

    def _judged(self, states: Tensor, judged: Sequence[JudgedPart]) -> TokenScores:
        """Of all judged tokens, end to end."""
        wanted = np.concatenate([part.live.targets[part.first : part.end] for part in judged])
        targets = torch.from_numpy(wanted).to(self.device)
        top = max(part.live.top for part in judged)
        scores = TokenScores([], [], [])
        for rows in chunks(states, self.model.head_weight, SCORE_LOGITS):
            logits = self.model.next_logits(states[rows])
            for all_, some in zip(
                vars(scores).values(), judge(logits, targets[rows], top), strict=True
            ):
                all_ += some
        return scores

    def _scored(self, judged: Sequence[JudgedPart], found: TokenScores) -> list[Output]:
        """Hand each request its scores; the ends of texts that were only scored."""
        at, outputs = 0, list[Output]()
        for live, first, end in judged:
            rows = slice(at, at := at + end - first)
            scores = live.scores
            scores.logprobs.extend(found.logprobs[rows])
            scores.likeliest.extend(found.likeliest[rows])
            scores.top.extend(dict(list(one.items())[: live.top]) for one in found.top[rows])
            number = live.sequence.number
            if live.scores_only and any(one != one for one in found.logprobs[rows]):
                outputs.append(self._end(live, Output(number, finish="error", error=NOT_FINITE)))
            elif live.scores_only and end == len(live.targets):
                outputs.append(self._end(live, Output(number, finish="stop", scores=scores)))
        return outputs

    def _drawn(self, lives: Sequence[LiveRequest], logits: Tensor) -> Callable[[], list[Output]]:
        """Draw a token for each row, by each request's own rules; logits are adjusted in place.
        What hands the tokens out, which cannot fail."""
        for row, live in enumerate(lives):
            request, ids = live.request, live.sequence.ids
            if request.sampling.penalises or request.sampling.logit_bias:
                split = len(request.prompt)
                adjust(logits[row], request.sampling, ids[:split], ids[split:])
            if live.generated < request.min_tokens and request.stop_ids:
                logits[row, list(request.stop_ids)] = float("-inf")
            if live.grammar is not None:
                live.grammar.mask(logits[row])
        # The position that the new token will have.
        positions = [len(live.sequence.ids) for live in lives]
        tokens = draw_each(logits, [live.request.sampling for live in lives], positions)
        told = self._token_logprobs(lives, tokens, logits)
        empty = {
            row
            for row, token in enumerate(tokens)
            if token == NO_TOKEN and bool(logits[row].amax() == float("-inf"))
        }
        return lambda: [
            self._take(
                live,
                token,
                told.get(row, (None, None)),
                NOTHING_LEFT if row in empty else NOT_FINITE,
            )
            for row, (live, token) in enumerate(zip(lives, tokens, strict=True))
        ]

    def _take(
        self, live: LiveRequest, token: int, told: TokenLogprobs, error: str = NOT_FINITE
    ) -> Output:
        """Append a request's token, or end it; with `error` where there is none."""
        request, sequence = live.request, live.sequence
        number = sequence.number
        if token == NO_TOKEN:
            why = live.grammar.error if live.grammar is not None else ""
            return self._end(live, Output(number, finish="error", error=why or error))
        if live.generated == 0:
            self.reused_tokens += sequence.reused or 0
        if token in request.stop_ids:
            return self._end(live, Output(number, None, *told, "stop", token))
        sequence.ids.append(token)
        live.generated += 1
        finish: Finish | None = None
        if live.grammar is not None and live.grammar.take(token):
            finish = "stop"
        elif live.generated >= request.max_tokens:
            finish = "length"
        output = Output(number, token, *told, finish)
        return self._end(live, output) if finish else output

    def _end(self, live: LiveRequest, output: Output) -> Output:
        del self._by_number[live.sequence.number]
        self._ended[live.sequence.number] = live
        self._drop(live)
        return output

    def _token_logprobs(
        self, lives: Sequence[LiveRequest], tokens: Sequence[int], logits: Tensor
    ) -> dict[int, TokenLogprobs]:
        """By row, the log-probability of its token and of the likeliest ones, where asked for."""
        rows = [row for row, live in enumerate(lives) if live.request.logprobs is not None]
        rows = [row for row in rows if tokens[row] != NO_TOKEN]
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
        # A graph would go on reading weights that were cast for the step of its capture alone.
        cached = not self._wants_graphs
        return torch.autocast(self.device.type, self.dtype, cache_enabled=cached)


def _failure(error: str) -> UserError:
    """What to raise for a request that failed."""
    return CheckpointError(error) if error == NOT_FINITE else ConfigError(error)
