"""Predicted and measured memory of stages."""
