"""Entry of the process that `shoal run --dashboard` starts."""

import sys

from shoal.observe.dashboard.process import main

main(*sys.argv[1:3])
