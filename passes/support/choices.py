"""Choices of the search, kept between runs by all that they follow from.

The search is a function of the schedule, the target, the caller's wishes and the planner's code: what it chose once, it
chooses again. The plan is made from the choice by the same passes, and verified, as ever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from chunkc import cost, hardware, ir
from chunkc.files import Decoder, FormatError
from chunkc.passes.support.draft import PlanOptions, Target


class ChoiceStore(Protocol):
    """Interface of what keeps documents of JSON by key; nothing of it is ever needed."""

    def find(self, key: str) -> Any: ...

    def keep(self, key: str, document: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Choice:
    """The options that a search varied, as it chose them; ``note``: why, for people."""

    chunk_numel: int | None
    num_resident_states: int
    keeps_payloads: bool
    streamed_share: float
    num_second_homes: int
    num_exchanges: int
    moved_share: float
    note: str

    @classmethod
    def of(cls, options: PlanOptions, note: str) -> Choice:
        """The choice of ``options``."""
        return cls(
            options.chunk_numel,
            options.num_resident_states,
            options.keeps_payloads,
            options.streamed_share,
            options.num_second_homes,
            options.num_exchanges,
            options.moved_share,
            note,
        )

    def applied_to(self, options: PlanOptions) -> PlanOptions:
        """``options`` with what was chosen."""
        return replace(options, **{name: value for name, value in asdict(self).items() if name != "note"})


def key_of(schedule_digest: str, target: Target, options: PlanOptions, max_actions: int) -> str:
    """A key that is equal where a search chooses alike; all ranks choose as rank 0."""
    facts = (_code_digest(), schedule_digest, repr(replace(target, rank=0)), repr(options), str(max_actions))
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]


def find_choice(store: ChoiceStore, key: str) -> Choice | None:
    """The choice that ``store`` keeps under ``key``; None for none, or a document of another form."""
    document = store.find(key)
    try:
        return None if document is None else Decoder().decode(Choice, document)
    except FormatError:
        return None


def keep_choice(store: ChoiceStore, key: str, choice: Choice) -> None:
    store.keep(key, asdict(choice))


@cache
def _code_digest() -> str:
    """That of the sources that a search runs through."""
    digest = hashlib.sha256()
    for path in sorted(_sources()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _sources() -> Iterable[Path]:
    yield from Path(__file__).parents[1].rglob("*.py")
    for package in (cost, hardware, ir):
        for folder in package.__path__:
            yield from Path(folder).rglob("*.py")
            yield from Path(folder).rglob("*.toml")
