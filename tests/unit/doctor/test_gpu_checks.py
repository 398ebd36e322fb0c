"""The doctor's checks of a machine: versions, interfaces, transports, kernels, health."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from foundling.config.errors import ConfigError
from foundling.config.load import load_config
from foundling.doctor import gpu_checks
from foundling.doctor.checks import (
    CheckResult,
    DoctorRequest,
    Notes,
    asked_about,
    examined,
    failed,
    gathered,
    passed,
    read_notes,
    tried,
    warned,
    worst,
)
from foundling.doctor.examine import compare_versions, own_line
from foundling.doctor.network import (
    Interface,
    find_way,
    interface_lines,
    link_line,
    list_interfaces,
    ways,
)
from foundling.model.kernels.attention_backends import KERNELS
from foundling.plan.hardware import Ceilings, MatmulRate, save_ceilings
from foundling.runtime.processes import ChildResult, run_ranks
from foundling.runtime.versions import own_versions

LO, FAST = Interface("lo", "127.0.0.1"), Interface("hsn0", "10.0.0.3", mbit=200_000)
SLOW, DOCKER = Interface("eth0", "192.168.1.3", mbit=1000), Interface("docker0", "172.17.0.1")
GOOD = ChildResult(0, '{"all_reduce": 2e9, "all_gather": 1e9, "ranks": 2}\n', "", 1.0)
HANGS = ChildResult(None, "", "", 20.0)


class TestLines:
    def test_what_all_say_alike_is_said_once_and_the_rest_by_whom(self) -> None:
        same, odd = passed("versions", "torch 2.13"), failed("kernels", "wrong; leave it out.")
        told = gathered([("rank 0 on a", [same]), ("rank 1 on b", [same, odd])])
        assert told == [
            "pass  versions       torch 2.13 (all 2 ranks)",
            "fail  kernels        wrong; leave it out. (rank 1 on b)",
        ]
        assert gathered([("", [odd])]) == [str(odd)]

    def test_the_worst_counts(self) -> None:
        assert worst([]) == "pass"
        assert worst([passed("a", "b"), warned("a", "b")]) == "warn"
        assert worst([failed("a", "b"), warned("a", "b")]) == "fail"

    def test_a_line_survives_the_way_to_the_parent(self) -> None:
        line = failed("disk", "full; make room.", {"free": 3}, of_node=True)
        assert CheckResult(**json.loads(json.dumps(asdict(line)))) == line


class TestVersions:
    def test_a_rank_with_another_torch_is_named(self) -> None:
        usual = {"torch": "2.13.0", "python": "3.11.7"}
        ranks = [("rank 0 on a", usual), ("rank 1 on a", usual)]
        [line] = compare_versions([*ranks, ("rank 2 on b", {**usual, "torch": "2.11.0"})])
        assert line.level == "fail"
        assert "torch is 2.13.0 on 2 of 3 ranks, but rank 2 on b with 2.11.0" in line.text
        [line] = compare_versions([*ranks, ("rank 2 on b", {"torch": "2.13.0"})])
        assert "python is 3.11.7 on 2 of 3 ranks, but rank 2 on b with none" in line.text
        [line] = compare_versions(ranks)
        assert line.level == "pass"

    def test_a_driver_that_torch_cannot_use_is_a_failure(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert own_versions()["torch"] == torch.__version__
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        line = own_line({"torch": "2.13.0+cpu", "driver": "550.54"})
        assert line.level == "fail"
        assert "built without CUDA" in line.text
        assert own_line({"torch": "2.9.1"}).level == "warn"
        assert own_line({"torch": "2.10.0"}).level == "pass"


class TestInterfaces:
    def test_the_loopback_is_always_there(self) -> None:
        assert any(one.is_loopback for one in list_interfaces())

    def test_the_way_to_the_others_is_named(self) -> None:
        lines = interface_lines(
            [LO, FAST, SLOW],
            name_leads_to="10.0.0.3",
            head="10.0.0.9",
            towards="10.0.0.3",
            nodes=2,
            env={},
        )
        assert [line.level for line in lines] == ["pass", "pass"]
        assert "hsn0 leads to 10.0.0.9" in lines[1].text

    def test_a_name_that_leads_home_is_told_with_the_variables(self) -> None:
        for leads_to in ("127.0.1.1", "127.0.0.1", ""):
            *_, line = interface_lines(
                [LO, SLOW, FAST], name_leads_to=leads_to, towards="", nodes=2, env={}
            )
            assert line.level == "warn"
            assert "export GLOO_SOCKET_IFNAME=hsn0 NCCL_SOCKET_IFNAME=hsn0" in line.text
        alone = interface_lines([LO, SLOW], name_leads_to="", nodes=1, env={})
        assert worst(alone) == "pass"

    def test_an_interface_that_is_not_there_is_told(self) -> None:
        env = {"NCCL_SOCKET_IFNAME": "ib0"}
        [_, line] = interface_lines([LO, SLOW], name_leads_to="", env=env)
        assert "NCCL_SOCKET_IFNAME is ib0 and there is no such interface" in line.text
        env = {"NCCL_SOCKET_IFNAME": "eth"}
        assert worst(interface_lines([LO, SLOW], name_leads_to="", env=env)) == "pass"


class TestTransports:
    def test_a_default_that_works_is_not_searched_further(self) -> None:
        asked: list[dict[str, str]] = []

        def trial(variables: Any) -> list[ChildResult]:
            asked.append(dict(variables))
            return [GOOD, GOOD]

        line = link_line("nccl", find_way(trial, ways("nccl", [LO, FAST], {})))
        assert asked == [{}]
        assert line.level == "pass"
        assert "all-reduce 2.0 GB/s, all-gather 1.0 GB/s between 2 ranks" in line.text

    def test_a_hanging_default_is_answered_with_the_variables_that_work(self) -> None:
        """Real children: a stand-in that sleeps unless direct access is off."""
        stand_in = (
            "import os, time\n"
            "if os.environ.get('NCCL_SHM_DISABLE') != '1': time.sleep(300)\n"
            """print('{"all_reduce": 3e9, "all_gather": 1e9, "ranks": 2}')"""
        )

        def trial(variables: Any) -> list[ChildResult]:
            # A busy machine takes more than a second to start Python.
            return run_ranks(["-c", stand_in], 2, limit_s=6.0, env=variables)

        found = find_way(trial, ways("nccl", [LO], {}))
        assert [why for _, why in found.tried] == ["rank 0: no answer within 6 s"] * 2
        line = link_line("nccl", found)
        assert line.level == "fail"
        assert line.text.endswith("export NCCL_SHM_DISABLE=1")
        assert line.facts["variables"] == {"NCCL_SHM_DISABLE": "1"}

    def test_one_rank_that_hangs_is_a_failure(self) -> None:
        found = find_way(lambda _: [GOOD, HANGS], ways("gloo", [SLOW, LO, DOCKER], {}))
        assert found.way is None
        line = link_line("gloo", found)
        assert "3 ways tried and none works (the default: rank 1: no answer" in line.text
        assert [dict(way.variables) for way, _ in found.tried] == [
            {},
            {"GLOO_SOCKET_IFNAME": "eth0"},
            {"GLOO_SOCKET_IFNAME": "lo"},
        ]

    def test_the_whole_set_of_a_profile_comes_last(self) -> None:
        pods = {"NCCL_P2P_DISABLE": "1", "NCCL_NET": "Socket"}
        known = ways("nccl", [SLOW, FAST], {"pods": pods})
        assert known[-1].variables == pods
        names = [way.about for way in known]
        assert names.index("over hsn0") < names.index("over eth0"), "the fast one first"
        counts = [len(way.variables) for way in known]
        assert counts[0] == 1


class TestTasks:
    def test_what_a_child_dies_of_is_told_and_the_rest_is_done_by_another(self) -> None:
        says = "@says " + json.dumps(asdict(passed("kernels", "fine")))
        ended = iter(
            [
                ChildResult(
                    -4, f"@begins kernels: matmul\n{says}\n@begins kernels: AdamW\n", "", 1.0
                ),
                ChildResult(0, f"noise\n@begins kernels: block\n{says}\n", "", 1.0),
            ]
        )
        asked: list[tuple[str, ...]] = []

        def start(question: DoctorRequest) -> ChildResult:
            asked.append(question.skip)
            return next(ended)

        lines = list(tried(DoctorRequest(), start))
        assert [line.level for line in lines] == ["pass", "fail", "pass"]
        assert "AdamW: killed by SIGILL; install" in lines[1].text
        assert lines[1].of_node
        assert asked == [(), ("kernels: matmul", "kernels: AdamW")]

    def test_a_task_that_is_skipped_is_not_begun(self) -> None:
        said: list[str] = []
        notes = Notes(DoctorRequest(skip=("disk: room",)), said.append, "disk")
        assert not notes.begins("room")
        assert notes.begins("rate")
        assert read_notes("\n".join(said)) == (["disk: rate"], [])


class TestKernels:
    def test_a_cpu_has_all_it_needs(self) -> None:
        notes = Notes(DoctorRequest(skip=("kernels: compiled block",)), lambda _: None, "kernels")
        lines = list(gpu_checks.check_kernels(DoctorRequest(device="cpu"), notes))
        assert [line.text.partition(" (")[0] for line in lines if line.level == "pass"] == [
            "matmul on cpu in float32",
            "fused AdamW on cpu",
        ]
        assert len(lines) == 2

    def test_each_attention_kernel_is_launched_by_itself(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = load_config("hamlet", {"train.seq_len": "16", "train.batch_size": "1"})

        kernels = {name: KERNELS[name] for name in ("math", "torch")}
        monkeypatch.setattr(gpu_checks, "KERNELS", kernels)
        said: list[str] = []
        notes = Notes(DoctorRequest(skip=("kernels: attention by torch",)), said.append, "kernels")
        gpu_checks._launch_attention(target, torch.device("cpu"), torch.float32, notes)
        assert read_notes("\n".join(said))[0] == [
            "kernels: attention by math",
            "kernels: attention by math, masked",
            "kernels: attention by torch, masked",
        ]

    def test_a_kernel_that_was_named_and_does_not_work_is_one_line(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: Any) -> None:
            raise ConfigError("flash4 was named and is not here.")

        monkeypatch.setattr(gpu_checks, "choose_attention_kernels", refuse)
        skipped = ("kernels: matmul", "kernels: compiled block")
        notes = Notes(DoctorRequest(skip=skipped), lambda _: None, "kernels")
        first, second = gpu_checks.check_kernels(DoctorRequest(device="cpu"), notes)
        assert (first.level, first.text) == ("fail", "flash4 was named and is not here.")
        assert "fused AdamW" in second.text

    def test_the_trainers_own_choice_is_told_and_a_fallback_is_a_warning(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said = ["attention by flash (launched)", "masked attention by math (WARNING: slow)"]
        monkeypatch.setattr(gpu_checks, "choose_attention_kernels", lambda *_: ({}, said))
        skipped = ("kernels: matmul", "kernels: compiled block", "kernels: fused AdamW")
        notes = Notes(DoctorRequest(skip=skipped), lambda _: None, "kernels")
        lines = list(gpu_checks.check_kernels(DoctorRequest(device="cpu"), notes))
        assert [(line.level, line.text) for line in lines] == [("pass", said[0]), ("warn", said[1])]

    @pytest.mark.parametrize(
        ("setting", "said"),
        [("off", "not tried, train.compile is off"), ("auto", "because train.compile is auto")],
    )
    def test_a_block_is_compiled_unless_that_is_off(
        self, setting: str, said: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.nn.Module, "compile", lambda *_, **__: None)
        config = load_config("hamlet", {"train.compile": setting})
        assert said in gpu_checks._compiled(torch.device("cpu"), config).text

    def test_a_kernel_that_computes_nonsense_is_a_failure_of_the_node(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wrong = (torch.ones(4), torch.ones(4) * 1.5)
        monkeypatch.setattr(gpu_checks, "_matmul", lambda *_: wrong)
        notes = Notes(DoctorRequest(skip=("kernels: compiled block",)), lambda _: None, "kernels")
        first = next(gpu_checks.check_kernels(DoctorRequest(device="cpu"), notes))
        assert (first.level, first.of_node) == ("fail", True)
        assert "is wrong by 3.3e-01" in first.text

        def raises(*_: object) -> Any:
            raise RuntimeError("no kernel image is available\nfor execution")

        monkeypatch.setattr(gpu_checks, "_matmul", raises)
        first = next(gpu_checks.check_kernels(DoctorRequest(device="cpu"), notes))
        assert "RuntimeError: no kernel image is available; install" in first.text


class TestHealth:
    def test_counters_and_brakes(self) -> None:
        errors = "ecc.errors.uncorrected.volatile.total"
        [line] = gpu_checks.smi_lines({errors: "3"}, "cuda:0")
        assert (line.level, line.of_node) == ("fail", True)
        hot = {"clocks_throttle_reasons.hw_thermal_slowdown": "Active", "temperature.gpu": "94"}
        [line] = gpu_checks.smi_lines({errors: "[N/A]", **hot}, "cuda:0")
        assert line.level == "warn"
        assert "too hot (94 degrees)" in line.text
        [line] = gpu_checks.smi_lines({errors: "0", "temperature.gpu": "40"}, "cuda:0")
        assert line.level == "pass"

    @pytest.mark.parametrize(("share", "level"), [(0.8, "pass"), (0.5, "warn"), (0.2, "fail")])
    def test_a_rate_is_held_against_the_table(self, share: float, level: str) -> None:
        line = gpu_checks.rate_line(share * 989.4e12, "NVIDIA H200", "bf16", "cuda", alone=True)
        assert line.level == level
        assert line.of_node == (level == "fail")

    def test_a_rate_is_held_against_what_the_device_did_before(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("FOUNDLING_HOME", str(tmp_path))
        best = 2e11
        rate = MatmulRate(dtype="fp32", m=8, k=8, n=8, flops_per_s=best)
        before = Ceilings(
            device="A Processor",
            kind="cpu",
            torch="2.13.0",
            date="2026-01-01",
            threads=2,
            memory_bytes=1,
            context_bytes=0,
            matmul=(rate,),
            attention=(),
            loss=(),
            copy_bytes_per_s=1.0,
            norm_bytes_per_s=1.0,
            optimizer_bytes_per_s=1.0,
            launch_s=1.0,
        )
        save_ceilings(before)
        slow = gpu_checks.rate_line(best / 2, before.device, "fp32", "cpu", alone=True)
        assert slow.level == "warn"
        assert gpu_checks.rate_line(best, before.device, "fp32", "cpu", alone=True).level == "pass"
        shared = gpu_checks.rate_line(best / 2, before.device, "fp32", "cpu", alone=False)
        assert shared.level == "pass", "neighbours share the cores"


def test_asked_goes_to_a_child_and_back() -> None:
    asked = asked_about(None, Path("runs/x"), thorough=True, limit_s=3.0).without("a", "b")
    assert DoctorRequest.from_json(asked.to_json()) == asked
    assert asked.run_config() is None


def test_a_real_child_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    """`examined` through a real process: a disk that cannot be written."""
    nowhere = tmp_path / "file"
    nowhere.write_text("not a folder")
    [room, written] = examined(["disk"], DoctorRequest(run=str(tmp_path), limit_s=60))
    assert (room.level, written.level) == ("pass", "pass")
    assert list(tmp_path.iterdir()) == [nowhere], "nothing is left behind"
