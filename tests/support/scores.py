"""Scores of answers that are given as lists, from the reports."""

from types import SimpleNamespace

from mmdecode.evaluation import CaptionReport, ChoiceReport, YesNoReport
from mmdecode.evaluation.vision.items import CaptionItem, YesNoItem


def score_answers(outputs, targets, images, parser="leading", resamples=10_000):
    """Scores of yes/no answers."""
    items = [
        YesNoItem(id=str(n), image=image, question="", target=target, mode="plain", output=output)
        for n, (output, target, image) in enumerate(zip(outputs, targets, images, strict=True))
    ]
    report = YesNoReport(items, parser=parser, baseline_controls=False, resamples=resamples)
    return SimpleNamespace(**report.scores("plain", "all"))


def score_choices(items, resamples=10_000):
    """Scores of answered multiple-choice questions."""
    report = ChoiceReport(items, resamples=resamples)
    return SimpleNamespace(**report.scores(report.modes[0], "all"))


def chair(captions, objects, images=None, *, vocabulary, resamples=10_000):
    """Scores of captions, each of its own image if there are no names of images."""
    images = images or [str(number) for number in range(len(captions))]
    items = [
        CaptionItem(id=str(n), image=image, objects=there, mode="plain", output=caption)
        for n, (caption, there, image) in enumerate(zip(captions, objects, images, strict=True))
    ]
    report = CaptionReport(items, vocabulary=vocabulary, resamples=resamples)
    return SimpleNamespace(**report.scores("plain", "all"))
