"""Doing it: data in, stages driven by their schedulers, a trained model out."""
