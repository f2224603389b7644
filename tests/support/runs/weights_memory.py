"""Anonymous memory that a process takes to load, train, load again and save a model; run as a script, prints JSON.

    python weights_memory.py SIZE WAY FOLDER    loads FOLDER/given, saves to FOLDER/saved

`make` wrote FOLDER/given. WAY is ``load`` (a model from the meta device and ``chunkc.load_pretrained``), ``consume``
(one with values in memory handed to ``chunkc.compile``), ``pinned`` (the same for the CUDA device over a double, whose
homes are pinned) or ``pretrained`` (one from transformers' ``from_pretrained``).
Readings are RssAnon of /proc/self/status in bytes, sampled by a thread, so pages of mapped files do not count.
"""

import argparse
import json
import re
import shutil
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from cuda_machine import Double
from safetensors.torch import save_file
from torch import nn

import chunkc
from chunkc import AdamW  # noqa: F401  # with it all is imported before the first reading
from chunkc.runtime.devices.host_slab import return_freed_pages

SIZES: dict[str, dict[str, Any]] = {
    "50m": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 3, "vocab_size": 8000},
    "1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 17, "vocab_size": 32000},
}
HW = {"50m": "emulated-192m-4g", "1b": "emulated-1g-20g"}
DTYPES = {"50m": torch.float32, "1b": torch.bfloat16}
"""What is computed in; all are handed over in fp32."""
SHARD_SIZE = {"50m": "80MB", "1b": "500MB"}
NUM_TOKENS = 16


def anonymous_nbytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def slab_nbytes() -> int:
    """Resident bytes of the mappings that forks do not inherit (VmFlags ``dc``): homes of chunks, and the arena."""
    found = re.findall(
        r"^Anonymous: +(\d+) kB$(?:\n.*)*?\nVmFlags:(.*)$", Path("/proc/self/smaps").read_text(), re.MULTILINE
    )
    return sum(int(kib) << 10 for kib, flags in found if "dc" in flags.split())


def peak_nbytes(work: Callable[[], object]) -> int:
    readings, done = [anonymous_nbytes()], threading.Event()

    def sample() -> None:
        while not done.wait(0.002):
            readings.append(anonymous_nbytes())

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        work()
    finally:
        done.set()
        sampler.join()
    return max(*readings, anonymous_nbytes())


def build(size: str) -> nn.Module:
    config = transformers.LlamaConfig(
        **SIZES[size], num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=NUM_TOKENS
    )
    return transformers.LlamaForCausalLM(config).train()


def on_meta(size: str) -> nn.Module:
    with torch.device("meta"):
        return build(size)


def make(size: str, folder: Path) -> None:
    """Weights in fp32, one file for each few tensors, never all of them in memory."""
    model = on_meta(size)
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    names = list(shapes)
    groups = [names[i : i + 12] for i in range(0, len(names), 12)]
    weight_map = {}
    for number, group in enumerate(groups):
        file = f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors"
        values = {n: torch.full(shapes[n], 0.01 if len(shapes[n]) > 1 else 1.0) for n in group}
        save_file(values, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(group, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def measure(size: str, way: str, folder: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    makers = {
        "load": on_meta,
        "consume": build,
        "pinned": build,
        "pretrained": lambda _: transformers.LlamaForCausalLM.from_pretrained(folder / "given").train(),
    }
    found["imported"] = anonymous_nbytes()
    model = makers[way](size)
    found["model"] = sum(p.numel() * 4 for p in model.parameters())
    found["largest"] = max(p.numel() * 4 for p in model.parameters())
    found["built"] = anonymous_nbytes()
    tokens = torch.randint(0, SIZES[size]["vocab_size"], (1, NUM_TOKENS))

    def load() -> None:
        chunkc.load_pretrained(model, folder / "given", strict=True)

    def train() -> None:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        chunkc.stats(model)

    def save(saver: Callable[..., object]) -> int:
        nbytes = peak_nbytes(lambda: saver(folder / "saved", max_shard_size=SHARD_SIZE[size]))
        found["shard"] = max(path.stat().st_size for path in (folder / "saved").glob("*.safetensors"))
        shutil.rmtree(folder / "saved")
        return nbytes

    def compile() -> None:
        chunkc.compile(model, hw, dtype=DTYPES[size], backend="eager")

    hw = chunkc.Hardware.parse(HW[size])
    stand_in: AbstractContextManager[object] = nullcontext()
    as_named: AbstractContextManager[object] = nullcontext()
    if way == "pinned":
        machine = Double()
        hw = machine.hw(hw.gpu_memory_nbytes, hw.host_memory_nbytes)
        stand_in = mock.patch("chunkc.api.device_for", machine.device_for)
        # with the few cores of this machine more would be updated on the double, whose arithmetic takes host memory
        as_named = mock.patch("chunkc.api.at_hand", lambda hw, *_: hw)
    with stand_in, as_named:
        found["compile_peak"] = peak_nbytes(compile)
    if way == "load":
        found["load_peak"] = peak_nbytes(load)
    found["loaded"] = anonymous_nbytes()
    optimizer = chunkc.AdamW(model.parameters())
    found["train_peak"] = peak_nbytes(train)
    found["train_again_peak"] = peak_nbytes(train)
    return_freed_pages()  # what malloc keeps of operators' temporaries differs from run to run
    found["trained"] = anonymous_nbytes()
    found["load_again_peak"] = peak_nbytes(load)
    return_freed_pages()
    found["loaded_again"] = anonymous_nbytes()
    found["save_peak"] = save(lambda *args, **kwargs: chunkc.save_safetensors(model, *args, **kwargs))
    found["saved"] = anonymous_nbytes()
    found["save_pretrained_peak"] = save(model.save_pretrained)  # type: ignore[arg-type]
    memory, stats = chunkc.plan_of(model).memory, chunkc.stats(model)
    found["chunks"] = stats["host_nbytes"] + memory.arena_nbytes
    found["plan"] = stats["host_nbytes"] + stats["planned_peak_nbytes"]
    found["slabs"] = slab_nbytes()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("way", choices=("load", "consume", "pinned", "pretrained"))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    transformers.logging.disable_progress_bar()
    print(json.dumps(measure(options.size, options.way, options.folder)))


if __name__ == "__main__":
    main()
