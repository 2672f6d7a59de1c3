"""Before anything imports torch: its threads must not spin for a core that another process of the tests has."""

import logging
import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from hypothesis import settings

# The SDK has no way to close a client. Those whose servers have ended would go on to complain of it on the terminal,
# after pytest's own last line; pytest still captures what they log during a test.
logging.getLogger("tinker").addHandler(logging.NullHandler())

# A machine that is busy is no reason to fail.
settings.register_profile("descant", deadline=None)
settings.load_profile("descant")
