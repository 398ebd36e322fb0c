"""The trainer's own step, measured: seconds, memory, traces, rates of the device."""
