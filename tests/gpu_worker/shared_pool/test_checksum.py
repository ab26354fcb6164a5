"""The checksum of a page changes with every change of its content."""

import pytest
import torch

from gpu_worker.shared_pool.checksum import PageChecksums

PAGE = 16


def pools(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 5 * PAGE, 8), (3, 5 * PAGE, 24)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_element_of_the_page_and_no_other_counts(dtype: torch.dtype) -> None:
    tensors = pools(dtype)
    checksums = PageChecksums(tensors, PAGE)
    before = [checksums.of(page) for page in range(5)]
    assert len(set(before)) == 5
    for tensor in tensors:
        for head in range(tensor.shape[0]):
            for token in range(2 * PAGE, 3 * PAGE):
                for place in range(tensor.shape[2]):
                    kept = tensor[head, token, place].clone()
                    tensor[head, token, place] = kept + 1
                    assert checksums.of(2) != before[2]
                    tensor[head, token, place] = kept
    tensors[0][:, PAGE] = 7
    assert [checksums.of(page) for page in (0, 2, 3, 4)] == [before[page] for page in (0, 2, 3, 4)]
    assert checksums.of(1) != before[1]


def test_moved_tokens_and_layers_change_it() -> None:
    tensors = pools()
    before = PageChecksums(tensors, PAGE).of(0)
    assert PageChecksums(tensors[::-1], PAGE).of(0) != before
    tensors[0][:, [0, 1]] = tensors[0][:, [1, 0]]
    assert PageChecksums(tensors, PAGE).of(0) != before
