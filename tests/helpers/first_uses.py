"""What libraries do when they are first used, done in the fork server of commands.py for all its forks."""

import gc

from hydra.core.plugins import Plugins
from numba import njit

njit(lambda: 0)()  # the types and functions that numba knows
Plugins.instance()  # Hydra's, which are looked for in all packages
gc.freeze()  # else a fork that looks for garbage copies every page
