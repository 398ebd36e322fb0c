"""Machines that others have trained on, as data: what to export and what to ask SLURM for.

Values come from the accounts that the presets come from, and from NCCL's documentation where it is
said so. `foundling doctor` finds out which of them a machine of yours needs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from foundling.config.errors import ConfigError

# The caching allocator gives memory back in pieces of any size: less is lost to fragments.
_SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@dataclass(frozen=True)
class Profile:
    """One kind of machine."""

    about: str
    gpus_per_node: int
    env: Mapping[str, str] = field(default_factory=dict)
    interface: str = ""
    """Network interface of NCCL and gloo; empty leaves the choice to them."""
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch."""
    srun: tuple[str, ...] = ()
    """Further options of srun."""


PROFILES: dict[str, Profile] = {
    "plain": Profile("nothing but what is asked for on the command line", 8),
    "frontier": Profile(
        "account 001: MI250X dies under ROCm, RCCL over Slingshot by the aws-ofi-rccl plugin",
        8,
        env={
            "NCCL_NET_GDR_LEVEL": "3",
            "NCCL_CROSS_NIC": "1",
            "NCCL_IB_TIMEOUT": "31",
            "NCCL_ALGO": "TREE",
            "TORCH_NCCL_BLOCKING_WAIT": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            **_SEGMENTS,
        },
        interface="hsn0",
        srun=("--gpu-bind=none",),
    ),
    "pods": Profile(
        "account 003: rented pods whose GPUs have neither NVLink nor InfiniBand",
        8,
        env={
            "NCCL_P2P_DISABLE": "1",
            "NCCL_IB_DISABLE": "1",
            "NCCL_NET": "Socket",
            "NCCL_NET_PLUGIN": "none",
            "NCCL_DEBUG": "WARN",
        },
        interface="lo",
    ),
    "infiniband": Profile(
        "NVIDIA GPUs with NVLink in a node and InfiniBand between nodes (NCCL's own choices)",
        8,
        env={"NCCL_IB_TIMEOUT": "22", "NCCL_DEBUG": "WARN", **_SEGMENTS},
    ),
}


def find_profile(name: str) -> Profile:
    """The profile of this name."""
    if name not in PROFILES:
        raise ConfigError(f"--profile {name} is unknown; there are {', '.join(PROFILES)}.")
    return PROFILES[name]


def environment(profile: Profile, interface: str, given: Mapping[str, str]) -> dict[str, str]:
    """What the job exports; what was given by hand wins."""
    chosen = interface or profile.interface
    names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if chosen else ()
    return {**dict.fromkeys(names, chosen), **profile.env, **given}
