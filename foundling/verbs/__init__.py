"""Every verb but plan, config, train and demo, a file a family: what it takes and which room works.

They stand apart from cli.py to keep that file a page of parsing and training; each function parses
nothing and computes nothing, it hands options to a room and prints what comes back.
"""

from foundling.verbs import checkpoint, data, launch, model, runs, tokenizer
from foundling.verbs.base import Verb

FILE_VERBS: dict[str, Verb] = {
    **tokenizer.VERBS,
    **data.VERBS,
    **model.VERBS,
    **checkpoint.VERBS,
    **runs.VERBS,
    **launch.VERBS,
}
