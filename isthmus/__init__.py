"""Train one language model on several clouds joined by slow links."""

__version__ = "0.1.0"
