"""An exception at the k-th executed line of chunkc, by a trace function: what no handler of signals defers.

One moment is left out, where a ``with`` block ends, between its last line and ``__exit__``: Python looks for signals
and asynchronous exceptions there at no instruction, since else no lock could be relied upon.
"""

import dis
import sys
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, Self

import chunkc

PACKAGE = str(Path(chunkc.__file__).parent)


class Raised(KeyboardInterrupt):
    """The exception of a `RaisePoint`, which no code expects."""


class RaisePoint:
    """Within the block the thread raises `Raised` before line ``position`` of chunkc; None counts only.

    ``per_instruction`` counts byte code in place of lines; ``place`` is empty where the block ended before.
    """

    def __init__(self, position: int | None = None, *, per_instruction: bool = False) -> None:
        self.num_passed = 0
        self.place = ""
        self._position = position
        self._event = "opcode" if per_instruction else "line"

    def __enter__(self) -> Self:
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        sys.settrace(None)

    def _enter_frame(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = self._event == "opcode"
        return self._pass

    def _pass(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == self._event and not _leaves_with(frame):
            if self.num_passed == self._position:
                self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                sys.settrace(None)
                raise Raised(self.place)
            self.num_passed += 1
        return self._pass


def _leaves_with(frame: FrameType) -> bool:
    return frame.f_lasti in _with_exits(frame.f_code)


@cache
def _with_exits(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions that call ``__exit__`` with three times None, as where a block ends by itself."""
    found, instructions = set[int](), list(dis.get_instructions(code))
    for first in range(len(instructions) - 2):
        loads = instructions[first : first + 3]
        if all(i.opname == "LOAD_CONST" and i.argval is None for i in loads):
            found.update(i.offset for i in loads)
            found.update(i.offset for i in instructions[max(0, first - 1) : first] if i.opname == "SWAP")
            found.update(i.offset for i in instructions[first + 3 : first + 5] if i.opname in ("PRECALL", "CALL"))
    return frozenset(found)
