"""Cases 7, 17, 18 and 19 on a GPU: parameters met by anything else, evaluation, interruptions, exact or refused."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from evaluating import Tower, tokens, twins
from machines import Machine
from models import CASES
from small import OPTIONS, PHASES, TOLERANCE, Twins, twins_at
from torch import nn

import chunkc

pytestmark = pytest.mark.gpu
KIB, MIB = 1 << 10, 1 << 20


def met(phase: str, machine: Machine, dtype: torch.dtype = torch.float32) -> Twins:
    return twins_at(phase, dtype, machine.hw(96 * KIB, 64 * MIB), machine)


def weights(pair: Twins) -> tuple[nn.Parameter, nn.Parameter]:
    return pair.model.get_parameter("second.weight"), pair.plain.get_parameter("second.weight")


def close(found: Any, wanted: Any) -> None:
    """Within rounding: sums of many elements are large, hence the four units in the last place."""
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=5e-7)


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "clone": lambda p: p.detach().clone(),
    "arithmetic": lambda p: (p * 2 + 1).sum(0).detach(),
    "data": lambda p: p.data + 0,
    "index": lambda p: p[3].detach() + 0,
    "transpose": lambda p: p.t().reshape(-1)[5:40].detach() + 0,
    "host": lambda p: p.detach().cpu(),
    "numpy": lambda p: torch.from_numpy(p.detach().cpu().numpy().copy()),
    "tolist": lambda p: torch.tensor(p.tolist()),
    "item": lambda p: torch.tensor(p[0, 0].item()),
    "norm": lambda p: torch.linalg.vector_norm(p.detach()),
    "matmul": lambda p: (p @ p.t()).detach(),
    "save": lambda p: saved(p).detach().cpu(),
    "deepcopy": lambda p: copy.deepcopy(p).detach().cpu(),
}
"""``save`` and ``deepcopy`` give copies in host memory."""


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("phase", PHASES)
def test_reading_gives_the_true_value(phase: str, machine: Machine) -> None:
    pair = met(phase, machine)
    for read in READS.values():
        close(*(read(p) for p in weights(pair)))
    p, q = weights(pair)
    for fact in ("shape", "dtype", "device", "is_cuda", "requires_grad", "is_leaf"):
        assert getattr(p, fact) == getattr(q, fact), fact
    for ask in (lambda: p.data_ptr(), lambda: p.untyped_storage(), lambda: p.detach().share_memory_()):
        with pytest.raises(chunkc.ChunkcError, match=r"second\.weight.*no memory of its own"):
            ask()
    pair.check_params()
    pair.check_training()


@pytest.mark.parametrize("phase", PHASES)
def test_state_dicts_and_copies_are_real(phase: str, machine: Machine) -> None:
    """In host memory, whole, and loaded into a plain model on the device."""
    pair = met(phase, machine)
    state = pair.model.state_dict()
    assert list(state) == list(pair.plain.state_dict()) and {type(v) for v in state.values()} == {torch.Tensor}
    for key, value in pair.plain.state_dict().items():
        close(state[key].cpu(), value.cpu())
    other = copy.deepcopy(pair.model).to(machine.torch_device)
    assert {type(p) for p in other.parameters()} == {nn.Parameter}
    close(other(pair.x).detach(), pair.plain(pair.x).detach())
    other.load_state_dict(state)
    close(other(pair.x).detach(), pair.plain(pair.x).detach())
    pair.check_training()


def test_gradients_are_true(machine: Machine) -> None:
    pair = met("graded", machine)
    pair.check_gradients()
    p, q = weights(pair)
    assert p.grad is not None and q.grad is not None and p.grad.device == q.grad.device
    norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 1e-3) for m in (pair.model, pair.plain)]
    close(norms[0].cpu(), norms[1].cpu())
    pair.check_gradients()
    pair.check_training()


def test_foreign_optimizers_step_true_values(machine: Machine) -> None:
    pair = met("graded", machine)
    for model, _ in pair.sides():
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
        model.zero_grad()
    pair.check_params()


@pytest.mark.parametrize("phase", PHASES)
def test_writes_last(phase: str, machine: Machine) -> None:
    pair = met(phase, machine)
    pair.model.zero_grad(), pair.plain.zero_grad()
    with torch.no_grad():
        for p in weights(pair):
            p.mul_(1.5)
            p.add_(torch.ones(16, device=machine.torch_device))
            p.copy_(p.detach().cpu() * 0.5)
    for model in (pair.plain, None):
        if model is None:
            with chunkc.full_params(pair.model) as opened, torch.no_grad():
                opened.first.weight.mul_(0.5)
        else:
            with torch.no_grad():
                model.first.weight.mul_(0.5)
    pair.check_params()
    pair.check_training()


def test_backward_without_a_step_and_a_step_that_is_skipped(machine: Machine) -> None:
    pair = met("graded", machine)
    for model, _ in pair.sides():
        model.zero_grad()
    pair.check_training()
    for model, _ in pair.sides():
        model(pair.x)  # a forward whose backward never comes
    pair.check_training()


def test_optimizer_states_are_torchs(machine: Machine) -> None:
    """Moments in host memory; saved there, loaded here, and the next steps are the same."""
    pair = met("settled", machine)
    found, wanted = pair.optimizer.state_dict(), pair.plain_optimizer.state_dict()
    for key, state in wanted["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            close(found["state"][key][name].cpu(), state[name].cpu())
    other = chunkc.AdamW(pair.model.parameters(), **OPTIONS)
    other.load_state_dict(found)
    pair.optimizer = other
    pair.check_training()


@pytest.mark.parametrize("hw_nbytes", [204 * KIB, 64 * MIB], ids=["tight", "roomy"])
def test_evaluation_between_steps(hw_nbytes: int, machine: Machine) -> None:
    """Losses and logits of the plain model, in ``eval()`` and in ``train()`` with its batch norm; training goes on."""
    pair = twins(machine.hw(hw_nbytes, 16 * MIB), machine=machine)
    for is_training in (False, True):
        pair.model.train(is_training), pair.plain.train(is_training)
        for seed in (50, 51):
            pair.evaluate(tokens(seed))
    pair.model.train(), pair.plain.train()
    pair.train(2, 3)
    pair.check()
    pair.train(4, length=5)
    pair.evaluate(tokens(52, length=5))
    pair.check()


class Breaking(Tower):
    def forward(self, tokens: torch.Tensor, extra: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.embed(tokens)
        hidden = hidden + self.layers[0](hidden)
        hidden = hidden / max(1.0, abs(hidden.mean().item()))
        hidden = hidden + self.layers[1](hidden)
        hidden = self.norm(hidden.flatten(0, 1)).unflatten(0, tokens.shape)
        logits = self.head(hidden)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()), logits


def test_breaks_and_many_lengths(machine: Machine) -> None:
    """Graphs on both sides of a break, planned from the second iteration on; then a shape a step."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        pair = twins(machine.hw(400 * KIB, 16 * MIB), plain=Breaking(), machine=machine)
    pair.train(2, 3)
    pair.check()
    assert chunkc.stats(pair.model)["h2d_nbytes"] > 0
    pair = twins(machine.hw(400 * KIB, 16 * MIB), machine=machine)
    for length in range(9, 2, -1):  # the largest lays out the arena
        pair.train(length, length=length)
        pair.check()


def test_generation_gives_the_plain_models_tokens(machine: Machine) -> None:
    case = CASES["llama"]
    plain, batch = case.build(), machine.put(case.batches()[0])
    model = chunkc.compile(copy.deepcopy(plain), machine.hw(MIB, 64 * MIB), dtype=torch.float32, backend="eager")
    plain = plain.to(machine.torch_device)
    prompt, found = batch["input_ids"][:, :4], []
    for one, kind in ((model, chunkc.AdamW), (plain, torch.optim.AdamW)):
        optimizer = kind(one.parameters(), **OPTIONS)
        one(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        one.eval()
        how = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}
        mask = torch.ones_like(prompt)
        found.append([one.generate(prompt, attention_mask=mask, use_cache=c, **how) for c in (True, False)])
    assert all(map(torch.equal, *found)) and found[0][0].shape == (2, 10)
