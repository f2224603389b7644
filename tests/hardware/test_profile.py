"""Profiles from strangers: every fault of a file is one HardwareError, and with what loads plans can be simulated."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from costs import calibration, with_work
from mutations import check_mutations, num_mutations
from plans import SPECS

from chunkc.cost import simulate
from chunkc.errors import HardwareError
from chunkc.hardware import Hardware

MACHINES = {
    "catalogue": Hardware.parse("superpod"),
    "calibrated": replace(Hardware.parse("emulated-64m-2g"), rates=calibration({})),
    "both": replace(Hardware.parse("2x8xa100-240g"), rates=calibration({})),
}


@pytest.mark.parametrize("what", MACHINES)
def test_mutations_are_refused_or_load_as_a_machine(what: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    data = json.dumps(MACHINES[what].profile()).encode()
    plans = [with_work(SPECS[name].build(), 3) for name in ("evicting", "distributed")]

    def use(path: Path) -> None:
        hw = Hardware.load(path)
        assert str(hw) and hw.num_ranks() >= 1 and hw.host_nbytes_per_rank >= 0
        for plan in plans:
            try:
                simulate(plan, hw)
            except HardwareError as error:
                assert str(error)

    each = -(-num_mutations(pytestconfig) // len(MACHINES))
    refused, loaded = check_mutations(data, tmp_path / "machine.json", use, range(each), HardwareError)
    print(f"profiles, {what}: {refused} refused, {loaded} loaded")
    assert refused > loaded > 0


TEXTS = {
    "deep": ("[" * 10**6, "nested more than 64 deep"),
    "twice": ('{"format": "chunkc-hardware", "format": "chunkc-hardware"}', "the key 'format' stands twice"),
    "digits": (
        '{"format": "chunkc-hardware", "version": 2, "num_nodes": ' + "9" * 5000 + "}",
        "holds no JSON: Exceeds",
    ),
}


@pytest.mark.parametrize("what", TEXTS)
def test_text_that_only_a_parser_reads_is_refused(what: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(TEXTS[what][0], encoding="utf-8")
    with pytest.raises(HardwareError, match=TEXTS[what][1]):
        Hardware.load(path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(HardwareError, match=r"machine\.json': byte 0 is no UTF-8 text"):
        Hardware.load(path)
