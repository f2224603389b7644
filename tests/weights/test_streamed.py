"""``save_pretrained`` of compiled models: file for file what transformers writes of the plain model."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from models import CASES, loss_of
from pretrained import HW, from_meta, saved
from torch import nn

import chunkc
from chunkc import ChunkcError
from chunkc.weights.streamed import StreamedTensor, streamed_state
from chunkc.weights.tensors import ModelTensors

COMPUTE = {"gpt2": torch.float32, "bert": torch.bfloat16, "mixtral": torch.bfloat16}


def compiled(name: str, plain: nn.Module) -> nn.Module:
    return chunkc.compile(copy.deepcopy(plain), HW, dtype=COMPUTE[name], backend="eager")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.long(but="mixtral")
@pytest.mark.parametrize("name", ["gpt2", pytest.param("bert", marks=pytest.mark.slow), "mixtral"])
def test_all_files_are_those_of_the_plain_model(name: str, tmp_path: Path) -> None:
    """Ties, shards, index, experts one by one, and a configuration with the dtype of the values."""
    plain = saved(name, tmp_path / "plain", "20KB")
    model = compiled(name, plain)
    model.save_pretrained(tmp_path / "staged", max_shard_size="20KB")
    assert files(tmp_path / "staged") == files(tmp_path / "plain")
    optimizer = chunkc.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for _ in range(2):
        loss_of(model(**CASES[name].batches()[0])).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(tmp_path / "trained", max_shard_size="20KB")
    assert files(tmp_path / "trained") == files(tmp_path / "plain")
    part = next(module for module in model.children() if hasattr(module, "save_pretrained"))
    part.save_pretrained(tmp_path / "part")
    dict(plain.named_children())[next(n for n, m in model.named_children() if m is part)].save_pretrained(
        tmp_path / "p"
    )
    assert files(tmp_path / "part") == files(tmp_path / "p")


def test_copies_and_given_states_are_saved_by_transformers_alone(tmp_path: Path) -> None:
    plain = saved("bert", tmp_path / "plain")
    model = compiled("bert", plain)
    for number, other in enumerate((copy.deepcopy(model), pickle.loads(pickle.dumps(model)))):
        other.save_pretrained(tmp_path / f"copy{number}")
        assert files(tmp_path / f"copy{number}") == files(tmp_path / "plain")
    zeros = {name: torch.zeros_like(value) for name, value in plain.state_dict().items()}
    model.save_pretrained(tmp_path / "given", state_dict=dict(zeros))
    plain.save_pretrained(tmp_path / "zeros", state_dict=dict(zeros))
    assert files(tmp_path / "given")["model.safetensors"] == files(tmp_path / "zeros")["model.safetensors"]


def test_what_cannot_be_saved_is_refused_before_weights_are_written(tmp_path: Path) -> None:
    model = from_meta("bert")
    with pytest.raises(ChunkcError, match=r"bert\.embeddings.* have no value to be saved"):
        model.save_pretrained(tmp_path)
    plain = saved("bert", tmp_path / "plain")
    with pytest.raises(ChunkcError, match=r"weights in torch\.float32 are in torch\.bfloat16.*model\.push_to_hub"):
        compiled("bert", plain).save_pretrained(tmp_path / "pushed", push_to_hub=True)
    assert not list(tmp_path.glob("*.safetensors")) and not (tmp_path / "pushed").exists()


def test_a_streamed_tensor_has_a_shape_without_a_value_and_gathers_for_everything_else() -> None:
    calls = []

    def gather() -> torch.Tensor:
        calls.append(1)
        return torch.arange(6.0).view(2, 3)

    tensor = StreamedTensor.of(gather, (2, 3), torch.float32)
    assert (tensor.shape, tensor.dtype, tensor.nbytes, tensor.numel()) == ((2, 3), torch.float32, 24, 6)
    assert tensor.device.type == "meta" and tensor.untyped_storage().nbytes() == 24 and len({tensor, tensor}) == 1
    assert not calls
    assert type(tensor.contiguous()) is torch.Tensor and torch.equal(tensor.contiguous(), gather())
    assert torch.equal(torch.cat([tensor, tensor])[2:], gather()) and torch.equal(tensor[1], gather()[1])
    assert tensor.tolist() == gather().tolist()


def test_a_state_is_streamed_under_one_name_for_tied_parameters() -> None:
    model = chunkc.compile(CASES["t5"].build(), HW, dtype=torch.float32, backend="eager")
    tensors = ModelTensors(model)
    state, whole = streamed_state(model, tensors, tensors.read), model.state_dict()
    assert set(whole) - set(state) == {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"}
    assert all(torch.equal(value.contiguous(), whole[name]) for name, value in state.items())
