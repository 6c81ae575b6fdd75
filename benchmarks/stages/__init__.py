"""A stage's step beside plain PyTorch's: the far end of its link, the plain loop, a picture of one step."""
