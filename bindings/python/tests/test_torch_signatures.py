"""What help() and editors show of the optimizers for PyTorch."""

import inspect

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")

import sotto.torch as st  # noqa: E402
from sotto.torch.shared import Shared  # noqa: E402

KINDS = [
    made
    for made in vars(st).values()
    if inspect.isclass(made)
    and issubclass(made, st.SottoOptimizer)
    and made is not st.SottoOptimizer
]


def test_all_kinds_are_looked_at():
    assert {kind.__name__ for kind in KINDS} >= {"Adam", "AdamW", "Lamb", "OnebitAdam"}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_shared_keywords_are_shown_with_their_defaults(kind):
    base = inspect.signature(st.SottoOptimizer).parameters
    shown = inspect.signature(kind).parameters
    assert not [p for p in shown.values() if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    keywords = {name: p for name, p in shown.items() if p.kind is p.KEYWORD_ONLY}
    assert keywords == {name: base[name] for name in Shared.__annotations__}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_unknown_keywords_are_refused(kind):
    with pytest.raises(TypeError, match="momentum_dampening"):
        kind([torch.zeros(3)], momentum_dampening=1)


def test_the_base_has_no_other_keywords():
    base = inspect.signature(st.SottoOptimizer).parameters.values()
    keywords = {p.name for p in base if p.kind is p.KEYWORD_ONLY}
    assert keywords - {"max_grad_norm"} == set(Shared.__annotations__)
