"""The plain-torch head: its own unroll equals a fresh reading, and gradients reach every trained weight."""

import pytest
import torch
from heads import causal, small_config

from outrider.drafters.heads.config import default_taps
from outrider.drafters.heads.eagle.module import Eagle, EagleConfig

TARGET = small_config(96)
VARIANTS = {
    "eagle3": {},
    "eagle31": {"fc_norm": True, "norm_output": True},
    "before_fc": {"norm_before_fc": True},
    "before_residual": {"norm_before_residual": True},
    "eagle1": {"eagle1": True, "taps": (-1,)},
}


def make(name: str = "eagle3", **more: object) -> Eagle:
    torch.manual_seed(0)
    head = Eagle(EagleConfig.for_target(TARGET, **(VARIANTS[name] | more)))
    for p in head.parameters():
        p.data = torch.randn_like(p) * 0.2 if p.dim() == 2 else torch.rand_like(p) + 0.5
    return head


@pytest.mark.parametrize("name", VARIANTS)
def test_pairs_read_one_by_one_give_what_they_give_at_once(name: str) -> None:
    head = make(name)
    tokens, features = torch.randint(96, (2, 7)), torch.randn(2, 7, 32 * len(head.config.taps))
    whole, _ = causal(head, tokens, head.fuse(features))
    past = None
    for n in range(7):
        y, past = causal(head, tokens[:, n : n + 1], head.fuse(features[:, n : n + 1]), past)
        assert torch.allclose(y[:, 0], whole[:, n], atol=1e-5)
    assert head.logits(whole).shape == (2, 7, 96)


def test_a_uniform_shift_of_positions_changes_nothing() -> None:
    head = make()
    tokens, g = torch.randint(96, (1, 5)), torch.randn(1, 5, 32)
    assert torch.allclose(causal(head, tokens, g)[0], causal(head, tokens, g, first=17)[0], atol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_reach_all_but_the_embedding(name: str) -> None:
    head = make(name)
    y, past = causal(head, torch.randint(96, (1, 5)), head.fuse(torch.randn(1, 5, 32 * len(head.config.taps))))
    again, _ = causal(head, torch.randint(96, (1, 1)), head.feedback(y[:, -1:]), past)
    head.logits(again).logsumexp(-1).sum().backward()
    without = [n for n, p in head.named_parameters() if p.grad is None]
    assert without == ["embed_tokens.weight"]


def test_a_new_head_starts_as_fc_and_the_targets_output_head() -> None:
    config = EagleConfig.for_target(TARGET, draft_vocab_size=3)
    table = torch.randn(96, 32)
    head = Eagle(config, torch.tensor([2, 5, 90])).initialise_(table)
    g = head.fuse(torch.randn(1, 4, 96))
    y, _ = causal(head, torch.randint(96, (1, 4)), g)
    assert torch.equal(y, g)
    assert torch.equal(head.lm_head.weight, table[[2, 5, 90]])
    with pytest.raises(ValueError, match=r"output head is \(95, 32\)"):
        head.initialise_(table, table[1:])


def test_default_taps() -> None:
    assert default_taps(30) == (1, 14, 26)  # before layers 2, 15 and 27
    assert default_taps(6) == (0, 2, 4)
    assert all(len(set(default_taps(n))) == len(default_taps(n)) and max(default_taps(n)) < n for n in range(1, 40))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"norm_before_fc": True, "fc_norm": True}, "exclude|both true"),
        ({"taps": (1, 1)}, "different layers"),
        ({"num_key_value_heads": 3}, "cannot share"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0}}, "'dynamic'"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"no_such": 1}, "no field 'no_such'"),
    ],
)
def test_settings_that_no_head_has(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EagleConfig.for_target(TARGET, **settings)


def test_token_ids_are_ascending() -> None:
    config = EagleConfig.for_target(TARGET, draft_vocab_size=3)
    for ids in ([2, 1, 5], [1, 2], [1, 2, 96]):
        with pytest.raises(ValueError, match="ascending ids below 96"):
            Eagle(config, torch.tensor(ids))
