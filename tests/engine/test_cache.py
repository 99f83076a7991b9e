"""The ragged cache: rows grow on their own, accepted nodes are moved, rows can be forked."""

import torch

from mmdecode.engine.cache import RaggedCache, bucket


def states(cache, values):
    """Writes one number per row and slot into both layers."""
    block = torch.tensor(values, dtype=torch.float64)[:, None, :, None]
    for layer in range(2):
        keys, seen = cache.update(block + 100 * layer, -block, layer)
    return keys[:, 0, :, 0] - 100, seen[:, 0, :, 0]


def open_cache(rows=2):
    return RaggedCache(2, rows, torch.device("cpu"))


def test_rows_write_after_their_own_start():
    cache = open_cache()
    cache.open(8)
    states(cache, [[1, 2, 3], [4, 5, 6]])
    cache.commit(torch.tensor([3, 1]))
    cache.open(8)
    keys, values = states(cache, [[7, 8], [9, 10]])
    assert keys[0, :5].tolist() == [1, 2, 3, 7, 8]
    assert keys[1, :3].tolist() == [4, 9, 10]
    assert torch.equal(values[1, :3], -keys[1, :3])


def test_layers_that_nothing_was_written_to_stay_empty():
    cache = open_cache(1)
    cache.open(8)
    cache.update(torch.arange(4.0)[None, None, :, None], torch.zeros(1, 1, 4, 1), 1)
    cache.commit(torch.tensor([2]), torch.tensor([[1]]))
    assert cache.layers[1].keys[0, 0, :2, 0].tolist() == [0.0, 2.0]
    assert not cache.layers[0].is_initialized


def test_accepted_nodes_move_after_the_root_in_every_layer():
    cache = open_cache(3)
    cache.open(8)
    states(cache, [[1, 10, 11, 12, 13]] * 3)
    path = torch.tensor([[1, 3], [0, -1], [-1, -1]])
    cache.commit(torch.tensor([3, 2, 0]), path)
    assert cache.start.tolist() == [3, 2, 0]
    cache.open(8)
    keys, values = states(cache, [[50], [60], [70]])
    assert keys[0, :4].tolist() == [1, 11, 13, 50]
    assert keys[1, :3].tolist() == [1, 10, 60]
    assert keys[2, :1].tolist() == [70]
    assert torch.equal(values[0, :4], -keys[0, :4])


def test_a_pass_may_write_ahead_and_the_next_overwrites_it():
    cache = open_cache()
    cache.open(8)
    states(cache, [[1], [2]])
    cache.open(8, offset=1)
    states(cache, [[3], [4]])
    cache.open(8)
    keys, _ = states(cache, [[5], [6]])
    assert keys[:, :2].tolist() == [[5, 3], [6, 4]]


def test_storage_grows_and_keeps_what_it_holds():
    cache = open_cache()
    cache.open(2)
    states(cache, [[1, 2], [3, 4]])
    cache.set_start(torch.tensor([2, 2]))
    cache.open(40)
    keys, _ = states(cache, [[5], [6]])
    assert keys.shape[1] == 40 and keys[:, :3].tolist() == [[1, 2, 5], [3, 4, 6]]


def test_a_fork_has_slots_of_its_own():
    cache = open_cache()
    cache.open(4)
    states(cache, [[1, 2], [3, 4]])
    cache.commit(torch.tensor([2, 1]))
    cache.reorder_cache(torch.tensor([1, 1, 0]))
    assert cache.start.tolist() == [1, 1, 2]
    cache.open(4)
    keys, _ = states(cache, [[7], [8], [9]])
    assert keys[:, :2].tolist() == [[3, 7], [3, 8], [1, 2]] and keys[2, 2] == 9


def test_buckets_are_few_and_large_enough():
    sizes = {bucket(n) for n in range(1, 4000)}
    assert all(bucket(n) >= n for n in range(1, 4000)) and len(sizes) < 60
    assert bucket(1) == 32 and bucket(33) == 64
