"""Which pipeline is best: clouds in order, layers to stages, settings, codecs, and what limits them."""
