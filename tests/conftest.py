"""Settings for all tests."""

from hypothesis import settings

# Machines that share their cores are slow at times; speed is a benchmark's business.
settings.register_profile("isthmus", deadline=None)
settings.load_profile("isthmus")
