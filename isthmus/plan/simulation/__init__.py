"""What the simulator is made of: a virtual clock, lines that messages share, the end of a step."""
