"""README.md is right: its program runs (with a smaller model), commands print what it shows, links lead somewhere."""

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch
from printed_blocks import REWRITE, as_printed, blocks_of, is_printed

import chunkc
from chunkc import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
SMALLER = {
    **{"hidden_size=512": "hidden_size=64", "intermediate_size=1376": "intermediate_size=96"},
    **{"layers=8": "layers=2", "heads=8": "heads=2"},
}
DIFF_HW, SMALL_HW = "emulated-96m-4g", "emulated-1m-64m"


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


def commands(program: str) -> list[str]:
    lines = [line[2:] for text in blocks("console") for line in text.splitlines()]
    return [line for line in lines if line.split()[0] == program]


def test_every_block_is_of_a_kind_that_is_checked_here() -> None:
    assert {name for name, _ in BLOCKS} == {"console", "diff", "sh", "text"}
    assert [len(blocks(name)) for name in ("diff", "sh", "text")] == [1, 1, 1]
    assert all(line.startswith("$ ") for text in blocks("console") for line in text.splitlines())
    programs = {line.split()[1] for text in blocks("console") for line in text.splitlines()}
    assert programs == {"pip", "make", "chunkc"}


def test_it_is_a_screen_and_a_half() -> None:
    assert len(README.splitlines()) <= 125
    assert max(len(line) for line in README.splitlines() if not line.startswith(("|", "!", "*"))) <= 130


def test_the_extras_that_are_installed_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [command] = commands("pip")
    _, install, target = shlex.split(command)
    extra = re.fullmatch(r"\.\[(\w+)\]", target)
    assert install == "install" and extra is not None and extra[1] in project["optional-dependencies"]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("command", commands("make"))
def test_make_targets_exist(command: str) -> None:
    _, target = shlex.split(command)
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.skipif(not as_printed(), reason="printed with the torch of constraints.txt")
def test_chunkc_commands_print_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = blocks_of(README)
    assert [block.command for block in found] == commands("chunkc") and [bool(block.lines) for block in found] == [True]
    for block in found:
        assert cli.main(block.arguments) == 0, block.command
        printed = capsys.readouterr().out.splitlines()
        assert printed and (not block.lines or is_printed(block, printed)), f"`{block.command}`: {REWRITE}"


def test_both_sides_of_the_diff_train_to_the_same_losses(capsys: pytest.CaptureFixture[str]) -> None:
    (diff,) = blocks("diff")
    assert sum(line[0] in "+-" and bool(line[1:].strip()) for line in diff.splitlines()) == 5
    for large, small in SMALLER.items():
        assert diff.count(large) == 1
        diff = diff.replace(large, small)
    sides = {mark: _side(diff, mark) for mark in "-+"}
    assert f'hw="{DIFF_HW}"' in sides["+"] and "import chunkc" in sides["+"] and "chunkc" not in sides["-"]
    smaller = sides["+"].replace(DIFF_HW, SMALL_HW).replace("dtype=", 'backend="eager", dtype=')
    plain, managed = _losses(sides["-"]), _losses(smaller)
    assert managed == pytest.approx(plain, abs=1e-5)
    assert plain[-1] < plain[0]
    printed = capsys.readouterr().out
    assert printed.startswith("plan ") and SMALL_HW in printed
    moved = re.search(r"moved per step: ([\d.]+) KiB", printed)
    assert moved is not None and float(moved[1]) > 0


def _side(diff: str, mark: str) -> str:
    return "\n".join(line[1:] for line in diff.splitlines() if not line or line[0] in (" ", mark))


def _losses(program: str) -> list[float]:
    torch.manual_seed(0)
    losses: list[float] = []
    recorded = program.replace("    optimizer.step()", "    losses.append(loss.item())\n    optimizer.step()")
    recorded = recorded.replace("torch.randint(256, (10, 2, 64))", "[torch.arange(16).view(2, 8)] * 4")
    assert recorded.count("losses") == 1 and recorded.count("arange") == 1
    exec(compile(recorded, "README.md", "exec"), {"losses": losses})
    return losses


def test_the_torchrun_line_has_a_process_for_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is behind the script's name is understood by it; one process alone is refused."""
    (line,) = blocks("sh")
    words = shlex.split(line)
    script = words.index("examples/train_gpt.py")
    assert words[:2] == ["torchrun", "--nproc-per-node"] and (ROOT / words[script]).exists()
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import train_gpt

    args = train_gpt.parse(words[script + 1 :])
    assert chunkc.Hardware.parse(args.hw).num_gpus == int(words[2])
    with pytest.raises(chunkc.HardwareError, match=r"has 8 devices, but this job has 1 rank: .*nproc-per-node=8"):
        chunkc.compile(torch.nn.Linear(2, 2), hw=args.hw)


def test_links_lead_to_files_and_headings() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert len(links) >= 5
    for link in links:
        if not link.startswith("http"):
            path, _, heading = link.partition("#")
            assert not path or (ROOT / path).is_file(), link
            text = README if not path else (ROOT / path).read_text() if path.endswith(".md") else ""
            found = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.*)$", text, re.M)}
            assert not heading or heading in found, link
    assert len({link for link in links if link.startswith("https://")}) >= 5


def test_measured_figures_are_those_of_the_benchmarks() -> None:
    """Each tool's step stands in its row of the page of benchmarks, and the first steps in one sentence of it."""
    step, first = (
        [re.search(r"\d+ m?s\b|$", cell)[0] for cell in line.split("|")[2:5]]  # type: ignore[index]
        for line in README.splitlines()
        if line.startswith("|") and "measured" in line
    )
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in page.splitlines() if line.startswith("|")]
    for tool, figure in zip(("chunkc", "ZeRO-Offload", "FSDP2"), step, strict=True):
        assert figure and [took for name, took in rows if name.startswith(tool)] == [figure], tool
    chunkc_s, zero_s, fsdp_s = (figure.removesuffix(" s") for figure in first)
    sentence = f"{chunkc_s} s with chunkc, and {fsdp_s} and {zero_s} s with the others"
    assert sentence in " ".join(page.split())
