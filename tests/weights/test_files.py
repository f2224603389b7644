"""Weights from strangers: whatever index and header say, the files are refused whole or loaded whole."""

from pathlib import Path

import pytest
import torch
from mutations import check_mutations, num_mutations
from pretrained import HW
from safetensors.torch import save_file
from small import Small

import chunkc
from chunkc import ChunkcError
from chunkc.weights.files import INDEX_NAME, WeightFiles


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "given"
    model = chunkc.compile(Small(), HW, dtype=torch.float32, backend="eager")
    written = chunkc.save_safetensors(model, folder, max_shard_size=200)
    assert len(written) > 2 and written[-1].name == INDEX_NAME
    return folder


def of_header(shard: bytes) -> tuple[bytes, bytes]:
    length = int.from_bytes(shard[:8], "little")
    return shard[8 : 8 + length], shard[8 + length :]


def bits(model: torch.nn.Module) -> dict[str, bytes]:
    """Every value of a model; mutated data may be NaN, which equals nothing."""
    return {name: value.numpy().tobytes() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("what", ("index", "header", "shard"))
def test_mutations_are_refused_whole_or_loaded_whole(
    what: str, folder: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    model = chunkc.compile(Small(), HW, dtype=torch.float32, backend="eager")
    target = folder / INDEX_NAME if what == "index" else sorted(folder.glob("*.safetensors"))[0]
    data = target.read_bytes()
    header, rest = of_header(data) if what == "header" else (data, b"")
    before = bits(model)

    def use(mutated: Path) -> None:
        changed = mutated.read_bytes()
        target.write_bytes(len(changed).to_bytes(8, "little") + changed + rest if what == "header" else changed)
        try:
            chunkc.load_pretrained(model, folder)
        except ChunkcError as error:
            assert bits(model) == before
            assert str(folder) in str(error)
            raise ChunkcError(f"{mutated.name}: {error}") from error
        before.update(bits(model))

    count = -(-num_mutations(pytestconfig) // 3)
    refused, loaded = check_mutations(header, tmp_path / "mutated", use, range(count), ChunkcError)
    print(f"weights, {what}: {refused} refused, {loaded} loaded")
    assert refused > 0 and loaded > 0


INDEXES = {
    "deep": ("[" * 10**5, "nested more than 64 deep"),
    "no text": (b"\xff", "byte 0 is no UTF-8 text"),
    "twice": ('{"weight_map": {"a": "x", "a": "y"}}', "the key 'a' stands twice"),
    "number": ('{"weight_map": {"a": 3}}', r"weight_map\.a: must be a text, found 3"),
    "list": ('{"weight_map": []}', r"weight_map: must be an object, found \[\]"),
    "nul": ('{"weight_map": {"a": "x\\u0000.safetensors"}}', "which is missing"),
    "long": ('{"weight_map": {"a": "' + "x" * 5000 + '"}}', "which is missing"),
}


@pytest.mark.parametrize("what", INDEXES)
def test_an_index_that_is_none_is_refused_with_its_place(what: str, tmp_path: Path) -> None:
    content, said = INDEXES[what]
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    (tmp_path / INDEX_NAME).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ChunkcError, match=said):
        WeightFiles(tmp_path / INDEX_NAME)
