import os

import numpy as np
import pytest

from mmdecode.train.drafters.ahead import Ahead


def made(step):
    return step, np.full(3, step), os.getpid()


@pytest.mark.parametrize("workers", [0, 2])
def test_steps_come_in_order_from_any_step_on_and_as_they_were_made(workers):
    coming = Ahead(made, 9, workers)
    for step in (0, 1, 2, 6, 7, 8, 3):
        number, array, process = coming(step)
        assert number == step
        assert isinstance(array, np.ndarray)
        assert array.tolist() == [step] * 3
        assert (process == os.getpid()) == (workers == 0)


def test_no_step_comes_after_the_last():
    coming = Ahead(made, 2)
    coming(1)
    with pytest.raises(StopIteration):
        coming(2)
