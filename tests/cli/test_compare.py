"""``chunkc compare``: chunkc's plan beside modelled systems, as a table and as one object."""

import json
from pathlib import Path

import pytest
from tiny_transformers import TINY_GPT

from chunkc.baselines import POLICIES
from chunkc.cli import main


@pytest.mark.long
def test_all_policies_stand_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    config = json.dumps({**TINY_GPT.config, "architectures": ["GPT2LMHeadModel"]})
    (tmp_path / "tiny" / "config.json").write_text(config)
    command = ["compare", "tiny/config.json", "--hw", "v100-240g", "--batch", "4", "--activations", "recompute"]
    assert main([*command, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    rows = {row["policy"]: row for row in data["policies"]}
    assert list(rows) == ["chunkc", *POLICIES]
    assert [name for name, row in rows.items() if not row["modelled"]] == ["chunkc"]
    for row in rows.values():
        assert (row["hw"], row["recompute"]) == ("v100-32g-240g", "full")
        assert row["fits"] and row["step_ms"] > 0 and row["tokens_per_s"] == pytest.approx(64e3 / row["step_ms"])
    assert main(command) == 0
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= 80
    assert "systems other than chunkc are modelled" in " ".join(told.split())
    assert all(name in told for name in rows)


@pytest.mark.long
def test_what_does_not_fit_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    # 16 bytes a parameter are 17 GiB of host memory, 12 for the triples alone 12.4.
    assert main(["compare", "gpt-1b", "--hw", "v100-8g", "--batch", "1", "--activations", "recompute"]) in (0, 1)
    told = capsys.readouterr().out
    assert "zero-offload does not fit: host memory of a rank: 16.6 GiB needed, 4.0 GiB there" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["train:build"], "is a function"), (["gpt-1b", "--world-size", "3"], "compare takes all GPUs")],
)
def test_what_cannot_be_compared_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *arguments, "--hw", "8xv100-240g"]) == 2
    assert message in capsys.readouterr().err
