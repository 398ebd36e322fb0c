"""torchrun, kept from its two bad habits: `python -m foundling.launch.agent PARENT ARGUMENTS...`

It dies with its launcher, and it does not act on signals: on SIGTERM torchrun gives its ranks 30
seconds, kills them and exits with 1 even after a clean save (torch 2.13 takes another time,
2.11 cannot). Our launcher tells the ranks itself and waits as long as it was given. The blocked
signals are inherited by the ranks, which let them through once they listen: none is lost, however
early it comes.
"""

import os
import signal
import sys

from foundling.launch.environment import AGENT
from foundling.runtime.processes import SIGNALS, die_with_parent


def main() -> None:
    """Become torchrun."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    die_with_parent(int(sys.argv[1]))
    os.environ[AGENT] = str(os.getpid())
    from torch.distributed.run import main as torchrun

    torchrun(sys.argv[2:])


if __name__ == "__main__":
    main()
