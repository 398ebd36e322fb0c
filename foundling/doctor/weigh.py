"""Memory of one process against the plan: `python -m foundling.doctor.weigh CONFIG` prints both.

Tensors that live at the same time, counted on a CPU as a GPU's allocator would count them. In a
process of its own, because what does not fit ends it.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from foundling.config.resolve import load_run_config
from foundling.doctor.stages import planned_bytes
from foundling.plan import known_sizes
from foundling.plan.hardware import find_gpu
from foundling.runtime.children import tie_to_parent
from foundling.train.probe import probe


def main() -> None:
    """Plan first, then take two steps and weigh them."""
    tie_to_parent()
    config, _ = known_sizes(load_run_config(Path(sys.argv[1])))
    config = replace(
        config,
        eval=replace(config.eval, every=0, sample_every=0, prompts=()),
        parallel=replace(config.parallel, replicate=0),
    )
    planned = planned_bytes(config, 1, find_gpu("cpu"))
    measured = probe(config, steps=1, warmup=1).peak_bytes
    print(json.dumps({"planned": planned, "measured": measured}), flush=True)


if __name__ == "__main__":
    main()
