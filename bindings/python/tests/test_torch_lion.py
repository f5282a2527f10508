"""Lion for PyTorch, against the paper's formulas."""

import pytest
from ranks import thread_ranks

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")

import sotto.torch as st  # noqa: E402

LR, BETA1, BETA2, DECAY = 0.01, 0.9, 0.99, 0.1
START = torch.linspace(-1, 1, 300).reshape(20, 15)


def gradient(p, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return 0.1 * p.detach() + torch.randn(p.shape, generator=generator)


def test_lion_does_what_the_paper_says():
    def body(comm):
        p = torch.nn.Parameter(START.clone())
        optimizer = st.Lion([p], lr=LR, betas=(BETA1, BETA2), weight_decay=DECAY, comm=comm)
        want, m = START.clone(), torch.zeros_like(START)
        for step in range(6):
            mean = sum(gradient(want, rank, step) for rank in range(2)) / 2
            p.grad = gradient(p, comm.rank, step)
            optimizer.step()
            c = BETA1 * m + (1 - BETA1) * mean
            want.mul_(1 - LR * DECAY).sub_(LR * c.sign())
            m.mul_(BETA2).add_(mean, alpha=1 - BETA2)
            torch.testing.assert_close(p.detach(), want, atol=1e-6, rtol=0)
        optimizer.close()

    thread_ranks(2, body)


def test_lion_takes_other_numbers_for_a_group():
    def body(comm):
        groups = [
            {"params": [torch.nn.Parameter(START.clone())]},
            {"params": [torch.nn.Parameter(START.clone())], "lr": 0.5 * LR, "betas": (0.5, 0.6)},
        ]
        optimizer = st.Lion(groups, lr=LR, betas=(BETA1, BETA2), comm=comm)
        for group in groups:
            group["params"][0].grad = torch.ones_like(START)
        optimizer.step()
        for group, lr in zip(groups, (LR, 0.5 * LR)):
            torch.testing.assert_close(group["params"][0].detach(), START - lr)
        assert optimizer.report("groups")["groups"][1]["betas"] == pytest.approx([0.5, 0.6])
        optimizer.close()

    thread_ranks(1, body)
