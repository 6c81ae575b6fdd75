"""Inside a cloud: its ranks as one world, how they share weights and gradients, and watch each other."""
