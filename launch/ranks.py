"""Several ranks on this machine, as torchrun starts them, without torchrun's own report of a rank that failed: the rank
has said why, in a sentence.

python launch/ranks.py <ranks> launch/train.py <options>
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ctcdraft.train.watchdog import LAST_SECONDS


def main(words: Sequence[str]) -> int:
    """What the first rank to fail ended with, in a shell's terms; 0 where none did."""
    logging.disable()  # of this process, which has nothing to say but what its ranks said
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", f"{LAST_SECONDS:.0f}")  # for them to save, after SIGTERM
    try:
        run.main(["--standalone", "--nproc-per-node", *words])
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        cause = signal.Signals(-failure.exitcode).name  # of which the rank itself could say nothing
        print(f"error: rank {failure.local_rank} was ended by {cause}, as where memory runs out", file=sys.stderr)
        return 128 - failure.exitcode
    except SignalException as error:
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
