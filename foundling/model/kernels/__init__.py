"""GPU kernels by name: attention, loss, MLP, embedding."""
