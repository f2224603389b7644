"""The footprint of a segment compiled by Inductor, read from the Python code that Inductor generated.

That code is a straight line: it takes buffers (``empty_strided_cpu``), hands one buffer's memory to the next
(``buf3 = buf2; del buf2``), calls fused kernels, which take no memory, and operators of PyTorch (into a buffer by
``out=``, or returning tensors of their own), and deletes every name after its last use. So it says when which memory is
taken and let go of, exactly and in order. It is walked here statement by statement over fake tensors, which also give
the results of PyTorch's operators and check the sizes that the code asserts. Whatever is not understood ends the walk;
nothing is guessed.

For a GPU the line stands in ``with torch.cuda._DeviceGuard(0):``, kernels are Triton's (``triton_poi_fused_1.run(...,
stream=raw_stream0)``), and scratch memory that a kernel needs is a buffer like others (``workspace_0``). Inputs at an
address that is no multiple of 16 are copied there (``copy_if_misaligned``); payloads in chunks and what the allocator
returns begin at multiples of 256, so that counts as no copy.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from chunkc._torch_compat.core import FakeTensorMode
from chunkc.capture.operators.workspace import BASE_NBYTES, device_type_of, kernel_workspace_nbytes
from chunkc.compiler.memory.footprint import Footprint, Recorder, tensors_in

_ROOTS: Final = {"torch": "torch", "aten": "torch.ops.aten", "inductor_ops": "torch.ops.inductor"}
_ALLOCATION: Final = re.compile(r"\b(make_unique|malloc|alloc|new|vector)\b")
_LOCAL_BUFFER: Final = re.compile(r"std::make_unique<([\w:]+) ?\[\]>\(([\w<>()* ]+)\);")
_REBINDS_MEMORY: Final = ("set_", "resize")
_COMPILED: Final = ("async_compile.cpp", "async_compile.triton")
_DEVICE_GUARD: Final = "torch.cuda._DeviceGuard"
_OF_STREAMS: Final = frozenset({"torch.cuda.set_device", "get_raw_stream"})
_INTEGER: Final = re.compile(r"\d+")
_CPP_NBYTES: Final = {
    **{"float": 4, "double": 8, "int64_t": 8, "int32_t": 4, "int8_t": 1, "uint8_t": 1, "bool": 1},
    **{f"{space}::{kind}": 2 for space in ("at", "c10") for kind in ("Half", "BFloat16")},
}


class NotUnderstoodError(Exception):
    """The generated code has something that this module does not know; the text says what."""


def source_footprint(source: str, constants: Mapping[str, torch.Tensor], examples: Sequence[Any]) -> Footprint:
    """The footprint of calling the compiled graph whose generated module is ``source``.

    Args:
        source: Python code of the module; its function (or method) ``call`` takes the list of inputs.
        constants: tensors that the module holds by name, alive whether it runs or not.
        examples: the inputs, or fake ones.

    Raises:
        NotUnderstoodError: naming the statement.
    """
    module = ast.parse(source)
    call = _call_of(module)
    with FakeTensorMode():
        inputs = [_like(e) for e in examples]
        held = {name: _like(value) for name, value in constants.items()}
        recorder = Recorder(inputs, tuple(held.values()))
        walk = _Walk(recorder, held, _kernels(module))
        outputs = walk.run(call, inputs)
    return recorder.footprint(outputs, is_exact=True)


def _like(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.device.type not in ("cpu", "cuda") or value.layout is not torch.strided:
        raise NotUnderstoodError(f"an input of layout {value.layout} on {value.device}")
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _call_of(module: ast.Module) -> ast.FunctionDef:
    found = [n for n in ast.walk(module) if isinstance(n, ast.FunctionDef) and n.name == "call"]
    if len(found) != 1:
        raise NotUnderstoodError(f"{len(found)} functions named call")
    return found[0]


def _kernels(module: ast.Module) -> dict[str, int]:
    """Workspace in bytes of every compiled kernel by the name that calls it."""
    kernels = {}
    for statement in module.body:
        if not isinstance(statement, ast.Assign):
            continue
        maker = _dotted(getattr(statement.value, "func", None))
        for target in map(ast.unparse, statement.targets if maker.startswith(_COMPILED) else ()):
            if maker.startswith("async_compile.cpp"):
                texts = [n.value for n in ast.walk(statement.value) if isinstance(n, ast.Constant)]
                kernels[target] = BASE_NBYTES + _local_nbytes("\n".join(t for t in texts if isinstance(t, str)))
            else:
                kernels[f"{target}.run"] = 0
    return kernels


def _local_nbytes(code: str) -> int:
    """Bytes of the scratch buffers that a C++ kernel takes, in all threads together."""
    buffers = _LOCAL_BUFFER.findall(code)
    others = _ALLOCATION.findall(_LOCAL_BUFFER.sub("", code))
    others += [kind for kind, _ in buffers if kind not in _CPP_NBYTES]
    if others:
        raise NotUnderstoodError(f"a kernel that takes memory by {others[0]}")
    nbytes = 0
    for kind, numel in buffers:
        factors = _INTEGER.findall(numel.replace("int64_t", ""))
        nbytes += _CPP_NBYTES[kind] * math.prod(int(n) for n in factors)
    return nbytes * torch.get_num_threads()


def _dotted(node: ast.AST | None) -> str:
    """``a.b.c`` for an attribute of an attribute of a name; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of ``body`` in order, those of blocks that only choose the GPU among them."""
    for statement in body:
        if isinstance(statement, ast.With) and all(
            _dotted(getattr(item.context_expr, "func", None)) == _DEVICE_GUARD for item in statement.items
        ):
            yield from _statements(statement.body)
        else:
            yield statement


@dataclass(slots=True)
class _Walk:
    """Walks the statements of ``call``; ``names`` are the variables alive."""

    recorder: Recorder
    names: dict[str, Any]
    kernels: Mapping[str, int]
    _argument: str = field(default="args")

    def run(self, call: ast.FunctionDef, inputs: Sequence[Any]) -> list[Any]:
        self._argument = call.args.args[-1].arg
        self.names[self._argument] = list(inputs)
        for statement in _statements(call.body):
            if isinstance(statement, ast.Return):
                outputs = self._value(statement.value) if statement.value is not None else ()
                self.recorder.made(outputs)
                self.recorder.bind(outputs)
                self.recorder.end_statement()
                return list(outputs)
            self._statement(statement)
            self.recorder.end_statement()
        raise NotUnderstoodError("a function that returns nothing")

    def _statement(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Delete):
            for target in statement.targets:
                self._unbind(_name(target))
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            value = self._value(statement.value)
            self.recorder.made(value)
            self._assign(statement.targets[0], value)
        elif isinstance(statement, ast.Expr):
            self.recorder.made(self._value(statement.value))
        else:
            raise NotUnderstoodError(ast.unparse(statement))

    def _assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Tuple):
            for part, item in zip(target.elts, value, strict=True):
                self._assign(part, item)
            return
        name = _name(target)
        before = self.names.get(name)
        self.names[name] = value
        self.recorder.bind(value)
        if before is not None:
            self.recorder.unbind(before)

    def _unbind(self, name: str) -> None:
        if name not in self.names:
            raise NotUnderstoodError(f"del {name}, which no name stands for")
        self.recorder.unbind(self.names.pop(name))

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Tuple() | ast.List():
                items = [self._value(item) for item in node.elts]
                return tuple(items) if isinstance(node, ast.Tuple) else items
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant() as operand):
                return -self._value(operand)
            case ast.Name() if node.id in self.names:
                return self.names[node.id]
            case ast.Name(id="inf" | "nan"):
                return float(node.id)
            case ast.Subscript(slice=ast.Constant() as index):
                return self._value(node.value)[index.value]
            case ast.Attribute() if _dotted(node).startswith("torch.") and _dotted(node).count(".") == 1:
                return getattr(torch, node.attr)
            case ast.Call():
                return self._call(node)
        raise NotUnderstoodError(ast.unparse(node))

    def _call(self, node: ast.Call) -> Any:
        function = _dotted(node.func)
        if function == f"{self._argument}.clear":
            self.names[self._argument] = None
            return None
        args = [self._value(a) for a in node.args]
        kwargs = {k.arg: self._value(k.value) for k in node.keywords if k.arg is not None}
        if function.startswith("assert_"):
            return _check(function, args)
        if function in ("empty_strided_cpu", "empty_strided_cuda"):
            return torch.empty_strided(*args[:2], dtype=args[2], device=function.removeprefix("empty_strided_"))
        if function == "reinterpret_tensor":
            tensor, size, stride, offset = args
            return tensor.as_strided(size, stride, tensor.storage_offset() + offset)
        if function == "device":
            return torch.device(*args, **kwargs)
        if function in self.kernels:
            return self.recorder.took(self.kernels[function])
        if function in _OF_STREAMS:
            return None
        if function == "copy_if_misaligned" or (function.endswith(".zero_") and args == []):
            return args[0] if args else self._value(ast.Name(function.removesuffix(".zero_")))
        return self._operator(function, args, kwargs)

    def _operator(self, function: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """An operator of PyTorch; one that writes into ``out`` takes workspace only."""
        packet, run = _operator(function)
        out = kwargs.get("out")
        if out is None:
            if run is None:
                raise NotUnderstoodError(f"{function} without out=")
            try:
                out = run(*args, **kwargs)
            except (RuntimeError, TypeError, ValueError) as error:
                raise NotUnderstoodError(f"{function}: {error}") from error
        operands = tensors_in((args, {k: v for k, v in kwargs.items() if k != "out"}))
        results = tensors_in(out)
        kind = device_type_of([*operands, *results])
        self.recorder.took(kernel_workspace_nbytes(packet, operands, results, kind))
        return out


def _check(function: str, args: Sequence[Any]) -> None:
    """Check sizes and strides, but no alignment, that the code asserts of tensors (torch 2.15: several)."""
    if function == "assert_size_stride":
        groups = [args[:3]]
    elif function == "assert_size_stride_grouped":
        groups = list(zip(*args[:3], strict=True))
    else:
        return
    for tensor, size, stride in groups:
        if (tuple(tensor.shape), tensor.stride()) != (size, stride):
            raise NotUnderstoodError(f"{tuple(tensor.shape)}, {tensor.stride()} where the code has {size}, {stride}")


def _name(node: ast.expr) -> str:
    if not isinstance(node, ast.Name):
        raise NotUnderstoodError(ast.unparse(node))
    return node.id


def _operator(function: str) -> tuple[Any, Any]:
    """The overload packet and what to call, for ``extern_kernels.mm`` or ``torch.ops.aten.mm.default``."""
    root, *path = function.split(".")
    if root == "extern_kernels" and len(path) == 1:
        name = {"bias_addmm": "addmm"}.get(path[0], path[0])
        packet = getattr(torch.ops.aten, name, None)
        if packet is None:
            raise NotUnderstoodError(function)
        return packet, None if name != path[0] else packet
    if root not in _ROOTS or not f"{_ROOTS[root]}.{'.'.join(path)}".startswith("torch.ops."):
        raise NotUnderstoodError(function)
    found: Any = torch
    for part in f"{_ROOTS[root]}.{'.'.join(path)}".split(".")[1:]:
        found = getattr(found, part, None)
    if found is None or any(word in function for word in _REBINDS_MEMORY):
        raise NotUnderstoodError(function)
    return getattr(found, "overloadpacket", found), found
