"""What to do: schedulers, costs, memory, partition, search and simulation, without torch."""
