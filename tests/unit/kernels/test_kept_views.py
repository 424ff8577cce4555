"""Views that stay with a buffer: each layout has its own, they show the buffer's memory, and who counts users
can leave them out.
"""

from __future__ import annotations

import torch

from rannc_backend.kernels.kept_views import KeptViews, new_message
from rannc_backend.kernels.message_layout import plan_message
from rannc_backend.kernels.plain_memory import all_plain, has_plain_memory
from rannc_backend.runtime.comm.receive_buffers import ReceiveBuffers
from rannc_backend.runtime.torch_internals import num_storage_users
from tests.benchmarks.host_cost import EmptyLayer

SEVERAL = plan_message([(4, 2, 3), (4, 5), (4,)], [torch.float32, torch.int64, torch.bool])
OTHERS = plan_message([(3, 2, 3), (3, 5), (3,)], [torch.float32, torch.int64, torch.bool])
ALONE = plan_message([(4, 2, 3)], [torch.float32])


def test_a_layout_has_its_own_views() -> None:
    memory = torch.arange(1024).remainder(251).to(torch.uint8)
    kept = KeptViews(memory)
    for layout in (SEVERAL, OTHERS, ALONE) * 2:
        message, views = kept.message(layout)
        assert [tuple(view.shape) for view in views] == list(layout.shapes) and [
            view.dtype for view in views
        ] == list(layout.dtypes)
        wanted = [layout.view(memory[: layout.num_bytes], index) for index in range(len(layout.shapes))]
        assert all(
            view.data_ptr() == other.data_ptr() and view.is_contiguous()
            for view, other in zip(views, wanted, strict=True)
        )
        assert message.data_ptr() == memory.data_ptr() and message.nbytes == (
            layout.wire_bytes[0] if layout is ALONE else layout.num_bytes
        )
        assert kept.bytes_of(layout).data_ptr() == memory.data_ptr()
        fresh = new_message(memory, layout)
        assert [each.shape for each in fresh] == [each.shape for each in (message, *views)]


def test_views_that_stay_are_known_and_bounded() -> None:
    kept = KeptViews(torch.zeros(4096, dtype=torch.uint8))
    for rows in range(1, 40):
        message, views = kept.message(plan_message([(rows, 2), (rows,)], [torch.float32, torch.float32]))
        assert num_storage_users(kept.memory) == 1 + kept.num_kept + 3
        del message, views
        assert num_storage_users(kept.memory) == 1 + kept.num_kept <= 25


def test_a_buffer_whose_values_are_in_use_is_not_lent_again() -> None:
    buffers = ReceiveBuffers(EmptyLayer())  # type: ignore[arg-type]
    message, views = buffers.take_message(SEVERAL)
    first = message.data_ptr()
    del message
    view = views.pop()
    del views
    buffers.after_compute()
    assert buffers.take_message(SEVERAL)[0].data_ptr() != first, "one of its values is still somewhere"
    del view
    buffers.after_compute()
    held = [buffers.take_message(SEVERAL)[0] for _ in range(2)]
    assert first in {each.data_ptr() for each in held}, "free again"


def test_all_plain_sees_what_one_of_several_is() -> None:
    plain = torch.zeros(3, 2)
    pairs = torch.zeros(3, 2, dtype=torch.complex64)
    for odd in (plain.t(), pairs.conj(), torch._neg_view(plain)):
        assert not has_plain_memory(odd) and not all_plain([plain, odd]) and not all_plain([odd])
    assert all_plain([plain, pairs]) and all_plain([])
