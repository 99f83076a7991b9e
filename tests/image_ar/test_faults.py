"""Whatever one image raises, wherever, it fails alone, and the others are drawn."""

import dataclasses
import errno

import pytest

from mmdecode.decoder import Decoder
from mmdecode.errors import InputError
from mmdecode.image_ar import ImageGenerator, jobs
from mmdecode.image_ar.loading import load
from tests.support.faults import ERRORS, FEW, Faulty, failure_of

BAD = 2  # a class
CONDITIONS = [0, 1, BAD, 3]
DECODING = ("begin", "propose", "observe")
STAGES = ("prepare", *DECODING, "decode", "write")


@pytest.fixture(scope="module")
def network(classes):
    return load(str(classes), "cpu")


@pytest.fixture(scope="module")
def expected(network):
    return [image.codes.tolist() for image in ImageGenerator(network)(CONDITIONS)]


def is_bad(call):
    return BAD in call.request.model_kwargs["classes"].tolist()


def lines_of(network, folder, name, stage, patch):
    """Lines of a folder of four images, of which the bad one raises at a stage."""
    error = ERRORS[name]

    def raising(*given, **options):
        raise error()

    decoder = Decoder(Faulty(is_bad, error, stage)) if stage in DECODING else None
    generator = ImageGenerator(network, decoder, batch=4)
    requests = generator.requests(CONDITIONS)
    if stage == "prepare":
        check = generator._backend.check
        own = lambda condition: raising() if condition == BAD else check(condition)  # noqa: E731
        patch.setattr(generator._backend, "check", own)
    folder.mkdir(exist_ok=True)
    folder_of_job = jobs.ImageFolder(folder, {}, resume=False)
    folder_of_job.name_by(generator.labels, {})
    folder_of_job.items = requests
    folder_of_job.open(folder_of_job.prepare())
    write = jobs.write_file
    if stage == "write":
        own = lambda path, *rest: raising() if "hound" in path.name else write(path, *rest)  # noqa: E731
        patch.setattr(jobs, "write_file", own)
    try:
        found = []
        for image in generator.images(requests):
            if stage == "decode" and image.condition == BAD:
                image = dataclasses.replace(image, _pixels=raising)
            found.append((image, folder_of_job.add(image)))
        return sorted(found, key=lambda pair: pair[0].index)
    finally:
        folder_of_job.close()


def check(network, folder, name, stage, expected, patch):
    if stage == "write" and name == "OSError":  # a disk that fails is the job's
        with pytest.raises(InputError, match="cannot write to"):
            lines_of(network, folder, name, stage, patch)
        return
    found = lines_of(network, folder, name, stage, patch)
    lines = [line for _, line in found]
    assert ["error" in line for line in lines] == [n == BAD for n in CONDITIONS]
    text, kind = failure_of(name)
    assert text in lines[BAD]["error"] and lines[BAD]["kind"] == kind
    good = [index for index, condition in enumerate(CONDITIONS) if condition != BAD]
    assert [found[index][0].codes.tolist() for index in good] == [expected[n] for n in good]
    assert all((folder / lines[index]["file"]).is_file() for index in good)


@pytest.mark.parametrize("stage", STAGES)
def test_an_image_that_raises_fails_alone(stage, network, tmp_path, expected, monkeypatch):
    name = FEW[STAGES.index(stage) % len(FEW)]
    check(network, tmp_path / "out", name, stage, expected, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_every_error_at_every_stage_fails_its_image_alone(network, tmp_path, expected):
    count = 0
    for stage in STAGES:
        for name in ERRORS:
            with pytest.MonkeyPatch.context() as patch:
                check(network, tmp_path / f"{stage} {name}", name, stage, expected, patch)
            count += 1
    print(f"{count} errors of images: {len(ERRORS)} kinds at {len(STAGES)} stages")


def test_a_folder_with_the_name_of_a_file_fails_its_image_alone(network, tmp_path):
    generator = ImageGenerator(network)
    folder = jobs.ImageFolder(tmp_path, {}, resume=False)
    folder.name_by(generator.labels, {})
    folder.items = requests = generator.requests(CONDITIONS)
    folder.open(folder.prepare())
    (tmp_path / "hound-2-000.png").mkdir()
    lines = [folder.add(image) for image in generator.images(requests)]
    folder.close()
    assert [line["id"] for line in lines if "error" in line] == ["hound-2-000"]
    assert "is a folder" in lines[BAD]["error"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_folder_that_cannot_be_written_is_the_jobs_error(number, network, tmp_path, monkeypatch):
    monkeypatch.setitem(ERRORS, "full", lambda: OSError(number, "no"))
    with pytest.raises(InputError, match="cannot write to"):
        lines_of(network, tmp_path / "out", "full", "write", monkeypatch)
