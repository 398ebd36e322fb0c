"""From text to text: prompts or conversations in, what the model says out."""

from collections.abc import Sequence
from typing import Any

from foundling.config.errors import ConfigError
from foundling.generate.engine import Engine
from foundling.generate.sampling import Sampling
from foundling.model.transformer import Transformer
from foundling.runtime.console import warn
from foundling.runtime.device import ran_out
from foundling.tokenizer.chat import Message
from foundling.tokenizer.tokenizer import Tokenizer

MOST_TOKENS = 2**31 - 1
"""New tokens that may be asked for: of more, the bytes of their keys are no number to torch."""


class TextModel:
    """A trained model and its tokenizer: texts in, texts out. `foundling.load` opens one."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, context: int) -> None:
        self._model, self._tokenizer, self._context = model, tokenizer, context

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        max_tokens: int = 100,
        temperature: float = 0.8,
        **sampling: Any,
    ) -> list[str]:
        """What the model writes after each prompt (list of str, without the prompts); of one str a
        list of one.

        max_tokens (int): the longest continuation; temperature (float): 0 is greedy; `sampling`:
        top_k (int), top_p, min_p (float) and seed (int).
        """
        return continue_texts(
            self._model,
            self._tokenizer,
            [prompts] if isinstance(prompts, str) else prompts,
            max_new_tokens=max_tokens,
            sampling=Sampling(temperature=temperature, **sampling),
            context=self._context,
        )

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        **sampling: Any,
    ) -> str:
        """The assistant's next message (str) in a conversation: a list of {"role": str, "content":
        str}, or one str, which is the user's first message.

        max_tokens (int): the longest reply; None: what fits into the rows that the model was
        trained on. temperature and `sampling` as of `generate`.
        """
        chat: Sequence[Message] = (
            [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        )
        if max_tokens is None:
            length = len(self._tokenizer.prompt(chat))
            max_tokens = self._context - length
            if max_tokens < 1:
                raise ConfigError(
                    f"the conversation has {length:,} tokens and the model was trained on rows of"
                    f" {self._context:,}; leave out the oldest messages, or give max_tokens."
                )
        [reply] = answer_chats(
            self._model,
            self._tokenizer,
            [chat],
            max_new_tokens=max_tokens,
            sampling=Sampling(temperature=temperature, **sampling),
            context=self._context,
        )
        return reply


def continue_texts(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    context: int = 0,
) -> list[str]:
    """What the model writes after each prompt, as the beginning of a document. A prompt longer than
    `context`, the rows that it was trained on (0: unknown), is warned of."""
    ids = [[tokenizer.bos_id, *tokenizer.encode(prompt)] for prompt in prompts]
    return _texts(model, tokenizer, ids, max_new_tokens, sampling, context)


def answer_chats(
    model: Transformer,
    tokenizer: Tokenizer,
    chats: Sequence[Sequence[Message]],
    *,
    max_new_tokens: int = 100,
    sampling: Sampling,
    context: int = 0,
) -> list[str]:
    """The assistant's next message in each conversation; `context` as above."""
    ids = [tokenizer.prompt(chat) for chat in chats]
    return _texts(model, tokenizer, ids, max_new_tokens, sampling, context)


def _texts(
    model: Transformer,
    tokenizer: Tokenizer,
    ids: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    context: int,
) -> list[str]:
    _check_room(max(map(len, ids), default=0), max_new_tokens, model.max_positions, context)
    engine = Engine(model, next(model.parameters()).device)
    try:
        found = engine.generate(ids, max_new_tokens, sampling, tokenizer.stop_ids)
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        raise ConfigError(
            f"memory does not suffice for {max_new_tokens:,} new tokens after each of {len(ids)}"
            " prompts; ask for fewer (--max-tokens)."
        ) from None
    return [tokenizer.decode(completion.ids, skip_special=True) for completion in found]


def _check_room(longest: int, max_new_tokens: int, positions: int | None, context: int) -> None:
    """Refuse a prompt that leaves no position to write at; warn where the model stops short, or
    reads more than it was trained on."""
    if max_new_tokens < 1:
        raise ConfigError(f"max_tokens is {max_new_tokens} and must be above zero.")
    if max_new_tokens > MOST_TOKENS:
        raise ConfigError(f"at most {MOST_TOKENS:,} new tokens can be asked for (--max-tokens).")
    if positions and longest >= positions:
        raise ConfigError(
            f"a prompt has {longest:,} tokens and the model has {positions:,} positions, none of"
            " which is left to write at; shorten the prompt."
        )
    if positions and longest + max_new_tokens > positions:
        warn(f"the model ends at position {positions:,}, before {max_new_tokens:,} new tokens.")
    if context and longest > context:
        warn(
            f"a prompt has {longest:,} tokens and the model was trained on rows of {context:,}:"
            " beyond those it cannot be trusted."
        )
