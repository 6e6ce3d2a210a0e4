"""No forward of a module runs while torch has another default precision: native code would write past the end of its tensors."""

from __future__ import annotations

import threading

import torch
from patience import PATIENCE

from outrider.models.hf import precision


def test_a_step_waits_while_the_precision_is_another_and_a_change_waits_for_steps() -> None:
    seen, inside, end = list[torch.dtype](), threading.Event(), threading.Event()

    def step(wait: bool) -> None:
        with precision.FORWARD:
            inside.set()
            if wait:
                end.wait(PATIENCE)
            seen.append(torch.get_default_dtype())

    running = threading.Thread(target=step, args=(True,))
    running.start()
    inside.wait(PATIENCE)
    with precision.making():
        threading.Timer(0.05, end.set).start()
        torch.set_default_dtype(torch.bfloat16)  # waits for the step
        assert seen == [torch.float32]
        late = threading.Thread(target=step, args=(False,))
        late.start()
        late.join(0.05)
        assert late.is_alive()
        torch.set_default_dtype(torch.float32)
        late.join(PATIENCE)
    assert seen == [torch.float32] * 2
    assert torch.empty(1).dtype == torch.float32
    with precision.making():
        torch.set_default_dtype(torch.float16)
    assert torch.get_default_dtype() == torch.float32  # also after an error inside
