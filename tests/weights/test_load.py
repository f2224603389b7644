"""Pretrained weights into compiled models: exact, at any time, with transformers' rules for names, or refused whole."""

import copy
import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from models import CASES, loss_of
from pretrained import HW, assert_same, from_meta, logits, saved
from safetensors.torch import load_file, save_file
from small import OPTIONS, PHASES, Small, twins_at
from torch import nn

import chunkc
from chunkc import ChunkcError

FAMILIES = [
    ("t5", torch.float32),
    pytest.param("llama", torch.bfloat16, marks=pytest.mark.slow),
    pytest.param("bert", torch.float32, marks=pytest.mark.slow),
    pytest.param("gpt2", torch.bfloat16, marks=pytest.mark.slow),
]
DTYPES = (torch.float32, torch.bfloat16)
INDEX = "model.safetensors.index.json"
ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.parametrize(("name", "dtype"), FAMILIES)
def test_a_loaded_model_is_transformers_own(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Bit-equal logits in the same dtype; trained, saved and loaded by transformers again, bit-equal still."""
    plain_class, batch = type(saved(name, tmp_path / "given", "20KB")), CASES[name].batches()[0]
    plain = plain_class.from_pretrained(tmp_path / "given", dtype=dtype)
    model = from_meta(name, dtype)
    report = chunkc.load_pretrained(model, tmp_path / "given", strict=True)
    assert not (report.missing_keys or report.unexpected_keys or report.initialised_keys)
    assert set(report.tied_keys) == set(plain.state_dict()) - set(report.loaded_keys)
    assert_same(model.state_dict(), plain.state_dict())
    assert torch.equal(logits(model, batch), logits(plain, batch))
    optimizer = chunkc.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        loss_of(model(**batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = logits(model, batch)
    assert not torch.equal(trained, logits(plain, batch))
    chunkc.save_safetensors(model, tmp_path / "saved", max_shard_size="40KB")
    model.config.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(plain_class.from_pretrained(tmp_path / "saved", dtype=dtype), batch), trained)
    before = plain_class.from_pretrained(tmp_path / "given", dtype=dtype)
    assert_same(plain.state_dict(), before.state_dict())


@pytest.mark.parametrize("stored", (torch.float16, torch.bfloat16, torch.float64))
@pytest.mark.parametrize("handed", DTYPES)
def test_dtypes_are_converted_on_the_way(stored: torch.dtype, handed: torch.dtype, tmp_path: Path) -> None:
    plain = CASES["llama"].build().to(stored)
    save_file(plain.state_dict(), tmp_path / "weights.safetensors")
    model = from_meta("llama", handed, torch.bfloat16)
    chunkc.load_pretrained(model, tmp_path / "weights.safetensors")
    assert_same(model.state_dict(), {name: value.to(handed) for name, value in plain.state_dict().items()})


@pytest.mark.parametrize("phase", PHASES)
def test_loading_between_steps_changes_parameters_and_nothing_else(phase: str, tmp_path: Path) -> None:
    """Master and payload take the values, moments and step counts go on: as ``load_state_dict`` of the plain twin."""
    twins, source = twins_at(phase), Small().state_dict()
    save_file(source, tmp_path / "model.safetensors")
    chunkc.load_pretrained(twins.model, tmp_path, strict=True)
    twins.plain.load_state_dict(source)
    twins.check_params()
    assert_same(twins.model.state_dict(), source)
    twins.check_training()


@pytest.mark.parametrize("num_steps", (0, 3))
def test_the_master_of_a_model_in_mixed_precision_is_the_loaded_value(num_steps: int, tmp_path: Path) -> None:
    """Also where the file is in 16 bits and the old master rounds to the same value; the next step starts from it."""
    plain = Small()
    source = {name: value.bfloat16() for name, value in plain.state_dict().items()}
    save_file(source, tmp_path / "model.safetensors")
    model, x = chunkc.compile(copy.deepcopy(plain), HW, dtype=torch.bfloat16, backend="eager"), torch.ones(4, 8)
    optimizer = chunkc.AdamW(model.parameters(), **OPTIONS | {"lr": 0.0})
    for _ in range(num_steps):
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    moments = [state["exp_avg"] for state in optimizer.state_dict()["state"].values()]
    chunkc.load_pretrained(model, tmp_path)
    assert_same(model.state_dict(), {name: value.float() for name, value in source.items()})
    for before, after in zip(moments, optimizer.state_dict()["state"].values(), strict=True):
        assert torch.equal(before, after["exp_avg"]) and bool(before.any())
    for param in model.second.parameters():
        assert torch.equal(param.detach().clone(), source[f"second.{'weight' if param.dim() == 2 else 'bias'}"])
    model(x).backward()
    assert bool(model.second.weight.grad.any())


def test_names_that_do_not_match_are_reported_and_a_new_head_is_initialised_as_transformers_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A masked language model into a classifier: the base through its prefix, the head from the same random numbers."""
    base = saved("bert", tmp_path).config
    kind = transformers.BertForSequenceClassification
    torch.manual_seed(11)
    plain, info = kind.from_pretrained(tmp_path, num_labels=3, output_loading_info=True)
    with torch.device("meta"):
        model = kind(transformers.BertConfig.from_dict({**base.to_dict(), "num_labels": 3}))
    chunkc.compile(model, HW, dtype=torch.float32, backend="eager")
    torch.manual_seed(11)
    with caplog.at_level(logging.INFO, "chunkc"):
        report = chunkc.load_pretrained(model, tmp_path)
    assert_same(model.state_dict(), plain.state_dict())
    assert set(report.missing_keys) == info["missing_keys"] == set(report.initialised_keys)
    assert set(report.unexpected_keys) == info["unexpected_keys"]
    assert "missing bert.pooler" in caplog.text and "unexpected cls.predictions" in caplog.text
    with pytest.raises(ChunkcError, match=r"do not have the same names: missing .*classifier\.weight.*unexpected cls"):
        chunkc.load_pretrained(model, tmp_path, strict=True)


def test_a_base_models_file_loads_into_the_model_with_a_head_and_back(tmp_path: Path) -> None:
    plain = CASES["gpt2"].build()
    plain.transformer.save_pretrained(tmp_path / "base")
    plain.save_pretrained(tmp_path / "head")
    model = from_meta("gpt2")
    chunkc.load_pretrained(model, tmp_path / "base", strict=True)
    assert_same(model.state_dict(), plain.state_dict())
    with torch.device("meta"):
        base = transformers.GPT2Model(plain.config)
    chunkc.compile(base, HW, dtype=torch.float32, backend="eager")
    chunkc.load_pretrained(base, tmp_path / "head", strict=True)
    assert_same(base.state_dict(), plain.transformer.state_dict())


def test_values_that_are_there_stay_where_the_file_has_none_and_unknown_ones_stay_unknown(tmp_path: Path) -> None:
    source = Small().state_dict()
    save_file({n: v for n, v in source.items() if n != "scale"}, tmp_path / "model.safetensors")
    model = chunkc.compile(Small(), HW, dtype=torch.float32, backend="eager")
    scale = model.scale.detach().clone()
    report = chunkc.load_pretrained(model, tmp_path)
    assert report.missing_keys == ("scale",) and report.initialised_keys == ()
    assert_same(model.state_dict(), {**source, "scale": scale})
    with torch.device("meta"):
        model = Small()
    model.offset = torch.zeros(4)
    chunkc.compile(model, HW, dtype=torch.float32, backend="eager")
    chunkc.load_pretrained(model, tmp_path)
    with pytest.raises(ChunkcError, match=r"^scale came on the meta device.*load_pretrained"):
        model(torch.ones(4, 8))
    model.scale.data.fill_(1.0)
    model(torch.ones(4, 8)).backward()


Damage = Callable[[Path], object]


def rewritten(**changes: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    def damage(folder: Path) -> None:
        path = sorted(folder.glob("*.safetensors"))[-1]
        tensors = load_file(path)
        name = next(iter(tensors))
        for change in changes.values():
            tensors[name] = change(tensors[name]).contiguous()
        save_file(tensors, path)

    return damage


def cut_off(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:-7])


def lost(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[-1].unlink()


def swapped(folder: Path) -> None:
    first, *_, last = sorted(folder.glob("*.safetensors"))
    last.write_bytes(first.read_bytes())


def pickled(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80")


def outside(folder: Path) -> None:
    shutil.copy(min(folder.glob("*.safetensors")), folder.parent / "other.safetensors")
    _point_to(folder, "../other.safetensors")


def _point_to(folder: Path, file: str) -> None:
    index = folder / INDEX
    found = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": dict.fromkeys(found["weight_map"], file)}))


FAULTS: dict[str, tuple[Damage, str]] = {
    "shape": (rewritten(change=lambda t: t[..., :-1]), r"has shape .* where the model has .*configuration"),
    "quantised": (rewritten(change=lambda t: t.to(torch.int8)), r"is I8, which does not convert .*not quantised"),
    "float8": (rewritten(change=lambda t: t.to(torch.float8_e4m3fn)), r"is F8_E4M3, which does not convert"),
    "cut off": (cut_off, r"-of-\d+\.safetensors is no whole safetensors file"),
    "lost shard": (lost, r"names .*safetensors, which is missing"),
    "foreign": (
        lambda f: max(f.glob("*.safetensors")).write_bytes(b"<html>not found</html>"),
        r"is no whole safetensors file",
    ),
    "swapped": (swapped, r"stands both in"),
    "no index": (
        lambda f: (f / INDEX).write_text('{"weight_map": [1, 2]}'),
        r"index\.json is no index of safetensors shards",
    ),
    "pickled": (pickled, r"pytorch_model\.bin, which is pickled.*save_pretrained"),
    "outside": (outside, r"names '\.\./other\.safetensors', which is outside of its folder"),
    "absolute": (
        lambda f: _point_to(f, str(min(f.glob("*.safetensors")))),
        r"names '/.*', which is outside of its folder",
    ),
    "unindexed": (
        lambda f: (f / INDEX).unlink(),
        r"holds \d+ safetensors files and no model\.safetensors\.index\.json",
    ),
    "emptied": (lambda f: [path.unlink() for path in f.iterdir()], r"holds neither"),
}


@pytest.fixture(scope="module")
def half_step(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    folder = tmp_path_factory.mktemp("llama")
    model = chunkc.compile(saved("llama", folder, "20KB"), HW, dtype=torch.float32, backend="eager")
    with torch.no_grad():
        model.lm_head.weight.fill_(0.5)
    loss_of(model(**CASES["llama"].batches()[0])).backward()
    assert len(list(folder.glob("*.safetensors"))) > 2
    return model, folder


@pytest.mark.long(but="cut off")
@pytest.mark.parametrize("fault", FAULTS)
def test_files_that_do_not_fit_are_refused_before_anything_changes(
    fault: str, half_step: tuple[nn.Module, Path], tmp_path: Path
) -> None:
    model, given = half_step
    folder = shutil.copytree(given, tmp_path / "damaged")
    before, gradient = model.state_dict(), model.lm_head.weight.grad.clone()
    damage, message = FAULTS[fault]
    damage(folder)
    with pytest.raises(ChunkcError, match=message):
        chunkc.load_pretrained(model, folder)
    assert_same(model.state_dict(), before)
    assert torch.equal(model.lm_head.weight.grad, gradient)


def test_the_same_files_undamaged_load(half_step: tuple[nn.Module, Path]) -> None:
    """Or the faults above would show nothing."""
    model, given = half_step
    before = model.state_dict()
    chunkc.load_pretrained(model, given, strict=True)
    assert not torch.equal(model.state_dict()["lm_head.weight"], before["lm_head.weight"])


def test_a_path_that_is_not_there_says_what_to_give() -> None:
    model = chunkc.compile(Small(), HW, backend="eager")
    with pytest.raises(ChunkcError, match=r"no file or folder nobody/nothing.*snapshot_download"):
        chunkc.load_pretrained(model, "nobody/nothing")
    with pytest.raises(ChunkcError, match=r"call chunkc\.compile first"):
        chunkc.load_pretrained(Small(), "nobody/nothing")


def test_tied_parameters_take_either_name_and_refuse_two_values(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        model[1].weight = model[0].weight
        return chunkc.compile(model, HW, dtype=torch.float32, backend="eager")

    value, model = torch.randn(8, 8), build()
    save_file({"1.weight": value}, tmp_path / "model.safetensors")
    report = chunkc.load_pretrained(model, tmp_path, strict=True)
    assert report.loaded_keys == ("0.weight",) and report.tied_keys == {"1.weight": "0.weight"}
    assert torch.equal(model[0].weight.detach().clone(), value)
    save_file({"0.weight": value, "1.weight": value.clone()}, tmp_path / "model.safetensors")
    chunkc.load_pretrained(model, tmp_path, strict=True)
    save_file({"0.weight": value, "1.weight": value + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ChunkcError, match=r"0\.weight and 1\.weight are one parameter .* different values.*Untie"):
        chunkc.load_pretrained(model, tmp_path)
    assert torch.equal(model[1].weight.detach().clone(), value)


def test_the_program_of_the_documentation_runs(tmp_path: Path) -> None:
    """docs/weights.md: from a folder to a compiled model, and from that to another folder."""
    plain, text = saved("llama", tmp_path / "given"), (ROOT / "docs" / "weights.md").read_text()
    load, save, _ = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert '"v100-240g"' in load
    names = {"transformers": transformers, "torch": torch, "chunkc": chunkc, "folder": tmp_path / "given"}
    exec(load.replace('"v100-240g"', f'{HW!r}, backend="eager"'), names)
    names["folder"] = tmp_path / "saved"
    exec(save, names)
    assert_same(type(plain).from_pretrained(tmp_path / "saved").state_dict(), plain.state_dict())
