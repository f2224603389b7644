"""Blocks that commands printed stand in the pages as they are printed now, and the comparison finds what is stale."""

import sys
from pathlib import Path

import pytest
from printed_blocks import REWRITE, as_printed, blocks_of, is_printed, modules_of, rewritten, write_modules

from chunkc import cli

ROOT = Path(__file__).parents[1]
# test_readme.py compares README.md's. Pages marked slow have commands that take minutes.
PAGES = (
    "docs/reading_a_plan.md",
    pytest.param("docs/commands.md", marks=pytest.mark.slow),
    pytest.param("docs/multi_gpu.md", marks=pytest.mark.slow),
    pytest.param("docs/tutorial.md", marks=pytest.mark.slow),
)

PAGE = """\
In `one.py`:

    a = 1

Then:

    $ chunkc first --save x

    a line

    another
    $ chunkc second

and of it

    $ chunkc first --full
    ...
    program b
      b1  one
    ...

```console
$ make
$ chunkc third
```

```text
a
with    it
x       not tried
...
```
"""


@pytest.mark.long
@pytest.mark.skipif(not as_printed(), reason="another torch captures other operators")
@pytest.mark.parametrize("name", PAGES)
def test_pages_show_what_commands_print(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    write_modules(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    found = blocks_of(page)
    assert any(block.lines for block in found)
    for block in found[: 1 + max(i for i, block in enumerate(found) if block.lines)]:
        assert cli.main(block.arguments) in (0, 1)
        printed = capsys.readouterr().out
        assert not block.lines or is_printed(block, printed.splitlines()), f"{name}, `{block.command}`: {REWRITE}"
    for module in modules_of(page):
        sys.modules.pop(module.removesuffix(".py"), None)


def test_blocks_and_modules_of_a_page() -> None:
    assert modules_of(PAGE) == {"one.py": "a = 1\n"}
    assert [(block.command, block.lines) for block in blocks_of(PAGE)] == [
        ("chunkc first --save x", ("a line", "", "another")),
        ("chunkc second", ()),
        ("chunkc first --full", ("...", "program b", "  b1  one", "...")),
        ("chunkc third", ("a", "with    it", "x       not tried", "...")),
    ]
    assert blocks_of(PAGE)[0].arguments == ["first", "--save", "x"]


def test_parts_are_found_in_order_and_whole_blocks_line_by_line() -> None:
    whole, _, part, _ = blocks_of(PAGE)
    assert is_printed(whole, ["a line", "", "another"])
    assert not is_printed(whole, ["a line", "", "another", "more"])
    assert is_printed(part, ["before", "program b", "  b1  one", "behind"])
    assert not is_printed(part, ["program b", "  b1  two"])


def test_advice_counts_on_neither_side() -> None:
    block = blocks_of("    $ chunkc plan x\n    step 1\n\n    with  it\n    ----  --\n    more  fits\n\n    plan y\n")[
        0
    ]
    assert is_printed(block, ["step 1", "", "with    it", "----    --", "less    not tried", "", "plan y"])
    assert not is_printed(block, ["step 2", "", "with    it", "----    --", "less    not tried", "", "plan y"])


def test_a_part_is_found_again_by_its_words_where_its_numbers_changed() -> None:
    page = "    $ chunkc plan x\n    ...\n    step      404.991 ms, simulated\n    ...\n"
    new = rewritten(page, lambda _: "step by step\nstep      1,419.2 ms, simulated\nbound\n")
    assert new == page.replace("404.991 ms", "1,419.2 ms")
    with pytest.raises(SystemExit, match="`chunkc plan x` prints no line that begins like 'step"):
        rewritten(page, lambda _: "nothing\n")


def test_a_page_is_written_anew_where_it_shows_output() -> None:
    printed = {
        "first --save x": "b line\n",
        "second": "never shown\n",
        "first --full": "head\nprogram b\n  b1  two\ntail\n",
        "third": "a\nb\n",
    }
    new = rewritten(PAGE, lambda arguments: printed[" ".join(arguments)])
    assert new == PAGE.replace("    a line\n\n    another\n", "    b line\n").replace("b1  one", "b1  two").replace(
        "a\nwith    it\nx       not tried\n", "a\nb\n"
    )
