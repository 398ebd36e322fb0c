"""Where a run lives (directory, lock, log; no torch) and what it runs on (device, ranks)."""
