"""What is handed to SLURM: read as text, checked by bash, and taken by a stand-in for sbatch."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from foundling.cli.main import run_verb
from foundling.config.errors import ConfigError, RunError, UserError
from foundling.config.load import dump_yaml, load_run_config
from foundling.config.run import RunConfig
from foundling.launch.bad_nodes import note_bad_node, read_bad_nodes
from foundling.launch.detach import no_requeue_file
from foundling.launch.slurm import PROFILES, environment, seconds
from foundling.runtime.exits import EndOfRun, Exit
from foundling.runtime.run_dir import RunDir

DATA = ("--data.sources", "{data/dclm: 1}")
RUNS_001 = {"llama3.1-8b-n64": 64, "llama3.1-8b-n640": 640, "llama3.1-8b-n8-bench": 8}


def dry(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    run_verb(["launch", "slurm", *words, *DATA, "--dry-run"])
    return capsys.readouterr().out


def test_data_that_can_be_seen_must_last_for_the_run(
    tiny: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(dump_yaml(tiny))
    words = ["launch", "slurm", str(file), "--nodes", "2", "--nproc", "1", "--time", "60"]
    run_verb([*words, "--dry-run"])
    assert "#SBATCH --nodes=2" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"would be read .* times and data\.allow_repeat"):
        run_verb([*words, "--dry-run", "--train.horizon", "1000000"])
    with pytest.raises(UserError, match="holds no"):
        run_verb([*words, "--dry-run", "--data.sources", f"{{{tmp_path}: 1}}"])


@pytest.mark.parametrize("name", RUNS_001)
def test_the_runs_of_001_render(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    nodes = str(RUNS_001[name])
    words = (name, "--nodes", nodes, "--time", "24:00:00", "--profile", "frontier")
    script = dry(capsys, *words, "--account", "abc123", "--partition", "batch")
    for line in (
        f"#SBATCH --job-name={name}",
        f"#SBATCH --nodes={nodes}",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --time=24:00:00",
        "#SBATCH --account=abc123",
        "#SBATCH --partition=batch",
        "#SBATCH --requeue",
        "#SBATCH --signal=B:USR1@300",
        "export NCCL_SOCKET_IFNAME=hsn0",
        "export GLOO_SOCKET_IFNAME=hsn0",
        "export NCCL_NET_GDR_LEVEL=3",
        "export NCCL_CROSS_NIC=1",
        "export NCCL_IB_TIMEOUT=31",
        "export NCCL_ALGO=TREE",
        "export TORCH_NCCL_BLOCKING_WAIT=1",
        "export HF_HUB_OFFLINE=1",
        "export PYTORCH_ALLOC_CONF=expandable_segments:True",
    ):
        assert line in script.splitlines(), line
    assert f"{tmp_path}/runs/{name}" in script
    assert "--nproc 8 --restarts 9 --grace 285" in script
    assert list(tmp_path.iterdir()) == [], "a dry run leaves nothing behind"
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_the_layouts_of_001_eat_its_tokens() -> None:
    from foundling.config.load import load_config
    from foundling.plan.horizon import rows_per_step
    from foundling.plan.layout import lay_out

    for name, tokens in [("n64", 11_010_048), ("n640", 110_100_480), ("n8-bench", 524_288)]:
        config = load_config(f"llama3.1-8b-{name}")
        nodes = RUNS_001[f"llama3.1-8b-{name}"]
        layout = lay_out(config.parallel, 8 * nodes)
        rows = rows_per_step(config, layout.data_ranks)
        assert rows * config.train.seq_len == tokens


def test_pods_have_the_variables_of_003() -> None:
    found = environment(PROFILES["pods"], "", {"NCCL_DEBUG": "INFO"})
    assert found == {
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
        "NCCL_NET": "Socket",
        "NCCL_NET_PLUGIN": "none",
        "NCCL_DEBUG": "INFO",
    }
    assert environment(PROFILES["pods"], "eth0", {})["NCCL_SOCKET_IFNAME"] == "eth0"


def test_containers_setup_and_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("hamlet", "--nodes", "2", "--time", "60", "--run", "runs/a b")
    script = dry(capsys, *words, "--container", "image.sif", "--setup", "module load rocm")
    assert "apptainer exec --nv image.sif python3 -m foundling train" in script
    assert "\nmodule load rocm\n" in script
    assert "a b'" in script
    script = dry(capsys, *words, "--container", "nvcr.io/x", "--sbatch", "gres=gpu:4")
    assert "--container-image=nvcr.io/x" in script
    assert "#SBATCH --gres=gpu:4" in script.splitlines()
    assert " -m foundling doctor --node --run '" in script
    assert "doctor" not in dry(capsys, *words, "--no-preflight")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--time", "soon"], "--time soon"),
        (["--time", "5:00"], "--grace"),
        (["--time", "60", "--profile", "nowhere"], "frontier"),
        (["--time", "60", "--env", "A"], "NAME=VALUE"),
        (["--time", "60", "--parallel.shard", "3"], "does not divide"),
        (["--time", "60", "--parallel.tensor", "16"], "16"),
        (["--time", "60", "--profile", "pods"], "lo does not leave its node"),
        (["--time", "60", "--env", "NCCL_SOCKET_IFNAME=lo"], "--interface"),
        (["--time", "60", "--sbatch", "two words=1"], "--sbatch two words=1 is no option"),
    ],
)
def test_what_would_fail_later_is_refused_now(words: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        run_verb(["launch", "slurm", "hamlet", "--nodes", "2", *words, *DATA, "--dry-run"])


def test_a_job_names_its_data_and_need_not_see_it_here(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["launch", "slurm", "hamlet", "--nodes", "2", "--time", "60", "--dry-run"]
    with pytest.raises(ConfigError, match=r"data\.sources is empty"):
        run_verb(words)
    run_verb([*words, "--data.sources", f"{{{tmp_path}: 1, nowhere/at-all: 1}}"])
    said = capsys.readouterr().err
    assert "nowhere/at-all is not to be seen" in said
    assert str(tmp_path) not in said
    RunDir(tmp_path / "done").write_info({"status": "finished", "parent": None})
    with pytest.raises(RunError, match="is finished"):
        run_verb([*words, *DATA, "--run", str(tmp_path / "done")])
    one = ["--profile", "pods", "--nodes", "1"]
    assert "IFNAME=lo" in dry(capsys, "hamlet", "--time", "60", *one)


@pytest.mark.parametrize(
    ("limit", "value"),
    [("30", 1800), ("30:30", 1830), ("24:00:00", 86400), ("1-0", 86400), ("2-12:30", 217800)],
)
def test_time_limits_are_read_as_slurm_reads_them(limit: str, value: int) -> None:
    assert seconds(limit) == value


def stand_in(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


def test_a_job_is_submitted_with_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(tmp_path / "bin", "sbatch", f'cp "$2" {tmp_path}/taken; echo "77;one"')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    run = tmp_path / "run"
    words = ["launch", "slurm", "hamlet", "--nodes", "1", "--time", "60", "--run", str(run)]
    words += DATA
    run_verb([*words, "--optim.lr", "0.5"])
    assert "submitted job 77" in capsys.readouterr().out
    assert load_run_config(run / "logs" / "submitted.yaml").optim.lr == 0.5
    assert str(run / "logs" / "submitted.yaml") in (tmp_path / "taken").read_text()
    stand_in(tmp_path / "bin", "sbatch", "echo no such partition >&2; exit 1")
    with pytest.raises(ConfigError, match="no such partition"):
        run_verb(words)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="PATH"):
        run_verb(words)


def script_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The rendered script with stand-ins for srun and scontrol beside it."""
    words = ("hamlet", "--nodes", "1", "--time", "60", "--run", str(tmp_path / "run"))
    (tmp_path / "run" / "logs").mkdir(parents=True)
    path = tmp_path / "job.sh"
    path.write_text(dry(capsys, *words))
    stand_in(tmp_path / "bin", "scontrol", f'echo "$@" >> {tmp_path}/scontrol.log')
    return path


def run_script(tmp_path: Path, path: Path, srun: str) -> subprocess.Popen[str]:
    stand_in(tmp_path / "bin", "srun", f'case "$*" in *"doctor --node"*) exit 0;; esac\n{srun}')
    environment = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    return subprocess.Popen(
        ["bash", str(path)],
        env={**environment, "SLURM_JOB_ID": "9"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def said(tmp_path: Path) -> list[str]:
    path = tmp_path / "scontrol.log"
    return path.read_text().splitlines() if path.is_file() else []


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=30)
    return process.returncode, out


def test_the_script_requeues_on_75_and_not_after_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script_with(tmp_path, capsys)
    for code in (0, 2, 65, 70, 74):
        assert finish(run_script(tmp_path, path, f"exit {code}"))[0] == code
        assert said(tmp_path) == []
    assert finish(run_script(tmp_path, path, "exit 75"))[0] == 75
    assert said(tmp_path) == ["requeue 9"]
    note_bad_node(tmp_path / "run", "its GPUs do not answer")
    [bad] = read_bad_nodes(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 7, "loss": 3.0}\n')
    assert finish(run_script(tmp_path, path, "exit 75"))[0] == 75
    assert said(tmp_path)[1:] == ["requeue 9", f"update JobId=9 ExcNodeList={bad}"]


def test_crashes_hangs_and_a_stop_that_took_too_long_come_back_a_few_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script_with(tmp_path, capsys)
    note_bad_node(tmp_path / "run", "it hangs", "n7")
    outs = []
    for number, code in enumerate((1, 76, 77, 76)):
        (tmp_path / "run" / "metrics.jsonl").write_text(f'{{"step": {number}}}\n')
        process = run_script(tmp_path, path, f"exit {code}")
        ended, out = finish(process)
        assert ended == code
        outs.append(out)
    assert said(tmp_path) == ["requeue 9", "update JobId=9 ExcNodeList=n7"] * 3
    assert "more than 3 crashes; not coming back" in outs[-1]


def test_the_script_gives_up_after_three_lives_without_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script_with(tmp_path, capsys)
    outs = [finish(run_script(tmp_path, path, "exit 75"))[1] for _ in range(3)]
    assert said(tmp_path) == ["requeue 9", "requeue 9"]
    assert "not coming back" in outs[2]


def test_a_job_that_runs_stop_has_ended_stays_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script_with(tmp_path, capsys)
    no_requeue_file(tmp_path / "run", "9").touch()
    assert finish(run_script(tmp_path, path, "exit 75"))[0] == 75
    assert said(tmp_path) == []


@pytest.mark.parametrize(("name", "requeued"), [("USR1", True), ("TERM", False)])
def test_the_script_passes_the_limit_on_and_a_cancelled_job_stays_away(
    name: str, requeued: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script_with(tmp_path, capsys)
    # Busy for longer than the signal takes: the code that counts is the one after it.
    srun = "trap 'sleep 0.3; exit 75' USR1; echo ready; for i in {1..100}; do sleep 0.1; done"
    process = run_script(tmp_path, path, srun)
    assert process.stdout is not None
    while "ready" not in process.stdout.readline():
        pass
    os.kill(process.pid, signal.Signals[f"SIG{name}"])
    code, out = finish(process)
    assert code == 75
    assert re.search(r"code 75 after (limit|cancel)", out)
    assert (said(tmp_path) == ["requeue 9"]) is requeued


def test_a_node_that_cannot_write_or_compute_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["doctor", "--node", "--run", str(tmp_path / "run")]
    run_verb(words)
    assert read_bad_nodes(tmp_path / "run") == []
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    with pytest.raises(EndOfRun, match="GPUs") as caught:
        run_verb([*words, "--gpus", "512"])
    assert caught.value.code == Exit.NODE
    assert read_bad_nodes(tmp_path / "run") == ["n7"]
