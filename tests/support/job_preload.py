"""What the process that ranks are forked from has done: imports and first uses that take each process seconds.

It runs no model and starts no thread. One small function is compiled, because Dynamo imports most of what it needs when
it is used for the first time, and the commonest kernel of updates is loaded. The progress bars of torch.fx would start
a thread, and share a lock between processes that a rank which is killed could hold for ever.
"""

from __future__ import annotations

import threading

import rank_failures  # noqa: F401  # imports chunkc and what most functions of ranks use
import torch
import transformers  # noqa: F401
from tqdm import tqdm

from chunkc.runtime.host_kernel import host_kernel

torch.set_num_threads(1)
tqdm.monitor_interval = 0
tqdm.set_lock(threading.RLock())


def _use_dynamo() -> None:
    x = torch.ones(2, requires_grad=True)
    torch.compile(lambda x: (x * 2).sum(), backend="aot_eager")(x)
    torch._dynamo.reset()


_use_dynamo()
host_kernel(torch.float32, None, is_parallel=False)
