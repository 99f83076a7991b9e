"""Converts Moonshine tiny-en, a published recogniser, from its Python wheel to transformers.

`wheel` finds and checks the files, `ort_file` reads onnxruntime's format, `convert` and `tokenizer`
make a checkpoint from them. The wheel's own code is not imported.
"""
