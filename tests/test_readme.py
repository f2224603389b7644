"""README.md is right: its programs run (with a smaller model), its commands exist, its links lead somewhere."""

import copy
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from printed_blocks import REWRITE, as_printed, blocks_of, is_printed
from transformers import LlamaConfig, LlamaForCausalLM

import chunkc
from chunkc import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
SMALLER = {
    **{"hidden_size=512": "hidden_size=64", "intermediate_size=1376": "intermediate_size=96"},
    **{"layers=8": "layers=2", "heads=8": "heads=2"},
}
DIFF_HW = "emulated-96m-4g"


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


def commands(program: str) -> list[str]:
    lines = [line[2:] for text in blocks("console") for line in text.splitlines()]
    return [line for line in lines if line.split()[0] == program]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("gpt", None)


@pytest.fixture
def written(folder: Path) -> Path:
    (source,) = blocks("python")
    for large, small in SMALLER.items():
        assert large in source
        source = source.replace(large, small)
    (folder / "gpt.py").write_text(source)
    return folder


def test_every_block_is_of_a_kind_that_is_checked_here() -> None:
    assert {name for name, _ in BLOCKS} == {"console", "diff", "python", "sh", "text"}
    assert [len(blocks(name)) for name in ("diff", "python", "sh", "text")] == [1, 1, 1, 1]
    assert all(line.startswith("$ ") for text in blocks("console") for line in text.splitlines())
    programs = {line.split()[1] for text in blocks("console") for line in text.splitlines()}
    assert programs == {"make", "chunkc"}


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("command", commands("make"))
def test_make_targets_exist(command: str) -> None:
    _, target = shlex.split(command)
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_chunkc_commands_run_in_the_order_of_the_readme(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for command in commands("chunkc"):
        assert cli.main(shlex.split(command)[1:]) == 0, command
        outputs.append(capsys.readouterr().out)
    assert len(outputs) == 7 and all(outputs)
    assert (written / "plan.json").exists() and (written / "profile.json").exists()


@pytest.mark.skipif(not as_printed(), reason="printed with the torch of constraints.txt")
def test_the_plan_is_what_the_command_prints(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "gpt.py").write_text(blocks("python")[0])
    printed = blocks_of(README)[0]
    assert printed.lines == tuple(blocks("text")[0].splitlines())
    assert cli.main(printed.arguments) == 0
    assert is_printed(printed, capsys.readouterr().out.splitlines()), REWRITE


def test_both_sides_of_the_diff_train_to_the_same_losses(capsys: pytest.CaptureFixture[str]) -> None:
    (diff,) = blocks("diff")
    assert sum(line[0] in "+-" and bool(line[1:].strip()) for line in diff.splitlines()) == 5
    sides = {mark: _side(diff, mark) for mark in "-+"}
    assert f'hw="{DIFF_HW}"' in sides["+"] and "import chunkc" in sides["+"] and "chunkc" not in sides["-"]
    smaller = sides["+"].replace(DIFF_HW, "emulated-600k-64m").replace("dtype=", 'backend="eager", dtype=')
    plain, managed = _losses(sides["-"]), _losses(smaller)
    assert managed == pytest.approx(plain, abs=1e-5)
    assert plain[-1] < plain[0]
    printed = capsys.readouterr().out
    assert printed.startswith("plan ") and "emulated-600k-64m" in printed
    moved = re.search(r"moved per step: ([\d.]+) KiB", printed)
    assert moved is not None and float(moved[1]) > 0


def _side(diff: str, mark: str) -> str:
    return "\n".join(line[1:] for line in diff.splitlines() if not line or line[0] in (" ", mark))


def _losses(program: str) -> list[float]:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    losses: list[float] = []
    recorded = program.replace("    optimizer.step()", "    losses.append(loss.item())\n    optimizer.step()")
    assert recorded != program
    names: dict[str, Any] = {
        "torch": torch,
        "LlamaForCausalLM": LlamaForCausalLM,
        "config": copy.deepcopy(config),
        "batches": [torch.arange(16).view(2, 8)] * 4,
        "losses": losses,
    }
    exec(compile(recorded, "README.md", "exec"), names)
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
            text = (ROOT / path).read_text() if path else README
            found = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.*)$", text, re.M)}
            assert not heading or heading in found, link
