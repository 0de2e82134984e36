"""Entry of the process that `shoal run --dashboard` starts."""

import sys

from shoal.observe.dashboard.process import main

if __name__ == "__main__":
    main(*sys.argv[1:3])
