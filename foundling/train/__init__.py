"""The corridor from batches to checkpoints: loop, step, state, stages, metrics."""
