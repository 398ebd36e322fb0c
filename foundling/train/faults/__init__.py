"""What may go wrong in a run: spikes, hangs, leaks, replicas that differ; and the way back."""
