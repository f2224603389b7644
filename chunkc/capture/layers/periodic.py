"""The schedule of a deep model from captures of two shallow ones, where all its layers are alike.

The model is captured with ``BASE`` layers and with one more. The longer list of operators is the shorter one with one
more *block* in it, or in several places of it: rows outside, equal blocks, rows outside, and so on.

Every number in a list (counts, indexes, ends of names) is affine: c + b*L outside of the blocks of the depth L, and
c + a*m + b*L inside, of L and of the position m among the blocks. Two captures give five values for three unknowns, so
numbers by another rule are noticed; texts must be the same everywhere. Otherwise the model is not periodic and must be
captured as it is. The list of parameters follows the same rule, and is known of a deep model, so it is compared.

One size is no such function: that of the seeds of dropout, of which Inductor makes one tensor for all layers. It is
rounded up to a multiple, so in a deep model up to 8 bytes a dropout are not counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, TypeVar

from chunkc.ir.schedule import GraphKind, GraphSchedule, Operator, ParamInfo, Schedule

BASE: Final = 4
"""Layers of the shallower capture: an outer one at either end, and two between that show a rule."""

_NUMBER = re.compile(r"(?<!\d)(0|[1-9]\d*)(?!\d)")
_NUMBERED = re.compile(r".*_\d+")
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False)
_FIELDS: Final = {kind: tuple(f.name for f in fields(kind)) for kind in (Operator, ParamInfo)}
NUM_OUTER: Final = 2
"""Layers of a capture that are not alike: those at either end."""
MIXTURES: Final = ((BASE + 1, BASE), (BASE + 2, BASE), (BASE, BASE + 1), (BASE + 1, BASE + 1))
"""Captures by layers computed again and kept: two pairs, the second of a pair with one more computed again."""

Row = TypeVar("Row", Operator, ParamInfo)
_Form = tuple[str, ...]
_Insertion = tuple[int, int, int]
"""Rows of both lists in front of a block that only the second has, and its length."""


class NotPeriodicError(ValueError):
    """Two captures do not say what a deeper model's schedule is."""


@dataclass(frozen=True, slots=True)
class _Line:
    """A row as text without its numbers (``form``), and these."""

    form: _Form
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Text:
    """A schedule as text: lines of its parameters and of both graphs' operators, and one of what is left."""

    params: Sequence[_Line]
    operators: Mapping[GraphKind, Sequence[_Line]]
    whole: _Line

    @classmethod
    def of(cls, schedule: Schedule) -> _Text:
        operators = {graph.kind: [_line(_numbered(o)) for o in graph.operators] for graph in schedule.graphs}
        params = [_line(_numbered(info)) for info in schedule.params]
        whole = (schedule.held_nbytes, schedule.also_trained, schedule.num_samples, schedule.num_tokens)
        return cls(params, operators, _line(whole))

    def deepened(self, longer: _Text, num_layers: int, base: int = BASE) -> _Text:
        """The text of ``num_layers`` layers, from this one of ``base`` and ``longer`` of one more."""
        if num_layers < NUM_OUTER:
            raise NotPeriodicError(f"{num_layers} layers are fewer than the {NUM_OUTER} outer ones of the captures")
        params = _rows(self.params, longer.params, num_layers, base, "parameters")
        operators = {
            kind: _rows(lines, longer.operators[kind], num_layers, base, f"{kind} graphs")
            for kind, lines in self.operators.items()
        }
        (whole,) = _outside([self.whole], [longer.whole], num_layers - base)
        return _Text(params, operators, whole)

    def schedule(self) -> Schedule:
        held_nbytes, also_trained, num_samples, num_tokens = _decoded([self.whole])[0]
        infos = tuple(_restored(ParamInfo, row) for row in _decoded(self.params))
        forward, backward = (
            GraphSchedule(kind, tuple(_restored(Operator, row) for row in _decoded(lines)))
            for kind, lines in self.operators.items()
        )
        return Schedule(infos, forward, backward, held_nbytes, tuple(also_trained), num_samples, num_tokens)


def periodic_schedule(
    shallow: Schedule, deeper: Schedule, num_layers: int, params: Sequence[ParamInfo] | None = None
) -> Schedule:
    """The schedule that a capture with ``num_layers`` layers, at least ``NUM_OUTER``, would give.

    The captures have ``BASE`` and ``BASE + 1`` layers; ``params`` of the deep model are compared with what follows, if
    given. NotPeriodicError when the captures do not agree on a rule, or ``params`` are others.
    """
    _check_trained([shallow, deeper])
    return _compared(_Text.of(shallow).deepened(_Text.of(deeper), num_layers).schedule(), params)


def mixed_schedule(
    captures: Mapping[tuple[int, int], Schedule],
    num_again: int,
    num_kept: int,
    params: Sequence[ParamInfo] | None = None,
) -> Schedule:
    """The schedule of a deep model whose last ``num_kept`` layers alone keep their activations.

    ``captures``: by the layers that are computed again, and the kept ones behind them: `MIXTURES`. Each kind repeats by
    itself, so this is `periodic_schedule` of either, with the same errors.
    """
    _check_trained(list(captures.values()))
    texts = {counts: _Text.of(schedule) for counts, schedule in captures.items()}
    few, more = (texts[again, kept].deepened(texts[again + 1, kept], num_again, again) for again, kept in MIXTURES[::2])
    return _compared(few.deepened(more, num_kept).schedule(), params)


def _check_trained(captures: Sequence[Schedule]) -> None:
    if any(schedule.also_trained != captures[0].also_trained for schedule in captures):
        raise NotPeriodicError("parameters that are trained elsewhere belong to no graph, so nothing follows for them")


def _compared(schedule: Schedule, params: Sequence[ParamInfo] | None) -> Schedule:
    """``schedule``, whose parameters must be ``params`` of the deep model."""
    if params is not None and tuple(params) != schedule.params:
        pairs = zip(params, schedule.params, strict=False)
        name = next((p.name for p, q in pairs if p != q), "their number")
        raise NotPeriodicError(f"the model's parameters are not those of a periodic model: {name} differs")
    return schedule


def _rows(a: Sequence[_Line], b: Sequence[_Line], num_layers: int, base: int, what: str) -> list[_Line]:
    """The rows of ``num_layers`` layers from those of ``base`` and of one more."""
    insertions = _insertions([line.form for line in a], [line.form for line in b], 0, 0)
    if insertions is None:
        raise NotPeriodicError(
            f"the {what} of {base} and {base + 1} layers, of {len(a)} and {len(b)} rows, differ in more than blocks "
            "that repeat"
        )
    lines: list[_Line] = []
    done_a = done_b = 0
    for end_a, end_b, period in insertions:
        start, blocks = _blocks(a[done_a:end_a], b[done_b : end_b + period], period, num_layers, base)
        lines += _outside(a[done_a : done_a + start], b[done_b : done_b + start], num_layers - base)
        lines += blocks
        done_a += start + (base - NUM_OUTER) * period
        done_b += start + (base + 1 - NUM_OUTER) * period
    lines += _outside(a[done_a:], b[done_b:], num_layers - base)
    return lines


def _insertions(a: Sequence[_Form], b: Sequence[_Form], i: int, j: int) -> list[_Insertion] | None:
    """Find where ``b[j:]`` has a block more than ``a[i:]``; None where no blocks make the difference.

    Two blocks at one place would be one block, of rows that look alike, so a longer one is looked for.
    """
    same = next((k for k, (x, y) in enumerate(zip(a[i:], b[j:], strict=False)) if x != y), min(len(a) - i, len(b) - j))
    i, j = i + same, j + same
    if len(b) - j == len(a) - i:
        return [] if i == len(a) else None
    for period in range(1, len(b) - j - (len(a) - i) + 1):
        block = b[j : j + period]
        if j >= NUM_OUTER * period and all(b[j - m * period :][:period] == block for m in range(1, NUM_OUTER + 1)):
            rest = _insertions(a, b, i, j + period)
            if rest is not None and not (rest and rest[0][0] == i):
                return [(i, j, period), *rest]
    return None


def _blocks(a: Sequence[_Line], b: Sequence[_Line], period: int, num_layers: int, base: int) -> tuple[int, list[_Line]]:
    """Find where equal blocks begin, from the end backwards, and make those of ``num_layers`` layers."""
    reason = "there are too few rows in front of them"
    for start in range(len(a) - (base - NUM_OUTER) * period, -1, -1):
        few = [a[start + m * period :][:period] for m in range(base - NUM_OUTER)]
        more = [b[start + m * period :][:period] for m in range(base + 1 - NUM_OUTER)]
        if any([x.form for x in block] != [x.form for x in few[0]] for block in (*few, *more)):
            break
        try:
            return start, list(_inside(few, more, num_layers, base))
        except NotPeriodicError as error:
            reason = str(error)
    raise NotPeriodicError(f"{period} rows repeat in captures of {base} and {base + 1} layers, but {reason}")


def _outside(a: Sequence[_Line], b: Sequence[_Line], num_more: int) -> list[_Line]:
    """Rows outside the blocks: c + b*L by values for ``num_more`` layers fewer and one more than that."""
    lines = []
    for x, y in zip(a, b, strict=True):
        pairs = zip(x.numbers, y.numbers, strict=True)
        lines.append(_checked(x.form, tuple(v + (w - v) * num_more for v, w in pairs)))
    return lines


def _inside(
    blocks: Sequence[Sequence[_Line]], longer: Sequence[Sequence[_Line]], num_layers: int, base: int
) -> Iterator[_Line]:
    """All blocks: c + a*m + b*L by the values in both captures, which are more than there are unknowns."""
    rules = []
    for rows, more in zip(zip(*blocks, strict=True), zip(*longer, strict=True), strict=True):
        first = rows[0]
        by_position = [y - x for x, y in zip(first.numbers, rows[1].numbers, strict=True)]
        by_depth = [y - x for x, y in zip(first.numbers, more[0].numbers, strict=True)]
        for depth, lines in ((0, rows), (1, more)):
            for m, line in enumerate(lines):
                if line.numbers != _at(first.numbers, by_position, by_depth, m, depth):
                    raise NotPeriodicError(f"numbers of {''.join(first.form)} are no affine function of the layer")
        rules.append((first, by_position, by_depth))
    for m in range(num_layers - NUM_OUTER):
        for first, by_position, by_depth in rules:
            numbers = _at(first.numbers, by_position, by_depth, m, num_layers - base)
            yield _checked(first.form, numbers)


def _at(
    first: Sequence[int], by_position: Sequence[int], by_depth: Sequence[int], m: int, depth: int
) -> tuple[int, ...]:
    return tuple(v + a * m + b * depth for v, a, b in zip(first, by_position, by_depth, strict=True))


def _checked(form: _Form, numbers: tuple[int, ...]) -> _Line:
    if any(number < 0 for number in numbers):
        raise NotPeriodicError(f"a number of {''.join(form)} falls below zero in deeper models")
    return _Line(form, numbers)


def _numbered(row: Operator | ParamInfo) -> tuple[Any, ...]:
    """The fields of ``row``, an operator's name with a number: FX gives the first of several none."""
    name, *others = (getattr(row, field) for field in _FIELDS[type(row)])
    lacks_one = isinstance(row, Operator) and not _NUMBERED.fullmatch(name)
    return (f"{name}_0" if lacks_one else name, *others)


def _restored(kind: Callable[..., Row], row: Sequence[Any]) -> Row:
    name = str(row[0])
    others = (tuple(value) if isinstance(value, list) else value for value in row[1:])
    return kind(name.removesuffix("_0") if kind is Operator else name, *others)


def _line(values: Sequence[Any]) -> _Line:
    pieces = _NUMBER.split(_ENCODER.encode(values))
    return _Line(tuple(pieces[::2]), tuple(map(int, pieces[1::2])))


def _decoded(lines: Sequence[_Line]) -> list[Any]:
    """The values of each line."""
    texts = (line.form[0] + "".join(map(_joined, line.numbers, line.form[1:])) for line in lines)
    return list(json.loads(f"[{','.join(texts)}]"))


def _joined(number: int, text: str) -> str:
    return f"{number}{text}"
