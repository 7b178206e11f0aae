"""Settings of all tests."""

import os

from hypothesis import settings

# How long an example takes says something of the machine only; and where a failure would stop others, draws are fixed.
settings.register_profile("fedveil", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("fedveil")
