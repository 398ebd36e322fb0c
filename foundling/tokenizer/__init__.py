"""Text and conversations to ids and back: byte-level BPE, special tokens, the one chat renderer."""
