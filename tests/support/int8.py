"""Counts products with int8 matrices, so that a test cannot pass without them."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from mmdecode.quantization import kernels, products


@contextmanager
def counted():
    """Counts the products inside the context, in ``products`` of what it yields."""
    count = SimpleNamespace(products=0)

    def counting(function):
        def product(*given):
            count.products += 1
            return function(*given)

        return product

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels.Scripted, "enabled", False)
        for module, name in ((kernels, "product"), (products, "_onednn")):
            patch.setattr(module, name, counting(getattr(module, name)))
        yield count
