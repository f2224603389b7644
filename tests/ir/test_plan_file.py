"""Plans from strangers: every fault of a file is one PlanError with the place inside, and what loads is safe."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mutations import check_mutations, num_mutations
from plans import SPECS, evicting
from plans_for_report import gpt_plan

from chunkc.errors import ChunkcError, PlanError
from chunkc.ir.plan import Plan
from chunkc.ir.plan_file import load_plan
from chunkc.ir.verify import verify
from chunkc.report import Plan as ReadablePlan
from chunkc.report.timeline import simulate

Change = Callable[[dict[str, Any]], object]


def saved(data: object, path: Path) -> Path:
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return path


FAULTS: dict[str, tuple[Change, str]] = {
    "huge reach": (lambda d: d["layout"]["placements"][0].update(num_chunks=10**9),
     r"layout\.placements\[0\]\.num_chunks: must be from 1 to 3, found 1000000000"),
    "huge world": (lambda d: d["layout"].update(world_size=10**12), r"layout\.world_size: must be from 1 to"),
    "huge accumulation": (lambda d: d.update(accumulate=10**9),
     r"accumulate: must be from 1 to 4096, found 1000000000"),
    "huge number": (lambda d: d["layout"]["slots"][1].update(offset=10**400),
     r"layout\.slots\[1\]\.offset: must be a whole number from 0 to 2\*\*63 - 1, found 1000"),
    "negative": (lambda d: d["layout"]["slots"][1].update(offset=-1), r"layout\.slots\[1\]\.offset: .* found -1"),
    "text": (lambda d: d["layout"]["slots"][1].update(offset="0"), r"layout\.slots\[1\]\.offset: .* found '0'"),
    "bool": (lambda d: d["segments"][0].update(index=True), r"segments\[0\]\.index: .* found True"),
    "not finite": (lambda d: d.update(stages=[{"name": "x", "elapsed_ms": float("nan"), "note": ""}]),
     r"stages\[0\]\.elapsed_ms: must be a finite number, found nan"),
    "unknown field": (lambda d: d["memory"].update(colour=1), r"memory: fields missing or unknown: colour"),
    "missing field": (lambda d: d["programs"][2].pop("entry"), r"programs\[2\]: fields missing or unknown: entry"),
    "another word": (lambda d: d["layout"]["chunks"][0].update(home="disk"),
     r"layout\.chunks\[0\]\.home: must be one of device, host, found 'disk'"),
    "another dtype": (lambda d: d["layout"]["chunks"][0].update(dtype="int8"),
     r"layout\.chunks\[0\]\.dtype: must be one"),
    "states without dtypes": (lambda d: d["layout"]["state_spec"].update(dtypes=["float32"]),
     r"layout\.state_spec: at most 16 states have one dtype each, found 2 names and 1 dtypes"),
    "a state's dtype": (lambda d: d["layout"]["state_spec"].update(dtypes=["float32", "int8"]),
     r"layout\.state_spec\.dtypes\[1\]: must be one"),
    "a state twice": (lambda d: d["layout"]["state_spec"].update(names=["exp_avg", "exp_avg"]),
     r"layout\.state_spec\.names\[1\]: must be a name of its own, found 'exp_avg'"),
    "a chunk of broken blocks": (lambda d: d["layout"]["state_spec"].update(dtypes=["uint8", "uint8"]),
     r"layout\.chunks\[0\]\.numel: states are quantised in blocks of 256 elements"),
    "no name": (lambda d: d["layout"]["state_spec"].update(names=["exp_avg", "\x1b[31m"]),
     r"layout\.state_spec\.names\[1\]: must be a name of its own"),
    "no action": (lambda d: d["programs"][0]["actions"].__setitem__(1, "runs fwd.0 @compute"),
     r"programs\[0\]\.actions\[1\]: not an action: 'runs fwd\.0 @compute'"),
    "another digit": (lambda d: d["programs"][0]["actions"].__setitem__(0, "fetch c0 -> d٣ @h2d"),
     r"programs\[0\]\.actions\[0\]: not an action"),
    "a second spelling": (lambda d: d["programs"][0]["actions"].__setitem__(0, "fetch c00 -> d0 @h2d after s0"),
     r"programs\[0\]\.actions\[0\]: not an action"),
    "endless digits": (lambda d: d["programs"][0]["actions"].__setitem__(0, f"fetch c{'9' * 5000} -> d0 @h2d"),
     r"programs\[0\]\.actions\[0\]: not an action"),
    "no slot": (lambda d: d["programs"][0]["actions"].__setitem__(0, "fetch c0 -> d7 @h2d after s0"),
     r"programs\[0\]\.actions\[0\]: names slot 7, and the plan has 2"),
    "no parameter": (lambda d: d["segments"][1].update(reads=[9]),
     r"segments\[1\]\.reads\[0\]: names parameter 9, .* has 4"),
    "no chunk": (lambda d: d["programs"][0]["exit"].update(resident=[["c9", 0]]),
     r"programs\[0\]\.exit\.resident\[0\]: names chunk 9, and the plan has 3"),
    "no triple": (
     lambda d: (d["layout"]["chunks"][0].update(os_home=None), d["programs"][0]["entry"].update(resident=[["os0", 0]])),
     r"programs\[0\]\.entry\.resident\[0\]: c0 has no optimizer state"),
    "unsafe": (lambda d: d["programs"][0]["actions"].__setitem__(1, "run fwd.0 @compute"),
     r"plan that the verifier refuses: forward f1 `run fwd\.0 @compute`"),
}  # fmt: skip


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_is_named_with_its_place(what: str, tmp_path: Path) -> None:
    change, said = FAULTS[what]
    data = json.loads(json.dumps(evicting().build().to_json()))
    change(data)
    with pytest.raises(PlanError, match=said) as error:
        load_plan(saved(data, tmp_path / "plan.json"))
    assert "plan.json" in str(error.value)


TEXTS = {
    "deep": ("[" * 10**6, "nested more than 64 deep"),
    "deep objects": ('{"format_version":' * 10**5, "nested more than 64 deep"),
    "less deep": ("[" * 70 + "]" * 70, "nested more than 64 deep"),
    "twice": ('{"format_version": 5, "format_version": 5}', "the key 'format_version' stands twice"),
    "digits": ('{"format_version": ' + "9" * 10**5 + "}", "holds no JSON: Exceeds the limit"),
    "half a character": ('{"format_version": "\\ud800"}', "plan format '.ud800' is not supported"),
}


@pytest.mark.parametrize("what", TEXTS)
def test_text_that_only_a_parser_reads_is_refused(what: str, tmp_path: Path) -> None:
    text, said = TEXTS[what]
    with pytest.raises(PlanError, match=f"plan.json holds no plan that this release reads: .*{said}"):
        load_plan(saved(text, tmp_path / "plan.json"))


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b'{"model": "\xff"}')
    with pytest.raises(PlanError, match="byte 11 is no UTF-8 text"):
        load_plan(path)


def test_a_label_that_only_some_programs_of_a_role_have_is_refused(tmp_path: Path) -> None:
    """A wait means the latest run of any program of that role: all of them have the label, or none is meant."""
    data = json.loads(json.dumps(evicting().build().to_json()))
    by_role = {program["role"]: program for program in data["programs"]}
    passing = ["fetch c0 -> d1 @h2d", "drop c0 <- d1 @compute after t0"]
    by_role["resume"]["actions"] = [*passing, "fetch c1 -> d1 @h2d after t1", "fetch c2 -> d0 @h2d"]
    load_plan(saved(data, tmp_path / "plan.json"))
    by_role["backward"]["actions"][0] += " after t2"
    with pytest.raises(PlanError, match="it waits for t2, which does not exist"):
        load_plan(saved(data, tmp_path / "plan.json"))


def subjects() -> list[Plan]:
    return [*(spec.build() for spec in map(SPECS.__getitem__, SPECS)), gpt_plan(num_layers=2)]


def test_mutations_are_refused_or_load_as_a_safe_plan(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """What loads can be printed, summed up and simulated: none of that fails but by an error of ours."""
    plans = subjects()
    each = -(-num_mutations(pytestconfig) // len(plans))
    refused = loaded = 0
    for number, plan in enumerate(plans):
        seeds = range(number * each, (number + 1) * each)
        found = check_mutations(json.dumps(plan.to_json()).encode(), tmp_path / "plan.json", _use, seeds, PlanError)
        refused, loaded = refused + found[0], loaded + found[1]
    print(f"plans: {refused} refused, {loaded} loaded")
    assert refused > loaded > 0


def _use(path: Path) -> None:
    plan = ReadablePlan.load(path)
    verify(plan)
    assert str(plan) and plan.text() and plan.summary()
    try:
        simulate(plan)
    except ChunkcError:
        return  # of a machine whose rates are not known
