"""What the process that ranks are forked from has done: imports and first uses that take each process seconds.

It runs no model and must have one thread, since a forked process has none of the others and waits for them for ever: so
Inductor, whose compiler has a pool of threads, is imported and not used. Autograd is not touched, whose engine in CUDA
builds of torch refuses to work in forked processes after its first use. One small function is captured, because Dynamo
imports most of what it needs when it is used for the first time. The progress bars of torch.fx would start a thread,
and share a lock between processes that a rank which is killed could hold.
"""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path

import rank_failures  # noqa: F401  # imports what most functions of ranks use
import torch
import torch._inductor.compile_fx
import transformers  # noqa: F401
from tqdm import tqdm

from chunkc import AdamW  # noqa: F401  # with all that the package offers, which it imports when it is asked for

torch.set_num_threads(1)
tqdm.monitor_interval = 0
tqdm.set_lock(threading.RLock())


def _use_dynamo() -> None:
    torch.compile(lambda x: (x * 2).sum(), backend="aot_eager")(torch.ones(2))
    torch._dynamo.reset()


_use_dynamo()
gc.collect()
gc.freeze()
gc.set_threshold(50_000, 20, 20)  # as in conftest.py
num_threads = len(list(Path("/proc/self/task").iterdir())) if sys.platform == "linux" else threading.active_count()
"""Of the process that ranks are forked from, when all this was done."""
