"""Checkpoints that transformers converts: experts one by one on disk and fused in the model, and names that changed."""

from pathlib import Path

import pytest
import torch
from models import CASES
from pretrained import HW, assert_same, from_meta, logits, saved
from safetensors.torch import load_file, save_file

import chunkc
from chunkc import ChunkcError


def test_experts_are_fused_as_transformers_does_and_saves_of_either_kind_load(tmp_path: Path) -> None:
    plain, batch = saved("mixtral", tmp_path / "given", "20KB"), CASES["mixtral"].batches()[0]
    stored = {name for path in (tmp_path / "given").glob("*.safetensors") for name in load_file(path)}
    assert any(".experts.1.w1." in name for name in stored), "transformers saves them one by one"
    model = from_meta("mixtral")
    report = chunkc.load_pretrained(model, tmp_path / "given", strict=True)
    assert "model.layers.0.mlp.experts.gate_up_proj" in report.loaded_keys
    assert_same(model.state_dict(), plain.state_dict())
    assert torch.equal(logits(model, batch), logits(plain, batch))
    chunkc.save_safetensors(model, tmp_path / "fused")
    model.save_pretrained(tmp_path / "single")
    model.config.save_pretrained(tmp_path / "fused")
    for kind in ("fused", "single"):
        assert_same(type(plain).from_pretrained(tmp_path / kind).state_dict(), plain.state_dict())
        other = from_meta("mixtral")
        chunkc.load_pretrained(other, tmp_path / kind, strict=True)
        assert_same(other.state_dict(), plain.state_dict())


@pytest.mark.parametrize("part", ("experts.3.w1", "experts.2.w2", "experts.0.w3"))
def test_a_lost_expert_is_refused_before_anything_changes(part: str, tmp_path: Path) -> None:
    saved("mixtral", tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({name: value for name, value in load_file(path).items() if part not in name}, path)
    model = chunkc.compile(CASES["mixtral"].build(), HW, dtype=torch.float32, backend="eager")
    with torch.no_grad():
        model.lm_head.weight.fill_(0.5)
    before = model.state_dict()
    with pytest.raises(ChunkcError, match=r"does not fit the model: model\.layers\.0\.mlp\.experts\."):
        chunkc.load_pretrained(model, path)
    assert_same(model.state_dict(), before)


def test_old_names_of_norms_are_known(tmp_path: Path) -> None:
    plain = saved("bert", tmp_path)
    path = tmp_path / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = load_file(path)
    for new, name in old.items():
        tensors = {key.replace(new, name): value for key, value in tensors.items()}
    assert any("gamma" in name for name in tensors)
    save_file(tensors, path)
    model = from_meta("bert")
    chunkc.load_pretrained(model, tmp_path, strict=True)
    assert_same(model.state_dict(), plain.state_dict())
