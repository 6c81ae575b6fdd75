"""Predicted against measured step times: cases, what is measured before, predictions, runs, scores."""
