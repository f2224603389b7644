"""A small GPT written by hand as a plan: equal layers, a tied embedding, frozen and unused parameters.

One layer is one chunk. Two slots serve the layers in turn, a third keeps the embedding, whose gradient lands in a
chunk of its own; the final norm never leaves the device.
"""

from chunkc.ir.actions import Action, parse
from chunkc.ir.layout import Chunk, ChunkList, Group, Layout, Placement, Slot
from chunkc.ir.plan import Memory, Plan, Program, Segment, StageRecord, State
from chunkc.ir.schedule import ParamInfo
from chunkc.ir.tiers import Tier

VOCAB, POSITIONS = 1000, 100


def gpt_plan(
    *, width: int = 64, num_layers: int = 12, device_budget_nbytes: int = 4 * 1024**2, hw: str = "emulated-4m-64m"
) -> Plan:
    """The plan; one chunk has ``1024 * width`` elements of bfloat16 and one layer ``12 * width**2`` of them."""
    layout = _layout(width, num_layers)
    segments = _segments(width, num_layers)
    peak = max(segments, key=lambda s: s.nonmodel_nbytes)
    return Plan(
        model="TinyGPT",
        hw=hw,
        schedule_digest="0123456789ab",
        layout=layout,
        segments=segments,
        programs=_programs(num_layers),
        memory=Memory(
            device_budget_nbytes=device_budget_nbytes,
            host_budget_nbytes=16 * device_budget_nbytes,
            arena_nbytes=layout.arena_nbytes,
            nonmodel_nbytes=peak.nonmodel_nbytes,
            nonmodel_segment=peak.name,
            host_nbytes=layout.nbytes_in(Tier.HOST),
        ),
        stages=(
            StageRecord("liveness", 1.25, "peak non-model bytes at bwd.0"),
            StageRecord("chunk_mapping", 12.5, f"{len(layout.chunks)} chunks"),
        ),
    )


def _param(name: str, *shape: int, dtype: str = "bfloat16", trainable: bool = True, alias: str = "") -> ParamInfo:
    stride = (shape[1], 1) if len(shape) == 2 else (1,)
    return ParamInfo(name, (alias,) if alias else (), shape, stride, dtype, trainable)


def _layout(width: int, num_layers: int) -> Layout:
    numel = 1024 * width
    params = [_param("embed.weight", VOCAB, width, alias="head.weight")]
    placements = [Placement(0, 0, 0)]
    chunks = [_chunk(0, ChunkList.TRAINED, numel, VOCAB * width)]
    for layer in range(1, num_layers + 1):
        for name, rows, offset in (("attn", 4 * width, 0), ("mlp", 8 * width, 4 * width * width)):
            placements.append(Placement(len(params), layer, offset))
            params.append(_param(f"layers.{layer - 1}.{name}.weight", rows, width))
        chunks.append(_chunk(layer, ChunkList.TRAINED, numel, 12 * width * width))
    tail = (
        (_param("norm.weight", width), ChunkList.TRAINED, Tier.DEVICE),
        (_param("positions.weight", POSITIONS, width, trainable=False), ChunkList.FROZEN, Tier.HOST),
        (_param("spare.weight", width, dtype="float32"), ChunkList.UNUSED, Tier.HOST),
    )
    for info, kind, home in tail:
        placements.append(Placement(len(params), len(chunks), 0))
        params.append(info)
        chunk_numel = numel // 2 if info.dtype == "float32" else numel
        chunks.append(_chunk(len(chunks), kind, chunk_numel, info.numel, home, info.dtype))
    chunks.append(Chunk(len(chunks), ChunkList.GRAD, "bfloat16", numel, VOCAB * width, Tier.HOST, None, 0))
    slots = (*(Slot(i, i * 2 * numel, 2 * numel) for i in range(5)), Slot(5, 10 * numel, 12 * numel))
    groups = tuple(Group(i, i, 1) for i in range(len(chunks)))
    return Layout(tuple(params), tuple(placements), tuple(chunks), groups, numel, slots, 22 * numel)


def _chunk(
    index: int, kind: ChunkList, numel: int, used: int, home: Tier = Tier.HOST, dtype: str = "bfloat16"
) -> Chunk:
    return Chunk(index, kind, dtype, numel, used, home, home if kind is ChunkList.TRAINED else None)


def _segments(width: int, num_layers: int) -> tuple[Segment, ...]:
    last = 1 + 2 * num_layers  # the norm; behind it the positions
    saved = [1024 * width * (i + 1) for i in range(num_layers + 2)]  # activations saved until the end of fwd.i
    head_nbytes = 8 * VOCAB * width  # logits
    found = [Segment("forward", 0, 0, 3, (0, last + 1), (), saved[0], 512)]
    for i in range(1, num_layers + 1):
        found.append(Segment("forward", i, 5 * i - 2, 5 * i + 3, (2 * i - 1, 2 * i), (), saved[i], 512))
    end = 5 * num_layers + 3
    found.append(Segment("forward", num_layers + 1, end, end + 4, (0, last), (), saved[-1] + head_nbytes, 512))
    found.append(Segment("backward", 0, 0, 6, (0, last), (last,), saved[-1] + 2 * head_nbytes, 1024))
    for i in range(1, num_layers + 1):
        layer = num_layers + 1 - i
        params = (2 * layer - 1, 2 * layer)
        found.append(Segment("backward", i, 9 * i - 3, 9 * i + 6, params, params, saved[layer] + head_nbytes, 1024))
    end = 9 * num_layers + 6
    found.append(Segment("backward", num_layers + 1, end, end + 2, (), (0,), saved[0] + head_nbytes, 1024))
    return tuple(found)


def _programs(num_layers: int) -> tuple[Program, ...]:
    norm = num_layers + 1
    static = ((f"c{norm}", 4), (f"os{norm}", 5))
    cold, saved = State("cold", static), State("saved", (("c0", 0), *static))
    graded = State("graded", static)
    forward, freed = _forward(num_layers)
    backward, home = _backward(num_layers, freed)
    step = [f"update c{c} @cpu after b{home[c]}" for c in range(norm)] + [f"update c{norm} @compute"]
    restore = [line.replace("update", "restore") for line in step]
    return (
        Program("forward", cold, saved, _actions(forward)),
        Program("backward", saved, graded, _actions(backward)),
        Program("step", graded, cold, _actions(step)),
        Program("restore", graded, cold, _actions(restore)),
        Program("abandon", saved, cold, _actions(["drop c0 <- d0 @compute"])),
        Program("resume", cold, saved, _actions(["fetch c0 -> d0 @h2d"])),
    )


def _actions(lines: list[str]) -> tuple[Action, ...]:
    return tuple(parse(line) for line in lines)


def _slot(layer: int) -> int:
    return 2 if layer % 2 else 1


class _Lines(list[str]):
    def add(self, line: str) -> int:
        self.append(line)
        return len(self) - 1


def _forward(num_layers: int) -> tuple[list[str], dict[int, str]]:
    """Each layer is fetched while the one before it runs; also the label after which each slot is free."""
    lines, freed = _Lines(), {}
    lines += ["fetch c0 -> d0 @h2d after s0", f"fetch c{num_layers + 2} -> d1 @h2d after s2"]
    fetched = lines.add("fetch c1 -> d2 @h2d after s1")
    lines.add("run fwd.0 @compute after f0 f1")
    freed[1] = f"f{lines.add(f'drop c{num_layers + 2} <- d1 @compute')}"
    for layer in range(1, num_layers + 1):
        ready, slot, other = fetched, _slot(layer), _slot(layer + 1)
        if layer < num_layers:
            fetched = lines.add(f"fetch c{layer + 1} -> d{other} @h2d after {freed[other]} s{layer + 1}")
        lines.add(f"run fwd.{layer} @compute after f{ready}")
        freed[slot] = f"f{lines.add(f'drop c{layer} <- d{slot} @compute')}"
    lines.add(f"run fwd.{num_layers + 1} @compute")
    return lines, freed


def _backward(num_layers: int, freed: dict[int, str]) -> tuple[list[str], dict[int, int]]:
    """Layers in reverse, each gradient over its layer's chunk; also the position after which each gradient is home."""
    norm, grad = num_layers + 1, num_layers + 4
    lines, home = _Lines(), {}
    slot = _slot(num_layers)
    fetched = lines.add(f"fetch c{num_layers} -> d{slot} @h2d after {freed[slot]}")
    lines += ["run bwd.0 @compute", f"stash c{norm} of bwd.0 @compute", "drop c0 <- d0 @compute"]
    for layer in range(num_layers, 0, -1):
        ready, name, slot, other = fetched, f"bwd.{num_layers + 1 - layer}", _slot(layer), _slot(layer - 1)
        if layer > 1:
            fetched = lines.add(f"fetch c{layer - 1} -> d{other} @h2d after {freed[other]}")
        lines.add(f"run {name} @compute after b{ready}")
        landed = lines.add(f"stash c{layer} of {name} @compute")
        home[layer] = lines.add(f"evict c{layer} <- d{slot} @d2h after b{landed}")
        freed[slot] = f"b{home[layer]}"
    ready = lines.add(f"fetch c{grad} -> d3 @h2d after s0")
    lines.add(f"run bwd.{norm} @compute after b{ready}")
    landed = lines.add(f"stash c{grad} of bwd.{norm} @compute")
    home[0] = lines.add(f"evict c{grad} <- d3 @d2h after b{landed}")
    return lines, home
