"""The built-in models have the parameters that the published tables give them."""

import pytest

from chunkc.errors import ChunkcError
from chunkc.scenarios.models import FAMILIES, NAMES, built_in, family

# nominal size -> parameters in units of 1e9 with three decimals: BERT-like, GPT-2-like
COUNTS = {
    "1b": (1.076, 1.112),
    "2b": (2.083, 2.119),
    "4b": (4.157, 4.197),
    "6b": (6.111, 6.162),
    "8b": (8.263, 8.314),
    "10b": (10.215, 10.279),
    "12b": (12.229, 12.293),
    "15b": (15.854, 15.918),
    "18b": (18.270, 18.334),
    "20b": (20.461, 20.555),
    "30b": (30.126, 30.220),
    "33b": (33.305, 33.389),
    "40b": (40.596, 40.691),
    "50b": (50.261, 50.356),
    "60b": (60.732, 60.826),
    "68b": (67.652, 67.749),
    "175b": (174.500, 174.592),
}
ROWS = [("gpt-0.7b", 0.759)]
ROWS += [(f"bert-{size}", bert) for size, (bert, _) in COUNTS.items()]
ROWS += [(f"gpt-{size}", gpt) for size, (_, gpt) in COUNTS.items()]


@pytest.mark.parametrize(("name", "billions"), ROWS)
def test_true_parameter_counts(name: str, billions: float) -> None:
    model = built_in(name).build()
    assert all(param.is_meta for param in model.parameters())
    assert round(sum(param.numel() for param in model.parameters()) / 1e9, 3) == billions


def test_names_and_families() -> None:
    assert {name for name, _ in ROWS} == set(NAMES) - {"bert-0.7b"}
    for name in FAMILIES:
        models = family(name)
        assert [model.label for model in models] == [found for found in NAMES if found.startswith(f"{name}-")]
        assert all(built_in(model.label.upper()) == model for model in models)


@pytest.mark.parametrize("name", ["gpt-11b", "gpt", "llama-10b", "bert-"])
def test_an_unknown_name_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(ChunkcError, match=r"gpt and bert, each with -0\.7b, 1b"):
        built_in(name)
