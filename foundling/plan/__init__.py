"""Before a GPU is rented: parameters, FLOPs, horizon, memory, speed, hours, money. No torch."""
