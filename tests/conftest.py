"""Before anything imports torch: its threads must not spin for a core that another process of the tests has."""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")
