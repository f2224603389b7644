"""Every program in docs/ runs; both sides of a change train to the same parameters, element by element."""

import copy
import re
import shlex
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from page_programs import (
    ROOT,
    Net,
    Reader,
    assert_same_values,
    batches,
    changed,
    programs,
    samples,
    seeded,
    side,
    small_llama,
    tokens,
)
from torch import nn
from torch.utils.data import DataLoader

import chunkc
from chunkc import cli

PAGES = sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))
NET_MEMORY, LLAMA_MEMORY = "256k", "256k"
EXACT = {"dtype": torch.float32}
SMALLER = {
    **{"4096": "64", "14336": "96", "128256": "256", "2048": "32"},
    **{"layers=32": "layers=1", "heads=32": "heads=4", "heads=8": "heads=2"},
}

# Pages whose python programs run in the order of the page, by the test that does; diffs are run by the tests below.
IN_ORDER = (
    *("checkpoints.md", "memory.md", "multi_gpu.md", "observing.md"),
    *("quickstart.md", "tutorial.md", "v100_fp16.md", "weights.md"),
)
ELSEWHERE = ("patterns.md",)  # tests/examples/test_patterns.py
LOOPS = [
    *[("howto/clipping.md", i) for i in range(2)],
    ("howto/accumulation.md", 0),
    *[("howto/schedules.md", i) for i in range(2)],
    ("howto/evaluation.md", 0),
    ("migrate/accelerate.md", 0),
]
OF_LLAMA = {"howto/adapters.md": 1, "howto/trainer.md": 1, "howto/trl.md": 1, "quickstart.md": 6}
OF_LIGHTNING = {"howto/lightning.md": 1}
ONE_SIDED = ("migrate/deepspeed.md", "migrate/fsdp2.md")


def names_of(model: nn.Module) -> dict[str, Any]:
    """What a program finds."""
    found = {"model": model, "batches": batches(), "samples": samples(), "torch": torch, "nn": nn}
    return {**found, "loader": DataLoader(samples(), batch_size=2)}  # type: ignore[arg-type]


def test_no_program_is_left_out() -> None:
    diffs = {page: len(found) for page in PAGES if (found := programs(page, "diff"))}
    run = {page: sum(name == page for name, _ in LOOPS) for page, _ in LOOPS}
    assert diffs == {**run, **OF_LLAMA, **OF_LIGHTNING, **dict.fromkeys(ONE_SIDED, 1)}
    assert {page for page in PAGES if programs(page, "python")} == {*IN_ORDER, *ELSEWHERE}
    texts = [(ROOT / "docs" / page).read_text(encoding="utf-8") for page in PAGES]
    kinds = {kind for text in texts for kind in re.findall(r"^```(\w+)$", text, re.MULTILINE)}
    assert kinds == {"console", "diff", "python", "sh", "text"}


@pytest.mark.long(but="howto/evaluation.md-0")
@pytest.mark.parametrize(("page", "number"), LOOPS)
def test_both_sides_train_alike(page: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(monkeypatch, tmp_path, NET_MEMORY, **EXACT)
    diff = programs(page, "diff")[number]
    before = seeded(Net).state_dict()
    plain = reader.run(side(diff, "-"), names_of(seeded(Net)), page)
    ours = reader.run(side(diff, "+"), names_of(seeded(Net)), page)
    (model,) = reader.compiled
    assert set(changed(model, before)) == set(before)
    assert_same_values(model, plain["model"])
    for name in {"norm", "held_out", "loss"} & plain.keys():
        torch.testing.assert_close(ours[name], plain[name], rtol=1e-5, atol=1e-5)
    stats = chunkc.stats(model)
    assert stats["h2d_nbytes"] > 0 and stats["measured_peak_nbytes"] <= stats["budget_nbytes"]


@pytest.mark.parametrize("page", ONE_SIDED)
def test_scripts_that_came_from_other_libraries_train(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(monkeypatch, tmp_path, NET_MEMORY)
    (diff,) = programs(page, "diff")
    compile(side(diff, "-"), page, "exec")
    before = seeded(Net).state_dict()
    reader.run(side(diff, "+"), names_of(seeded(Net)), page)
    assert set(changed(reader.compiled[0], before)) == set(before)


@pytest.mark.long
def test_the_page_on_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft", reason="runs where peft is installed, as `make test` does")
    reader = Reader(monkeypatch, tmp_path, LLAMA_MEMORY, **EXACT)
    (diff,) = programs("howto/adapters.md", "diff")
    models = {}
    for mark in "-+":
        torch.manual_seed(0)  # of the adapters
        models[mark] = reader.run(side(diff, mark), names_of(seeded(small_llama)), "howto/adapters.md")["model"]
        assert any((tmp_path / "adapters").glob("adapter_model*"))
    assert_same_values(models["+"], models["-"])


@pytest.mark.long
def test_the_page_on_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate", reason="runs where accelerate is installed, as `make test` does")
    reader = Reader(monkeypatch, tmp_path, LLAMA_MEMORY, **EXACT)
    (diff,) = programs("howto/trainer.md", "diff")
    before = seeded(small_llama).state_dict()
    plain, ours = (
        reader.run(side(diff, mark), names_of(seeded(small_llama)), "howto/trainer.md")["trainer"] for mark in "-+"
    )
    assert ours.state.global_step == plain.state.global_step == 4
    assert set(changed(ours.model, before)) == set(before)
    assert_same_values(ours.model, plain.model)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # TRL's own
def test_the_page_on_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl", reason="runs where trl is installed, by the extra `trl`")
    from trl_runs import text, write_tokenizer

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CI", "1")
    reader = Reader(monkeypatch, tmp_path, LLAMA_MEMORY, **EXACT)
    monkeypatch.setattr("chunkc.integrations.hf.compile", reader.compile)
    reader.write_pretrained()
    write_tokenizer(tmp_path / "pretrained")
    (diff,) = programs("howto/trl.md", "diff")
    names = {"texts": [text(i, 6) for i in range(4)]}
    plain, ours = (reader.run(side(diff, mark), dict(names), "howto/trl.md")["trainer"] for mark in "-+")
    assert ours.state.global_step == 2 and reader.compiled == [ours.model]
    assert_same_values(ours.model, plain.model)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_the_page_on_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning", reason="runs where lightning is installed, by the extra `lightning`")
    reader = Reader(monkeypatch, tmp_path, NET_MEMORY)
    monkeypatch.setattr("chunkc.integrations.lightning.compile", reader.compile)
    (diff,) = programs("howto/lightning.md", "diff")
    before = seeded(Net).state_dict()
    plain, ours = (reader.run(side(diff, mark), names_of(seeded(Net)), "howto/lightning.md")["model"] for mark in "-+")
    assert set(changed(ours, before)) == set(before) and reader.compiled == [ours]
    assert_same_values(ours, plain)


# --- the quickstart ---------------------------------------------------------------------------------------------------


@pytest.fixture
def quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    reader = Reader(monkeypatch, tmp_path, LLAMA_MEMORY, **EXACT)
    reader.write_pretrained()
    return reader


def names_of_quickstart() -> dict[str, Any]:
    import transformers

    names = ("AutoConfig", "AutoModelForCausalLM", "get_cosine_schedule_with_warmup")
    found = {name: getattr(transformers, name) for name in names}
    return {**found, "chunkc": chunkc, "torch": torch, "transformers": transformers, "data": [batches()] * 2}


@pytest.mark.long
def test_the_quickstart_from_its_loop_to_a_resumed_run(quickstart: Reader) -> None:
    loop, streamed, saving, resuming = programs("quickstart.md", "diff")[:4]
    sides = {}
    for mark in "-+":
        names = {**names_of_quickstart(), "step": 1}
        quickstart.run(side(loop, mark), names, "quickstart.md")
        quickstart.run(side(saving, mark), names, "quickstart.md")
        quickstart.run(side(resuming, mark), names, "quickstart.md")
        sides[mark] = names
    assert sides["+"]["first_step"] == 2
    assert_same_values(sides["+"]["model"], sides["-"]["model"])
    loaded = [quickstart.run(side(streamed, mark), names_of_quickstart(), "quickstart.md")["model"] for mark in "-+"]
    for name, value in loaded[0].state_dict().items():
        assert torch.equal(loaded[1].state_dict()[name], value), name


@pytest.mark.long
def test_the_quickstarts_trainer_adapters_and_callback(quickstart: Reader) -> None:
    pytest.importorskip("peft", reason="runs where peft is installed, as `make test` does")
    import peft
    from transformers import TrainingArguments

    trainer, adapters = programs("quickstart.md", "diff")[4:]
    args = TrainingArguments(
        "run1", max_steps=2, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, learning_rate=1e-3
    )
    resuming = "trainer.train(resume_from_checkpoint=True)"
    logged: list[dict[str, float]] = []
    wandb = types.SimpleNamespace(log=lambda numbers, step: logged.append(numbers))
    (callback,) = programs("quickstart.md", "python")
    models = {}
    for mark in "-+":
        names = {**names_of_quickstart(), "args": copy.deepcopy(args), "model": seeded(small_llama), "wandb": wandb}
        names |= {"train": samples(), "held_out": samples(2)}
        if mark == "-":  # the run that both go on from
            fresh = side(trainer, mark).replace(resuming, "trainer.args.max_steps = 1\ntrainer.train()")
            quickstart.run(fresh, names, "quickstart.md")
            names |= {"args": copy.deepcopy(args), "model": seeded(small_llama)}
        models[mark] = quickstart.run(side(trainer, mark), names, "quickstart.md")["model"]
        shutil.rmtree("run1/checkpoint-2")
    assert_same_values(models["+"], models["-"])
    log = quickstart.run(callback, names, "quickstart.md")["Log"]()
    log.on_log(None, types.SimpleNamespace(global_step=2), None, model=models["+"])
    assert logged[0]["num_steps"] >= 1
    names |= {"get_peft_model": peft.get_peft_model, "LoraConfig": peft.LoraConfig, "model": seeded(small_llama)}
    adapted = quickstart.run(side(adapters, "+"), names, "quickstart.md")
    adapted["model"](**batches()[0]).loss.backward()
    adapted["optimizer"].step()
    stats = chunkc.stats(adapted["model"])
    assert 0 < stats["measured_peak_nbytes"] <= stats["budget_nbytes"]


# --- pages whose programs belong together -----------------------------------------------------------------------------


def trained(reader: Reader) -> dict[str, Any]:
    """A compiled model after two steps, with its optimizer."""
    model = chunkc.compile(seeded(Net), hw="auto")
    optimizer = chunkc.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)

    def train_step(batch: dict[str, torch.Tensor]) -> None:
        model(**batch).loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    for batch in batches(2):
        train_step(batch)
    found = {**names_of(model), "chunkc": chunkc, "optimizer": optimizer, "scheduler": scheduler}
    return {**found, "train_step": train_step, "batch": batches(1)[0]}


def run_all(reader: Reader, page: str, names: dict[str, Any]) -> dict[str, Any]:
    for program in programs(page, "python"):
        reader.run(program, names, page)
    return names


def test_the_page_on_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(monkeypatch, tmp_path, NET_MEMORY)
    names = run_all(reader, "checkpoints.md", {**trained(reader), "first_step": 998, "num_steps": 1000})
    assert names["first_step"] == 1000


@pytest.mark.long
def test_the_page_on_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader = Reader(monkeypatch, tmp_path, NET_MEMORY)
    run_all(reader, "memory.md", trained(reader))
    printed = capsys.readouterr().out
    assert "v100-32g-240g" in printed and "emulated" in printed and "measured_peak_nbytes" in printed


@pytest.mark.long
def test_the_page_on_several_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a job of one rank; machines of several are planned for."""
    from datetime import timedelta

    started: list[Any] = []
    reader = Reader(monkeypatch, tmp_path, NET_MEMORY)
    first, second, third = programs("multi_gpu.md", "python")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        names = {**names_of(seeded(Net)), "chunkc": chunkc, "batches": [tokens(0), tokens(1)]}
        before = seeded(Net).state_dict()
        reader.run(first, names, "multi_gpu.md")
        assert set(changed(reader.compiled[0], before)) == set(before)
        reader.run(second, {**names, "model": seeded(Net)}, "multi_gpu.md")
    finally:
        torch.distributed.destroy_process_group()
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *given, **named: started.append((given, named)))
    reader.run(third, {"torch": torch, "timedelta": timedelta}, "multi_gpu.md")
    assert started == [(("nccl",), {"timeout": timedelta(minutes=5)})]


@pytest.mark.long
def test_the_page_on_watching_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(monkeypatch, tmp_path, NET_MEMORY)
    chunkc.Hardware.parse("v100-240g").save("profile.json")
    logged: list[dict[str, float]] = []
    wandb = types.SimpleNamespace(log=lambda numbers, step: logged.append(numbers))
    run_all(reader, "observing.md", {**trained(reader), "wandb": wandb, "step": 10, "three_batches": batches(3)})
    assert logged[0]["num_steps"] > 0 and (tmp_path / "timeline.json").stat().st_size > 1000


@pytest.mark.long
def test_the_page_on_fp16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(monkeypatch, tmp_path, LLAMA_MEMORY, dtype=torch.float16)
    reader.write_pretrained()
    before = seeded(small_llama).state_dict()
    run_all(reader, "v100_fp16.md", {"data": [batches()]})
    assert set(changed(reader.compiled[0], before))


def test_the_page_on_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    reader = Reader(monkeypatch, tmp_path, LLAMA_MEMORY)
    reader.write_pretrained()
    names = {"transformers": transformers, "torch": torch, "chunkc": chunkc, "folder": tmp_path / "pretrained"}
    run_all(reader, "weights.md", names)
    assert sorted(names["report"].loaded_keys) == sorted(dict(seeded(small_llama).named_parameters()))
    assert torch.equal(names["value"], seeded(small_llama).state_dict()[names["name"]])


# --- the tutorial -----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_tutorial_trains_saves_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(monkeypatch, tmp_path, LLAMA_MEMORY)
    reader.write_pretrained()
    _, training, resuming = programs("tutorial.md", "python")
    names = reader.run(training.replace("step % 100 == 99", "step % 100 == 3"), {"batches": batches()}, "tutorial.md")
    assert (tmp_path / "llama-3-8b-tuned" / "config.json").exists() or not names
    assert reader.run(resuming, names, "tutorial.md")["first_step"] == len(batches())


@pytest.mark.long
def test_the_tutorials_plans_are_made_of_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one small layer; tests/test_printed_blocks.py plans the 8B and compares what is printed."""
    pytest.importorskip("peft", reason="runs where peft is installed, as `make test` does")
    module = programs("tutorial.md", "python")[0]
    for large, small in SMALLER.items():
        assert large in module
        module = module.replace(large, small)
    (tmp_path / "llama8b.py").write_text(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    commands = [line[2:] for block in programs("tutorial.md", "console") for line in block.splitlines()]
    assert len(commands) == 4
    for command in commands:
        assert cli.main(shlex.split(command)[1:]) == 0
        assert re.match(r"\w+ForCausalLM \(llama8b:\w+\) on rtx4090-24g-\d+g: fits", capsys.readouterr().out)
    sys.modules.pop("llama8b")


# --- lines for a shell ------------------------------------------------------------------------------------------------


def test_lines_for_a_shell_name_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets of make, extras, and commands, whose options are read and that tests elsewhere run."""
    machines: list[str] = []
    for command in cli.COMMANDS.values():
        monkeypatch.setattr(command, "run", lambda args: machines.append(getattr(args, "hw", "auto")) or 0)
    lines = [line for page in PAGES for block in programs(page, "console") for line in block.splitlines()]
    assert len(lines) >= 8 and all(line.startswith("$ ") for line in lines)
    makefile = (ROOT / "Makefile").read_text("utf-8")
    setup = (ROOT / "pyproject.toml").read_text("utf-8")
    for line in lines:
        program, *words = shlex.split(line[2:])
        assert program in {"chunkc", "make", "pip", "python"}, line
        if program == "chunkc":
            assert cli.main(words) == 0, line
        elif program == "make":
            assert re.search(rf"^{words[0]}:", makefile, re.M), line
        elif program == "pip":
            assert all(
                re.search(rf"^{extra} = \[", setup, re.M) for w in words for extra in re.findall(r"\.\[(\w+)\]", w)
            )
    assert len(machines) >= 6 and all(chunkc.Hardware.parse(hw) for hw in machines if hw != "auto")
    exports = [line for page in PAGES for block in programs(page, "sh") for line in block.splitlines()]
    assert exports and all(re.fullmatch(r"export [A-Z_]+=\S+", line) for line in exports)
    variables = (ROOT / "docs" / "env_vars.md").read_text("utf-8")
    assert all(f"`{line.removeprefix('export ')}`" in variables for line in exports)
