"""Which tokens are text."""

from typing import Any

import torch

from ppo.data.printable import PrintableIds, is_printable
from ppo.models.tiny import build_tiny_tokenizer


def test_control_characters_halves_and_private_ones_are_no_text():
    assert all(map(is_printable, "aZ9 \n\t.é字🙂\u00a0"))
    assert not any(map(is_printable, "\x00\x1b\x7f\ufffd\ue000\u200b\ud800"))


def test_ids_are_judged_by_their_text_and_ends_are_no_fault():
    tokenizer: Any = build_tiny_tokenizer()
    end, [letter] = tokenizer.eos_token_id, tokenizer.encode("a", add_special_tokens=False)
    others = [i for i in tokenizer.all_special_ids if i != end]
    [control] = tokenizer.encode("\x01", add_special_tokens=False)
    is_text = PrintableIds(tokenizer, [end])
    ids = torch.tensor([[letter, end], [control, others[0]]], dtype=torch.int32)
    assert is_text(ids).tolist() == [[True, True], [False, False]]
    assert is_text(ids[:0]).shape == (0, 2) and is_text(ids[0]).all()
