"""Compiles a `Launch`, with the signature of its own arguments, for a GPU that need not be there, and reads ptxas."""

import io
import re
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from chunkc.triton_kernels.launch import Launch

TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """PTX of a kernel, and registers to a thread and bytes spilled as ptxas counts them."""

    ptx: str
    num_registers: int
    spilled_nbytes: int
    stack_nbytes: int

    def count(self, access: str, width: int) -> int:
        """Accesses of global memory by ``access`` ("ld" or "st") that move ``width`` 32-bit words at once."""
        vector = "" if width == 1 else rf"\.v{width}"
        return len(re.findall(rf"\b{access}\.global(?:\.L\w+::\w+)*{vector}\.[bfus]32\b", self.ptx))


def source_of(launch: Launch) -> ASTSource:
    """What Triton makes of the launch's arguments; AssertionError when a number is specialised on."""
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            continue
        argument = launch.args[index]
        if isinstance(argument, Tensor):
            signature[parameter.name] = TYPES[argument.dtype]
            if argument.data_ptr() % 16 == 0 and not parameter.do_not_specialize_on_alignment:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            assert parameter.do_not_specialize, f"{parameter.name} is specialised on its value"
            signature[parameter.name] = "i32" if argument < 2**31 else "i64"
    return ASTSource(launch.kernel, signature, dict(launch.constants), attributes)


def compile_offline(launch: Launch, capability: int, cache: Path) -> Compiled:
    """Compile for sm_``capability`` from source, whatever any cache holds; ``cache`` takes the files."""
    log = io.StringIO()
    with triton.knobs.cache.scope(), triton.knobs.compilation.scope(), triton.knobs.nvidia.scope():
        triton.knobs.cache.dir = str(cache)
        triton.knobs.compilation.always_compile = True
        triton.knobs.nvidia.dump_ptxas_log = True
        with redirect_stdout(log):
            target = GPUTarget("cuda", capability, 32)
            kernel = triton.compile(source_of(launch), target=target, options=launch.options)
    return Compiled(
        kernel.asm["ptx"],
        _number(r"Used (\d+) registers", log.getvalue()),
        sum(_number(rf"(\d+) bytes spill {kind}", log.getvalue()) for kind in ("stores", "loads")),
        _number(r"(\d+) bytes stack frame", log.getvalue()),
    )


def _number(pattern: str, log: str) -> int:
    found = re.search(pattern, log)
    assert found is not None, f"ptxas does not say {pattern!r}:\n{log}"
    return int(found[1])
