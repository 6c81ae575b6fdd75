"""By what clouds know each other: the private authority, keys, certificates."""
