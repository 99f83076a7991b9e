"""Counts products with int8 matrices, so that a test cannot pass without them."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from mmdecode.quantization.products import Matrix


@contextmanager
def counted():
    """Counts the products inside the context, in ``products`` of what it yields."""
    count = SimpleNamespace(products=0)
    original = Matrix._product

    def product(self, *given):
        count.products += 1
        return original(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Matrix, "_product", product)
        yield count
