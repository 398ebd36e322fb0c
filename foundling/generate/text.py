"""From text to text: prompts or conversations in, what the model says out."""

from collections.abc import Sequence

from foundling.generate.engine import Engine
from foundling.generate.sampling import Sampling
from foundling.model import Transformer
from foundling.tokenizer import Tokenizer
from foundling.tokenizer.chat import Message


def continue_texts(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    sampling: Sampling,
) -> list[str]:
    """What the model writes after each prompt, as the beginning of a document."""
    ids = [[tokenizer.bos_id, *tokenizer.encode(prompt)] for prompt in prompts]
    return _texts(model, tokenizer, ids, max_new_tokens, sampling)


def answer_chats(
    model: Transformer,
    tokenizer: Tokenizer,
    chats: Sequence[Sequence[Message]],
    *,
    max_new_tokens: int = 100,
    sampling: Sampling,
) -> list[str]:
    """The assistant's next message in each conversation."""
    ids = [tokenizer.prompt(chat) for chat in chats]
    return _texts(model, tokenizer, ids, max_new_tokens, sampling)


def _texts(
    model: Transformer,
    tokenizer: Tokenizer,
    ids: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
) -> list[str]:
    engine = Engine(model, next(model.parameters()).device)
    found = engine.generate(ids, max_new_tokens, sampling, tokenizer.stop_ids)
    return [tokenizer.decode(completion.ids, skip_special=True) for completion in found]
