"""PatrickStar's packing: modules whole, in order, dealt out to ranks."""

from schedules import chain, param

from chunkc.baselines import Course
from chunkc.baselines.packing import pack, packings


def course(*numels: tuple[str, int]) -> Course:
    found = chain(1)
    return Course(type(found)(tuple(param(n, k) for n, k in numels), found.forward, found.backward), ())


MODULES = (("a.weight", 40), ("a.bias", 8), ("b.weight", 40), ("b.bias", 8), ("c.weight", 20))


def test_a_module_is_never_divided() -> None:
    found = pack(course(*MODULES), 64)
    assert found is not None
    assert found.chunk_of == (0, 0, 1, 1, 2)
    assert found.used == (48, 48, 20)
    assert found.utilisation == 116 / 192


def test_a_module_larger_than_a_chunk_has_no_packing() -> None:
    assert pack(course(*MODULES), 47) is None


def test_the_last_group_is_filled_up_and_does_not_count_as_waste() -> None:
    found = pack(course(*MODULES), 64, ranks=2)
    assert found is not None
    assert found.used == (48, 48, 20, 0)
    assert (found.num_groups, found.utilisation) == (2, 116 / 192)
    assert [found.used_by_most(g) for g in (0, 1)] == [48, 20]
    assert found.groups_of((0, 1, 2, 4)) == (0, 1)


def test_the_least_total_comes_first() -> None:
    found = packings(course(*MODULES), (47, 48, 64, 68, 96, 116), 1)
    assert [(p.chunk_numel, len(p.used)) for p in found] == [(116, 1), (68, 2), (48, 3), (64, 3), (96, 2)]
