"""Text and conversations to ids and back: byte-level BPE, special tokens, the one chat renderer."""

from foundling.tokenizer.bpe import Tokenizer
from foundling.tokenizer.chat import CHAT_TEMPLATE, SPECIALS, Message, Rendered
from foundling.tokenizer.foreign import ForeignTokenizer
from foundling.tokenizer.measure import Measure, measure
from foundling.tokenizer.train import train_tokenizer

__all__ = [
    "CHAT_TEMPLATE",
    "SPECIALS",
    "ForeignTokenizer",
    "Measure",
    "Message",
    "Rendered",
    "Tokenizer",
    "measure",
    "train_tokenizer",
]
