"""Converts Moonshine tiny-en, a published recogniser, from its Python wheel to transformers.

`wheel` finds and checks the files, `ort_file` reads their format, `convert` and `tokenizer` make a
checkpoint of them. Nothing of the wheel's own code is imported.
"""
