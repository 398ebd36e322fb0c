"""Every verb but plan, config, train and demo, a file a family: what it takes and which room works.

They stand apart from cli.py to keep that file a page of parsing and training; each function parses
nothing and computes nothing, it hands options to a room and prints what comes back.
"""

from foundling.verbs import (
    bench,
    bench_parts,
    bench_train,
    checkpoint,
    convert,
    data,
    data_fetch,
    data_trust,
    doctor,
    eval,
    eval_compare,
    eval_lm,
    launch,
    model,
    runs,
    selftest,
    tokenizer,
)
from foundling.verbs.base import Verb

FILE_VERBS: dict[str, Verb] = {
    **tokenizer.VERBS,
    **data.VERBS,
    **data_fetch.VERBS,
    **data_trust.VERBS,
    **eval.VERBS,
    **model.VERBS,
    **convert.VERBS,
    **eval_compare.VERBS,
    **eval_lm.VERBS,
    **checkpoint.VERBS,
    **runs.VERBS,
    **launch.VERBS,
    **doctor.VERBS,
    **selftest.VERBS,
    **bench.VERBS,
    **bench_train.VERBS,
    **bench_parts.VERBS,
}
