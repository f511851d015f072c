"""Where the ranks that torchrun starts find each other. Its store may outlive them: with
--max-restarts it still has the addresses of ranks that have died, and new ones would try to reach
those.
"""

from __future__ import annotations

import time
import uuid

from torch.distributed.distributed_c10d import PrefixStore, Store

_NAME = "xcloud.attempt"
_LOOK_EVERY_S = 0.05


def of_this_attempt(store: Store, rank: int, num_ranks: int) -> Store:
    """A part of the store that no earlier attempt has used. Every rank calls it.

    Rank 0 numbers the attempt, the others sign in for it, and it begins once rank 0 has named all
    of them: a rank that was signed in and has died is not among those who wait for that word.
    """
    if rank == 0:
        number = store.add(f"{_NAME}.count", 1)
        store.set(f"{_NAME}.current", str(number))
        names = [store.get(f"{_NAME}.{number}.{other}") for other in range(1, num_ranks)]
        store.set(f"{_NAME}.{number}.all", b",".join(names).decode())
        return PrefixStore(f"{_NAME}.{number}", store)
    name = uuid.uuid4().hex
    signed_in = ""
    while True:
        attempt = store.get(f"{_NAME}.current").decode()
        if attempt != signed_in:
            store.set(f"{_NAME}.{attempt}.{rank}", name)
            signed_in = attempt
        begun = f"{_NAME}.{attempt}.all"
        if store.check([begun]) and name in store.get(begun).decode().split(","):
            return PrefixStore(f"{_NAME}.{attempt}", store)
        time.sleep(_LOOK_EVERY_S)
