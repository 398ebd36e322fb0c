"""Where a process finds itself: alone, a rank, a node of many; from variables alone."""

import pytest

from foundling.config.errors import ConfigError
from foundling.config.load import load_config
from foundling.launch import environment
from foundling.launch.environment import (
    detect_environment,
    expand_nodes,
    join_slurm,
    processes_here,
)

STEP = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[09-11]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
BATCH = {"SLURM_JOB_ID": "41", "SLURM_PROCID": "0", "SLURM_NTASKS": "3", "SLURM_NODEID": "0"}


@pytest.mark.parametrize(
    ("short", "names"),
    [
        ("login", ["login"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("frontier[00098-00101,00200]", [f"frontier{n:05d}" for n in (98, 99, 100, 101, 200)]),
        ("a[1,3],b2,c[7-8]-ib", ["a1", "a3", "b2", "c7-ib", "c8-ib"]),
        ("r[1-2]n[3-4]", ["r1n3", "r1n4", "r2n3", "r2n4"]),
    ],
)
def test_node_lists_are_written_out(short: str, names: list[str]) -> None:
    assert expand_nodes(short) == names


def test_an_empty_node_list_is_refused() -> None:
    with pytest.raises(ConfigError, match="srun"):
        expand_nodes("")


def test_alone_and_under_torchrun() -> None:
    assert detect_environment(env={}).kind == "alone"
    assert detect_environment(env={"RANK": "1", "WORLD_SIZE": "2"}).kind == "rank"


def test_a_batch_script_is_not_a_step() -> None:
    """Its SLURM_NTASKS would have us wait for processes that nobody has started."""
    assert detect_environment(env=BATCH).kind == "alone"


def test_a_launcher_on_every_node_of_a_step() -> None:
    found = detect_environment(4, STEP)
    assert (found.kind, found.nodes, found.node, found.head) == ("node", 3, 2, "n09")
    assert found.name == "slurm-41-0-0"
    assert not found.is_head
    assert detect_environment(4, {**STEP, "SLURM_NODEID": "0"}).is_head
    again = detect_environment(4, {**STEP, "SLURM_RESTART_COUNT": "2"})
    assert again.name != found.name, "another life of the job has logs of its own"
    assert detect_environment(4, {**STEP, "MASTER_ADDR": "10.0.0.1"}).head == "10.0.0.1"
    other = detect_environment(4, {**STEP, "SLURM_JOB_ID": "42"})
    assert other.port != found.port
    assert 20_000 <= found.port < 32_768


def test_a_task_for_every_gpu_is_a_rank() -> None:
    env = {
        **STEP,
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_TASKS_PER_NODE": "3(x2),2",
        "SLURM_PROCID": "7",
        "SLURM_LOCALID": "1",
    }
    found = detect_environment(env=env)
    assert found.kind == "rank"
    join_slurm(found, env)
    joined = {name: env[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    assert joined == {"RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("n09", str(found.port))


def test_a_task_that_was_given_one_gpu_takes_the_first() -> None:
    env = {**STEP, "SLURM_STEP_NUM_TASKS": "6", "SLURM_LOCALID": "1", "ROCR_VISIBLE_DEVICES": "1"}
    join_slurm(detect_environment(env=env), env)
    assert env["LOCAL_RANK"] == "0"


def test_torchruns_variables_are_left_alone() -> None:
    env = {"RANK": "3", "WORLD_SIZE": "4"}
    join_slurm(detect_environment(env=env), env)
    assert env == {"RANK": "3", "WORLD_SIZE": "4"}


def test_one_process_a_gpu_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("hamlet")
    monkeypatch.setattr(environment, "visible_gpus", lambda: 8)
    assert processes_here(config, None) == 8
    assert processes_here(config, 3) == 3
    assert processes_here(load_config("hamlet", {"train.device": "cpu"}), None) == 1
    two = load_config("hamlet", {"parallel.replicate": "1", "parallel.shard": "2"})
    assert processes_here(two, None) == 2, "a layout that names its degrees needs no more"
    assert processes_here(load_config("hamlet", {"parallel.shard": "2"}), None) == 8


def test_gpus_are_counted_by_variables_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.visible_gpus({"CUDA_VISIBLE_DEVICES": "0,2,5"}) == 3
    assert environment.visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert environment.visible_gpus({"HIP_VISIBLE_DEVICES": "-1"}) == 0


def test_more_processes_than_the_machine_has_room_for_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, on_cpu = load_config("hamlet"), load_config("hamlet", {"train.device": "cpu"})
    monkeypatch.setattr(environment.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(environment, "visible_gpus", lambda: 0)
    assert processes_here(config, 32) == 32
    with pytest.raises(ConfigError, match="--nproc 100000 is more than 16 for each of the 2 cores"):
        processes_here(config, 100_000)
    monkeypatch.setattr(environment, "visible_gpus", lambda: 1)
    with pytest.raises(ConfigError, match="--nproc 2 is more than the 1 GPUs here"):
        processes_here(config, 2)
    assert processes_here(on_cpu, 2) == 2, "beside a GPU that is not used"
    with pytest.raises(ConfigError, match="cores"):
        processes_here(on_cpu, 33)
