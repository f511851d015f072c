"""torchrun for a run over several machines: python -m xcloud torchrun OPTIONS -m xcloud worker …

OPTIONS are torchrun's. The ranks get the memory settings of a local run (launch.py), and torch's
C++ code shows errors only (TORCH_CPP_LOG_LEVEL); set in the environment, these stay as they are.
No traceback follows what the ranks have said. Exit code 75: the same command goes on.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from xcloud.launch.processes import EXIT_START_AGAIN, MEMORY_SETTINGS


def main(words: Sequence[str]) -> int:
    for name, value in {**MEMORY_SETTINGS, "TORCH_CPP_LOG_LEVEL": "ERROR"}.items():
        os.environ.setdefault(name, value)
    # Only now: torch reads the level when it is imported.
    from torch.distributed import DistNetworkError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    parser = get_args_parser()
    parser.prog, parser.description = "python -m xcloud torchrun", __doc__
    given = parser.parse_args(words)
    logging.disable(logging.ERROR)  # of torchrun, which repeats what its ranks have said
    if given.nproc_per_node.isdigit():
        threads = (os.cpu_count() or 1) // int(given.nproc_per_node)
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))
    place = given.rdzv_endpoint or f"{given.master_addr}:{given.master_port or 29500}"
    print(f"waiting for all machines at {place}", flush=True)
    try:
        run(given)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            if failure.exitcode < 0:  # it could say nothing
                print(f"xcloud: rank {rank} was ended by {failure.signal_name()}", file=sys.stderr)
        codes = {failure.exitcode for failure in error.failures.values()}
        return EXIT_START_AGAIN if codes == {EXIT_START_AGAIN} else 1
    except SignalException:  # the ranks were given the signal, and have said what they did
        return EXIT_START_AGAIN
    except DistNetworkError as error:
        why = "the port is taken" if "EADDRINUSE" in str(error) else str(error).splitlines()[0]
        advice = "Give all clouds the address and one free port of the first one's machine"
        print(f"xcloud: nobody can meet at {place}: {why}. {advice}", file=sys.stderr)
        return 1
    return 0
