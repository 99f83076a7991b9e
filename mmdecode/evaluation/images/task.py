"""Task ``images``: ways to sample images, compared by distribution, cost and pixels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmdecode.errors import InputError, OptionError
from mmdecode.evaluation.task import ENGINE, Run, Task

if TYPE_CHECKING:
    from mmdecode.image_ar.loading import RasterModel

AUTO, NOTHING = "auto", "none"
MIN_REAL, MAX_REAL = 400, 4000  # reference images


@dataclass(frozen=True, kw_only=True)
class ImageTask(Task):
    """Ways to sample images of one model."""

    def open(self, given: Mapping[str, Any]) -> Run:
        """Loads the model; see `Task.open`."""
        from mmdecode.evaluation.images.references import SCENES, truth_of
        from mmdecode.evaluation.images.report import ImageReport
        from mmdecode.evaluation.images.runs import ROWS, ImageRow, Recorder, modes_of, read_images
        from mmdecode.image_ar.loading import config_of, load
        from mmdecode.image_ar.results import request_name
        from mmdecode.models.image_classifier import ZOO_CLASSIFIER, Classifier
        from mmdecode.runs.conditions import surroundings
        from mmdecode.runs.rows import RowJournal

        model = given["model"]
        names = [name.strip() for name in given["modes"].split(",") if name.strip()]
        modes = modes_of(names, given["also"] or [])
        if config_of(model).model_type == "var":
            raise OptionError(
                f"{model} generates images scale by scale and has no drafters; give a model that "
                "generates in raster order, such as zoo:llamagen-scenes"
            )
        network = load(model, given["device"], given["dtype"], given["quantize"])
        left_out: list[str] = []
        recorder = Recorder(
            network,
            modes,
            _conditions(network, given, left_out),
            model_id=model,
            seed=given["seed"],
            batch=given["batch_size"],
            **{name: given[name] for name in ("temperature", "top_k", "top_p", "guidance")},
        )
        name = _chosen("classifier", given, ZOO_CLASSIFIER)
        judge = None if name == NOTHING else Classifier.from_pretrained(name)
        settings = {
            "task": self.name,
            **surroundings(network.adapter.model),
            "model": model,
            "n": given["n"],
            "modes": [vars(mode) for mode in modes],
            "classes": given["class_id"],
            "prompts": None if given["prompts"] is None else str(given["prompts"]),
            **recorder.settings,
            "batch_size": given["batch_size"],
            "seed": given["seed"],
        } | ({"rows_left_out": len(left_out)} if left_out else {})
        load_average = settings.pop("load_average")

        def report(rows: list[ImageRow]) -> ImageReport:
            source, training, truth = _chosen("real", given, SCENES), given["training"], None
            if judge is not None and source != NOTHING:
                count = min(max(2 * given["n"], MIN_REAL), MAX_REAL)
                truth = truth_of(network, judge, source, training, count)
            return ImageReport(
                recorder,
                rows,
                judge,
                truth,
                conditions={
                    **settings,
                    "load_average": load_average,
                    "classifier": None if judge is None else judge.name,
                    "real": source,
                    "training": None if training is None else str(training),
                },
                margin=given["margin"] / 100,
                **{name: given[name] for name in ("permutations", "resamples", "seed")},
            )

        return Run(
            report=report,
            record=recorder.run,
            items=recorder.requests,
            name=request_name,
            failed=recorder.failed,
            journal=lambda folder, resume, overwrite: RowJournal(
                folder / ROWS, read_images, ImageRow.key, settings, resume, overwrite
            ),
            total=recorder.total,
            doing="drawing",
            left_out=left_out,
        )


def _chosen(option: str, given: Mapping[str, Any], for_scenes: str) -> str:
    """Value of an option that may be `AUTO`: ``for_scenes`` if the model draws the zoo's scenes."""
    if given[option] != AUTO:
        return str(given[option])
    return for_scenes if given["model"].startswith("zoo:llamagen-scenes") else NOTHING


def _conditions(model: RasterModel, given: Mapping[str, Any], left_out: list[str]) -> list[Any]:
    """Class or prompt of each image; messages on unusable lines go to ``left_out``.

    Raises:
        OptionError: Prompts are given to a model of classes, or classes to a model of prompts, or
            prompts are missing.
        InputError: The file of prompts cannot be read.
    """
    from mmdecode.image_ar.jobs import read_prompts

    found: list[Any]
    classes, prompts = given["class_id"], given["prompts"]
    if model.classes:
        if prompts is not None:
            raise OptionError(
                "this model draws of classes, not of prompts; give --class-id instead of --prompts"
            )
        found = list(classes or range(model.classes))
    else:
        if classes or prompts is None:
            raise OptionError("this model draws of prompts; give --prompts with a file of them")
        lines = [line for _, line in read_prompts(prompts)]
        found = [line for line in lines if isinstance(line, str)]
        left_out += [str(line) for line in lines if not isinstance(line, str)]
        if not found:
            raise InputError(f"{left_out[0]}; no other line can be used")
    return [found[index % len(found)] for index in range(given["n"])]


IMAGES = ImageTask(
    name="images",
    about="""Test whether faster sampling keeps the distribution of images: cost, likelihood, tests.

    All modes (ways to sample) have the same conditions (classes or prompts). Images are appended to
    images.jsonl in --out as codes; --resume continues an interrupted run at the next image. The
    HTML page shows a sheet of images of each mode. An image that fails is left out of the scores,
    and the exit code is then 1.

    For example:

      mmdecode evaluate images --model zoo:llamagen-scenes -n 200 --modes exact,relaxed --out run

      mmdecode evaluate images --model zoo:llamagen-scenes --modes plain --also 'jacobi:window=16 +
      lantern:delta=0.1' --json
    """,
    options={
        "model": ...,
        "n": 200,
        "modes": "exact,fast,relaxed",
        "also": None,
        "class_id": None,
        "prompts": None,
        "guidance": None,
        "temperature": None,
        "top_k": None,
        "top_p": None,
        "classifier": AUTO,
        "real": AUTO,
        "training": None,
        "margin": 1.0,
        "permutations": 999,
        "resamples": 200,
        "batch_size": 16,
        "output": None,
        "resume": False,
        "overwrite": False,
        "device": "auto",
        "dtype": "auto",
        "quantize": None,
        "seed": 0,
        **ENGINE,
    },
    helps={
        "margin": "Equivalence margin of the likelihood, in percent.",
        "batch_size": "Images generated at once.",
        "seed": "Seed of the images and of all resampling.",
    },
    rows="images.jsonl",
    failed="they are left out of the scores",
)
