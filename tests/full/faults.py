"""Faults to plant, one for each promise and room at least: each must make a named test fail.

A fault is one edit of one file. `docs/faults.md` lists them in words; `make test-full ONLY=faults`
plants each in a copy of the project and runs the tests that should notice. Here are those of
settings, plan, model and training; the others are in the two files beside this one.
"""

from tests.full.faults_of_data import OF_DATA
from tests.full.faults_of_runs import OF_RUNS
from tests.full.planting import Fault

LOOP = ("tests/unit/train/test_loop.py",)
STEP = ("tests/unit/train/test_step.py",)

FAULTS = (
    Fault(
        "moments begin anew at a resume",
        "promise 1: a resumed run is the same run",
        "foundling/train/state.py",
        "set_step(self.optimizer, self.step)",
        "set_step(self.optimizer, 0)",
        LOOP,
    ),
    Fault(
        "lines after the checkpoint stay",
        "promise 2: a token is counted once",
        "foundling/train/setup.py",
        "cut_lines(run.metrics_path, state.step)",
        "cut_lines(run.metrics_path, state.step + 9)",
        LOOP,
    ),
    Fault(
        "scores of a course that was given up stay",
        "promise 1: a resumed run is the same run",
        "foundling/runtime/run_reader.py",
        'if one["step"] <= back_to]',
        'if one["step"] <= back_to + 9]',
        ("tests/unit/runtime/test_run_reader.py",),
    ),
    Fault(
        "the guard acts on what is not on the disk",
        "promise 1: a resumed run is the same run",
        "foundling/runtime/run_dir.py",
        "        if (error := self.sync()) is not None:\n            raise error",
        "        self.sync()",
        ("tests/unit/train/test_loop_full_disk.py",),
    ),
    Fault(
        "a third of the feed-forward is not counted",
        "promise 4: a plan is checked",
        "foundling/plan/params.py",
        'for name in ("gate", "up") if model.activation == "swiglu" else ("up",):',
        'for name in ("up",):',
        ("tests/unit/plan/test_params.py",),
    ),
    Fault(
        "an unknown setting is dropped",
        "promise 6: nothing asked for is silently ignored",
        "foundling/config/load.py",
        "            if name not in NAMES[section]:",
        "            if False:",
        ("tests/unit/config",),
    ),
    Fault(
        "a finished run is trained again",
        "promise 7: nothing is lost by a slip",
        "foundling/plan/resolve.py",
        '(info := directory.read_info())["status"] == "finished"',
        '(info := directory.read_info())["status"] == "never"',
        LOOP,
    ),
    Fault(
        "half a step is a horizon",
        "room config",
        "foundling/config/train.py",
        "unit in _WHOLE and not",
        "unit in () and not",
        ("tests/unit/config",),
    ),
    Fault(
        "two phases of an epoch share documents",
        "room data",
        "foundling/config/data.py",
        "part=(low, low + width + 1)",
        "part=(0, low + width + 1)",
        ("tests/unit/data/test_order_phases.py",),
    ),
    Fault(
        "attention looks ahead",
        "room model",
        "foundling/model/kernels/attention_backends.py",
        "is_causal=mask is None and q.shape[2] == k.shape[2],",
        "is_causal=False,",
        ("tests/unit/model", "tests/parity"),
    ),
    Fault(
        "norms are decayed",
        "room optim",
        "foundling/optim/rules.py",
        '[qk]_norm)\\.weight",\n        lr_of="vector",\n        decay=False,',
        '[qk]_norm)\\.weight",\n        lr_of="vector",\n        decay=True,',
        ("tests/unit/optim",),
    ),
    Fault(
        "gradients are averaged over ranks",
        "room parallel",
        "foundling/train/step.py",
        "(loss_sum * (scale * state.mesh.data.size / targets)).backward()",
        "(loss_sum * (scale / targets)).backward()",
        ("tests/dist/test_layout_matrix.py",),
    ),
    Fault(
        "a micro-batch's mean is added up",
        "room train",
        "foundling/train/step.py",
        "_gradients(state, batches, targets, options",
        "_gradients(state, batches, max(batches[0].counts.targets, 1), options",
        STEP,
    ),
    Fault(
        "a step that is not finite is taken",
        "room train",
        "foundling/train/step.py",
        "if not (math.isfinite(loss) and math.isfinite(grad_norm)):",
        "if False:",
        STEP,
    ),
    Fault(
        "a followed build is looked at anew after a kill",
        "promise 1: a resumed run is the same run",
        "foundling/train/dataloader.py",
        "unchanged = record is not None and record.settings == settings",
        "unchanged = False",
        ("tests/unit/train/test_dataloader_follow.py",),
    ),
    Fault(
        "a ledger that does not fit the loader's position is saved",
        "promise 2: a token is counted once",
        "foundling/train/token_ledger.py",
        "        if found != wanted.get(name, 0):",
        "        if False:",
        ("tests/unit/train/test_token_ledger.py",),
    ),
    Fault(
        "only the first phase is asked whether it fits",
        "promise 4: a plan is checked",
        "foundling/plan/resolve.py",
        "return max((plan_memory(work, machine.gpu) for work in works)",
        "return max((plan_memory(work, machine.gpu) for work in works[:1])",
        ("tests/unit/plan/test_horizon.py",),
    ),
    Fault(
        "a trial step's first loss may be anything",
        "room train",
        "foundling/profiling/step_runner.py",
        "    if not in_parts:\n        init_weights(model, config.train.seed)",
        "    if not in_parts:\n        init_weights(model, config.train.seed)\n"
        "        model.embed.weight.data.normal_()",
        ("tests/unit/doctor/test_storage.py",),
    ),
    *OF_DATA,
    *OF_RUNS,
)
