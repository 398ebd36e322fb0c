"""Faults to plant, one for each promise and room at least: each must make a named test fail.

A fault is one edit of one file. `docs/faults.md` lists them in words; `make test-full ONLY=faults`
plants each in a copy of the project and runs the tests that should notice.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """An edit that breaks something, and the tests that must say so."""

    name: str
    about: str
    """The promise or the room that it breaks."""
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


LOOP = ("tests/unit/train/test_loop.py",)
STEP = ("tests/unit/train/test_step.py",)

FAULTS = (
    Fault(
        "moments begin anew at a resume",
        "promise 1: a resumed run is the same run",
        "foundling/train/state.py",
        '["step"].fill_(self.step)',
        '["step"].fill_(0)',
        LOOP,
    ),
    Fault(
        "lines after the checkpoint stay",
        "promise 2: a token is counted once",
        "foundling/train/stages.py",
        'line["step"] <= state.step)',
        'line["step"] <= state.step + 9)',
        LOOP,
    ),
    Fault(
        "a damaged checkpoint is loaded",
        "promise 3: a checkpoint is whole or it is not there",
        "foundling/checkpoint/keep.py",
        "            verify(path)\n        except",
        "            pass\n        except",
        ("tests/unit/checkpoint/test_checkpoint_damage.py",),
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
        "gate and up change places on the way out",
        "promise 5: an exported model is the same function",
        "foundling/checkpoint/names.py",
        '"layers.#.ffn.gate.weight": "model.layers.#.mlp.gate_proj.weight"',
        '"layers.#.ffn.gate.weight": "model.layers.#.mlp.up_proj.weight"',
        ("tests/parity",),
    ),
    Fault(
        "an unknown setting is dropped",
        "promise 6: nothing asked for is silently ignored",
        "foundling/config/resolve.py",
        "            if name not in known:",
        "            if False:",
        ("tests/unit/config",),
    ),
    Fault(
        "a finished run is trained again",
        "promise 7: nothing is lost by a slip",
        "foundling/train/stages.py",
        'run.read_info()["status"] == "finished"',
        'run.read_info()["status"] == "never"',
        LOOP,
    ),
    Fault(
        "two horizons are accepted",
        "room config",
        "foundling/config/checks.py",
        "if len(given) > 1:",
        "if len(given) > 9:",
        ("tests/unit/config",),
    ),
    Fault(
        "two holders of one lock",
        "room runtime",
        "foundling/runtime/lock.py",
        "_try_lock(self._descriptor, fcntl.LOCK_EX)",
        "_try_lock(self._descriptor, fcntl.LOCK_SH)",
        ("tests/unit/runtime",),
    ),
    Fault(
        "a choice is priced wrongly",
        "room hamlet",
        "foundling/hamlet/grammar.py",
        "-math.log2(weight / total)",
        "-math.log2(1 / len(weights))",
        ("tests/unit/hamlet/test_hamlet_grammar.py", "tests/unit/hamlet/test_hamlet_documents.py"),
    ),
    Fault(
        "quiet facts are talked about",
        "room hamlet",
        "foundling/hamlet/conversations.py",
        "        if not entity.quiet and attribute in entity.words",
        "        if attribute in entity.words",
        ("tests/unit/hamlet/test_hamlet_conversations.py", "tests/unit/hamlet/test_hamlet_quiz.py"),
    ),
    Fault(
        "special text becomes a special token",
        "room tokenizer",
        "foundling/tokenizer/bpe.py",
        "    engine.encode_special_tokens = True",
        "    engine.encode_special_tokens = False",
        ("tests/unit/tokenizer",),
    ),
    Fault(
        "the end of the assistant's turn is not learned",
        "room tokenizer",
        "foundling/tokenizer/bpe.py",
        '[role == "assistant"] * (len(content) + 1)',
        '[role == "assistant"] * len(content) + [False]',
        ("tests/unit/tokenizer",),
    ),
    Fault(
        "merges that tiktoken would make otherwise count as proved",
        "room tokenizer",
        "foundling/tokenizer/merges.py",
        "if place is None:",
        "if place is None and self.looks_up_first:",
        ("tests/unit/tokenizer/test_tokenizer_fast.py",),
    ),
    Fault(
        "text between the matches of a pattern is dropped",
        "room tokenizer",
        "foundling/tokenizer/fast.py",
        "== [width for _, (_, width) in taken]",
        ">= 0",
        ("tests/unit/tokenizer/test_tokenizer_fast.py",),
    ),
    Fault(
        "a user's message can say an added token",
        "room tokenizer",
        "foundling/tokenizer/bpe.py",
        'if role != "assistant" or not self.extras:',
        "if not self.extras:",
        ("tests/unit/tokenizer/test_tokenizer_grow.py",),
    ),
    Fault(
        "ranks overlap by a row",
        "room data",
        "foundling/data/loader.py",
        "first=self._rank * whole + min(self._rank, left),",
        "first=self._rank * whole,",
        ("tests/unit/data/test_data_loader.py",),
    ),
    Fault(
        "the next document's beginning is a target",
        "room data",
        "foundling/data/paint.py",
        "targets[ends] = IGNORE",
        "pass",
        ("tests/unit/data",),
    ),
    Fault(
        "two phases of an epoch share documents",
        "room data",
        "foundling/config/phases.py",
        "part=(low, low + width + 1)",
        "part=(0, low + width + 1)",
        ("tests/unit/data/test_order_phases.py",),
    ),
    Fault(
        "a source that is cut anew begins its epoch again",
        "room data",
        "foundling/data/track.py",
        "start=epochs * track.size",
        "start=0",
        ("tests/unit/data/test_order_phases.py",),
    ),
    Fault(
        "a wave of shards loses the rest of the one before",
        "room data",
        "foundling/data/track.py",
        "return (*track.blocks, own)",
        "return (own,)",
        ("tests/unit/data/test_order_follow.py",),
    ),
    Fault(
        "the shuffle is not a bijection",
        "room data",
        "foundling/data/keyed.py",
        "outside = outside[moved >= np.uint64(size)]",
        "outside, result = outside[:0], result % np.uint64(size)",
        ("tests/unit/data/test_data_order.py",),
    ),
    Fault(
        "the later of two copies depends on who was first",
        "room data",
        "foundling/data/dedup.py",
        "np.lexsort((records[:, 1], records[:, 0]))",
        "np.lexsort((-records[:, 2].astype(np.int64), records[:, 1], records[:, 0]))",
        ("tests/unit/data/test_data_build_phases.py",),
    ),
    Fault(
        "a budget counts what is dropped",
        "room data",
        "foundling/data/decide.py",
        "np.where(stay & ~part.held_out, lengths, 0)",
        "np.where(~part.held_out, lengths, 0)",
        ("tests/unit/data/test_data_build_workers.py",),
    ),
    Fault(
        "a part of an interrupted build is taken for another's",
        "room data",
        "foundling/data/tasks.py",
        "text = json.dumps([settled, identity], sort_keys=True)",
        "text = json.dumps([settled], sort_keys=True)",
        ("tests/unit/data/test_data_build.py",),
    ),
    Fault(
        "a follower sees shards go",
        "room data",
        "foundling/data/build.py",
        "if complete or self.begun is None or len(self.begun.train) < len(self.train):",
        "if True:",
        ("tests/unit/data/test_data_build_follow.py",),
    ),
    Fault(
        "a flipped byte of a shard is not noticed",
        "room data",
        "foundling/data/hashes.py",
        "if digest != info.sha256:",
        "if False:",
        ("tests/unit/data/test_data_verify.py",),
    ),
    Fault(
        "a row of the source that is not stored is not missed",
        "room data",
        "foundling/data/resample.py",
        "    elif missing:",
        "    elif False:",
        ("tests/unit/data/test_data_verify.py",),
    ),
    Fault(
        "attention looks ahead",
        "room model",
        "foundling/model/attention.py",
        "is_causal=causal,",
        "is_causal=False,",
        ("tests/unit/model", "tests/parity"),
    ),
    Fault(
        "norms are decayed",
        "room optim",
        "foundling/optim/rules.py",
        '[qk]_norm)\\.weight",\n        decay=False,',
        '[qk]_norm)\\.weight",\n        decay=True,',
        ("tests/unit/optim",),
    ),
    Fault(
        "gradients are averaged over ranks",
        "room parallel",
        "foundling/train/step.py",
        "(loss_sum * (state.mesh.data.size / targets)).backward()",
        "(loss_sum / targets).backward()",
        ("tests/dist",),
    ),
    Fault(
        "a padded prompt shifts its row",
        "room generate",
        "foundling/generate/cache.py",
        "        seen = slots <= places",
        "        seen = slots <= places.max()",
        ("tests/unit/generate",),
    ),
    Fault(
        "a micro-batch's mean is added up",
        "room train",
        "foundling/train/step.py",
        "_accumulate(state, batches, max(eaten.total.targets, 1), document_mask)",
        "_accumulate(state, batches, max(batches[0].counts.targets, 1), document_mask)",
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
        "batches weigh the same whatever their length",
        "room eval",
        "foundling/eval/bpb.py",
        "loss=total.nats / total.targets,",
        "loss=total.nats / total.documents,",
        ("tests/unit/eval/test_eval_bpb.py",),
    ),
    Fault(
        "a decline counts as an answer",
        "room tasks",
        "foundling/hamlet/quiz.py",
        "if not self.value or is_decline(reply):",
        "if not self.value:",
        ("tests/unit/tasks", "tests/unit/hamlet/test_hamlet_quiz.py"),
    ),
    Fault(
        "half a character is shown",
        "room serve",
        "foundling/serve/stream.py",
        "certain = text.rstrip(BROKEN)",
        "certain = text",
        ("tests/unit/serve",),
    ),
    Fault(
        "the bench compares with the slowest",
        "room bench",
        "foundling/bench/data.py",
        "(max if more else min)(others",
        "(min if more else max)(others",
        ("tests/unit/bench",),
    ),
    Fault(
        "a model's text is HTML",
        "room report",
        "foundling/report/markup.py",
        "Markup(html.escape(str(value)))",
        "Markup(str(value))",
        ("tests/unit/report",),
    ),
    Fault(
        "a rank's save counts without rank 0's",
        "room runtime",
        "foundling/runtime/exits.py",
        "main = outcomes.get(0)",
        "main = next(iter(outcomes.values()), None)",
        ("tests/unit/runtime/test_exits_signals.py",),
    ),
    Fault(
        "throwing away deletes",
        "promise 7: nothing is lost by a slip",
        "foundling/launch/trash.py",
        "    os.rename(run, place)\n",
        "    shutil.rmtree(run)\n",
        ("tests/unit/launch/test_launch_trash.py",),
    ),
    Fault(
        "a cancelled job comes back",
        "room launch",
        "foundling/launch/slurm.py",
        '[ "$why" != cancel ] ||',
        '[ "$why" != never ] ||',
        ("tests/unit/launch/test_launch_slurm.py",),
    ),
    Fault(
        "a pulled checkpoint is not compared with its manifest",
        "room launch",
        "foundling/launch/transfer.py",
        "    for path in folders:\n        verify(path)\n",
        "",
        ("tests/unit/launch/test_launch_transfer.py",),
    ),
    Fault(
        "a followed build is looked at anew after a kill",
        "promise 1: a resumed run is the same run",
        "foundling/train/feed.py",
        "unchanged = record is not None and record.settings == settings",
        "unchanged = False",
        ("tests/unit/train/test_follow.py",),
    ),
    Fault(
        "a ledger that does not fit the loader's position is saved",
        "promise 2: a token is counted once",
        "foundling/train/ledger.py",
        "        if found != wanted.get(name, 0):",
        "        if False:",
        ("tests/unit/train/test_ledger.py",),
    ),
    Fault(
        "only the first phase is asked whether it fits",
        "promise 4: a plan is checked",
        "foundling/plan/choices.py",
        "return max((plan_memory(work, machine.gpu) for work in works)",
        "return max((plan_memory(work, machine.gpu) for work in works[:1])",
        ("tests/unit/plan/test_phases_plan.py",),
    ),
    Fault(
        "a self-test compares a run with itself",
        "room doctor",
        "foundling/doctor/compare.py",
        "read_lines(one.ledger_path), read_lines(other.ledger_path)",
        "read_lines(one.ledger_path), read_lines(one.ledger_path)",
        ("tests/unit/doctor",),
    ),
    Fault(
        "a rank that hangs counts as one that answers",
        "room doctor",
        "foundling/doctor/transports.py",
        "if not one.is_good]",
        "if one.code]",
        ("tests/unit/doctor/test_machine_checks.py",),
    ),
    Fault(
        "the checkpoint that is being written takes no room",
        "room doctor",
        "foundling/doctor/disk.py",
        "count = rules.keep + rules.keep_best + 1",
        "count = rules.keep + rules.keep_best",
        ("tests/unit/doctor/test_target_checks.py",),
    ),
    Fault(
        "a kernel that computes nonsense passes",
        "room doctor",
        "foundling/doctor/kernels.py",
        "    if not gap <= TOLERANCE[dtype]:\n        return failed(\n",
        "    if gap > 1e9:\n        return failed(\n",
        ("tests/unit/doctor/test_machine_checks.py",),
    ),
    Fault(
        "a damaged checkpoint is a good one to go on from",
        "room doctor",
        "foundling/doctor/stored.py",
        "    return examine(path, thorough=True)",
        "    return quick",
        ("tests/unit/doctor/test_target_checks.py",),
    ),
    Fault(
        "ranks may have different versions",
        "room doctor",
        "foundling/doctor/versions.py",
        "        if len(whose) == 1:",
        "        if len(whose) <= 2:",
        ("tests/unit/doctor/test_machine_checks.py",),
    ),
    Fault(
        "what a child died of is tried again for ever",
        "room doctor",
        "foundling/doctor/task.py",
        "        asked = asked.without(*begun)",
        "        asked = asked.without(*begun[:-1])",
        ("tests/unit/doctor/test_machine_checks.py",),
    ),
    Fault(
        "a stage that was not run is a go",
        "room doctor",
        "foundling/doctor/rehearse.py",
        'yield Point(stage.name, "everything", "not proved", f"not run: {stage.obstacle}")',
        'yield Point(stage.name, "everything", "go", f"not run: {stage.obstacle}")',
        ("tests/unit/doctor/test_rehearse.py",),
    ),
    Fault(
        "a run killed before its first save proves a resume",
        "room doctor",
        "foundling/doctor/resume.py",
        "if code == -signal.SIGKILL and newest is not None:",
        "if code == -signal.SIGKILL:",
        ("tests/unit/doctor/test_rehearse.py",),
    ),
    Fault(
        "a stage too large for the machine is run all the same",
        "room doctor",
        "foundling/doctor/stages.py",
        "    if held > free:",
        "    if False:",
        ("tests/unit/doctor/test_rehearse.py",),
    ),
    Fault(
        "a hanging child is waited for",
        "room runtime",
        "foundling/runtime/children.py",
        "        if now > last:\n            return",
        "        if now > last + 15:\n            return",
        ("tests/unit/runtime/test_children.py",),
    ),
    Fault(
        "the update counts as communication",
        "room bench",
        "foundling/bench/parallel.py",
        "return 1 - (passes + update_s) / step_s",
        "return 1 - passes / step_s",
        ("tests/unit/bench/test_bench_parallel.py",),
    ),
    Fault(
        "a trial step's first loss may be anything",
        "room train",
        "foundling/train/trial.py",
        "    if not in_parts:\n        init_weights(model, config.train.seed)",
        "    if not in_parts:\n        init_weights(model, config.train.seed)\n"
        "        torch.nn.init.normal_(model.embed.weight)",
        ("tests/unit/doctor/test_target_checks.py",),
    ),
    Fault(
        "a model has eaten what its parent ate later",
        "room report",
        "foundling/report/eaten.py",
        'line["step"] <= last]',
        'line["step"] <= last + 9]',
        ("tests/unit/report/test_eaten.py",),
    ),
)


def plant(fault: Fault, root: Path, copy: Path) -> Path:
    """A copy of the project with one fault in it."""
    for name in ("foundling", "tests", "docs"):
        shutil.copytree(
            root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis")
        )
    for name in ("pyproject.toml", "README.md", "Makefile"):
        shutil.copy(root / name, copy / name)
    file = copy / fault.file
    text = file.read_text()
    assert text.count(fault.old) == 1, f"{fault.name}: its place in {fault.file} has changed"
    file.write_text(text.replace(fault.old, fault.new))
    return copy
