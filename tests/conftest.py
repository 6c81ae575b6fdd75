"""Settings for all tests."""

from hypothesis import settings

# The same cases at every run, so that a commit which was green stays so; machines that share their cores are
# slow at times, and speed is a benchmark's business.
settings.register_profile("isthmus", deadline=None, derandomize=True)
# New cases at every run: `make fuzz`.
settings.register_profile("fuzz", deadline=None)
settings.load_profile("isthmus")
