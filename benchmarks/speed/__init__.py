"""What codecs cost in time: on tensors, in a stage, and in a run."""
