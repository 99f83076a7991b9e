"""Everything that is written to disk is written by `mmdecode.runs.files`: no module has another
way."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("mmdecode", "benchmarks", "asr", "vlm", "image_ar", "examples")
OWN = "mmdecode/runs/files.py"

ALLOWED = {
    ("mmdecode/runs/crashes.py", "open"): "a note of one name, beginning with a dot, kept open and "
    "rewritten while files are read; gone after a good end",
    ("mmdecode/runs/locks.py", "open"): "a file that is locked for its folder, without content",
    ("mmdecode/runs/locks.py", "mkdir"): "a folder, which another process removed as empty",
    ("mmdecode/runs/lines.py", "open"): "lines that are locked, and cut after a crash",
    ("mmdecode/runs/processes.py", "TemporaryFile"): "the job for workers, which has no name",
    ("benchmarks/serve_process.py", "TemporaryFile"): "what the server prints",
    ("mmdecode/serve/media_child.py", "fdopen"): "the pipes to its parent",
    ("mmdecode/serve/media_child.py", "open"): "the null device",
    ("mmdecode/runs/crashes.py", "mkdir"): "the folder of such notes of several processes",
    ("benchmarks/on_gpu.py", "open"): "the log of a step, written by its own process",
    ("benchmarks/on_gpu.py", "mkdir"): "the folder of these logs, in build",
    ("benchmarks/scale_engines.py", "mkdir"): "the folder of results that are measured",
    ("benchmarks/simulated.py", "open"): "a log of simulated workers, in a temporary folder",
    ("benchmarks/scale_journal.py", "open"): "parts of results, as workers leave them, in a "
    "temporary folder",
    ("benchmarks/scale_journal.py", "mkdir"): "the folder of these parts",
    ("benchmarks/scale_journal.py", "mkdtemp"): "the temporary folder",
    ("benchmarks/scale_journal.py", "write_text"): "a switch of the kernel in /proc, no file",
    ("benchmarks/peak_memory.py", "write_text"): "a switch of the kernel in /proc, no file",
}
"""Other ways, by module and name, each with its reason."""
OUR_SAVES = {"report", "prompts", "recipe"}
"""Names of objects of our own whose ``save`` writes through `mmdecode.runs.files`."""

CREATES = set(
    "write_text write_bytes touch mkdir makedirs mkfifo symlink symlink_to hardlink_to link "
    "renames save_pretrained save_for_hf save_file save_model savefig imsave savez "
    "savez_compressed savetxt tofile to_csv to_parquet to_excel to_pickle to_feather memmap "
    "copy2 copyfile copyfileobj copytree copymode copystat move make_archive unpack_archive "
    "NamedTemporaryFile TemporaryFile SpooledTemporaryFile mkstemp mktemp mkdtemp "
    "FileHandler RotatingFileHandler TimedRotatingFileHandler extractall urlretrieve".split()
)
"""What creates or fills a file whatever its arguments are."""
OF_MODULES = {
    ("torch", "save"), ("np", "save"), ("numpy", "save"), ("soundfile", "write"), ("sf", "write"),
    ("wavfile", "write"), ("imageio", "imwrite"), ("cv2", "imwrite"), ("torchaudio", "save"),
    ("json", "dump"), ("pickle", "dump"), ("yaml", "dump"), ("yaml", "safe_dump"),
    ("marshal", "dump"), ("joblib", "dump"), ("shutil", "copy"), ("os", "rename"),
    ("os", "replace"), ("os", "mknod"), ("os", "truncate"), ("sqlite3", "connect"),
    ("shelve", "open"), ("dbm", "open"),
}  # fmt: skip
WITH_MODE = {"open", "fdopen", "ZipFile", "TarFile", "GzipFile", "BZ2File", "LZMAFile", "SoundFile"}
WITH_MODE |= {"File"}  # h5py
SUSPECT = re.compile(
    rf"\b({'|'.join(CREATES | WITH_MODE | {name for _, name in OF_MODULES})}|save|basicConfig)\b"
    r"|\.(rename|replace)\([^(),]*(\([^()]*\))?[^(),]*\)"
)


def name_of(node):
    """The last name of what is called."""
    return getattr(node, "attr", getattr(node, "id", ""))


def owner_of(node):
    """What stands before the last dot."""
    return name_of(node.value) if isinstance(node, ast.Attribute) else ""


def writes_by_mode(call):
    named = [k.value for k in call.keywords if k.arg == "mode"]
    given = named or call.args[:2]
    modes = [a.value for a in given if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    if any(set(mode) <= set("rwaxbtU+:gzxz2|") and set(mode) & set("wax+") for mode in modes):
        return True
    unknown = named or (isinstance(call.func, ast.Name) and call.args[1:2])
    return bool(unknown) and not modes  # who knows


def is_write(call, func, buffers):
    """Whether a call may create, replace or fill a file."""
    name, owner = name_of(func), owner_of(func)
    into_memory = any(getattr(one, "id", None) in buffers for one in call.args)
    if name == "open" and owner == "os":
        flags = {name_of(node) for node in ast.walk(call)}
        return bool(flags & {"O_CREAT", "O_WRONLY", "O_RDWR", "O_APPEND", "O_TRUNC"})
    if (owner, name) == ("os", "truncate"):  # cuts off what a crash left half-written
        return False
    if name in CREATES or (owner, name) in OF_MODULES:
        return not into_memory
    if name in WITH_MODE:
        return writes_by_mode(call) and not into_memory
    if name in ("rename", "replace") and isinstance(func, ast.Attribute):  # of a path, not a text
        return len(call.args) == 1 and not call.keywords and owner != "self"
    if name == "save" and isinstance(func, ast.Attribute):
        return bool(call.args) and not into_memory and owner not in OUR_SAVES
    return name == "basicConfig" and any(k.arg == "filename" for k in call.keywords)


def fills_of(nodes, calls):
    """Functions that `write_folder` is given, which may save into the folder they get."""
    given = []
    for call in calls:
        if name_of(call.func) == "write_folder":
            given += [*call.args[1:2], *(k.value for k in call.keywords if k.arg == "fill")]
    names = {one.id for one in given if isinstance(one, ast.Name)}
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef))
    return [one for one in given if isinstance(one, ast.Lambda)] + [
        function for function in functions if function.name in names
    ]


def buffers_of(nodes):
    """Names that stand for files in memory."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=True))
            found |= {
                one.id
                for one, made in pairs
                if isinstance(one, ast.Name)
                and isinstance(made, ast.Call)
                and name_of(made.func) in ("BytesIO", "StringIO")
            }
    return found


def ways_in(source):
    """Ways of writing in a module other than `mmdecode.runs.files`: line and name."""
    if not SUSPECT.search(source):  # parsing all modules would take most of the time
        return []
    nodes = list(ast.walk(ast.parse(source)))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    inside = {node for fill in fills_of(nodes, calls) for node in ast.walk(fill)}
    buffers = buffers_of(nodes)
    found = set()
    for call in calls:
        both = isinstance(call.func, ast.IfExp)
        for func in (call.func.body, call.func.orelse) if both else (call.func,):
            if is_write(call, func, buffers) and call not in inside:
                found.add((call.lineno, name_of(func)))
    return sorted(found)


@functools.cache
def modules():
    paths = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


def test_no_module_writes_but_through_the_one_that_asks_whose_file_it_is():
    ways = [
        f"{module}:{line} {name}"
        for module, source in modules().items()
        if module != OWN
        for line, name in ways_in(source)
        if (module, name) not in ALLOWED
    ]
    assert not ways, "write through mmdecode.runs.files"


def test_each_way_that_is_allowed_is_still_there():
    for module, name in ALLOWED:
        assert name in {way for _, way in ways_in(modules()[module])}, f"{module} needs no {name}"


WAYS = """
open(path, "w")
open(path, mode="ab")
open(path, mode)
open(path, "r+b")
path.open("x")
path.open(mode="wt")
(gzip.open if packed else open)(path, "wt")
gzip.open(path, "wb")
gzip.GzipFile(path, "w")
bz2.open(path, "wb")
codecs.open(path, "w", "utf-8")
os.fdopen(handle, "w")
os.open(path, os.O_WRONLY | os.O_CREAT)
os.open(path, os.O_RDWR)
path.write_text(text)
path.write_bytes(data)
path.touch()
path.mkdir(parents=True)
os.makedirs(path)
path.rename(other)
path.replace(other)
os.replace(path, other)
path.symlink_to(other)
torch.save(state, path)
save_file(weights, path)
safetensors.torch.save_file(weights, path)
model.save_pretrained(folder)
figure.savefig(path)
plt.savefig(path)
image.save(path)
Image.fromarray(pixels).save(path, "PNG")
soundfile.write(path, wave, 16_000)
soundfile.SoundFile(path, "w", 16_000, 1)
np.save(path, array)
np.savez(path, a=array)
np.savez_compressed(path, a=array)
np.savetxt(path, array)
np.memmap(path, mode="w+")
array.tofile(path)
frame.to_csv(path)
shutil.copy(path, other)
shutil.copyfile(path, other)
shutil.copytree(path, other)
shutil.move(path, other)
tempfile.NamedTemporaryFile(delete=False)
tempfile.mkstemp()
json.dump(value, file)
pickle.dump(value, file)
zipfile.ZipFile(path, "w")
tarfile.open(path, "w:gz")
h5py.File(path, "w")
logging.FileHandler(path)
logging.basicConfig(filename=path)
sqlite3.connect(path)
urllib.request.urlretrieve(address, path)
""".strip().splitlines()


@pytest.mark.parametrize("way", WAYS)
def test_each_other_way_is_found(way):
    assert ways_in(f"def f():\n    return {way}\n"), way


NO_WAYS = [
    'open(path)\nopen(path, "rb")\npath.open()\npath.open("rb")\nImage.open(path)',
    'text.replace("a", "b")\nreplace(options, seed=1)\nself.replace(scores)',
    'data = io.BytesIO()\nimage.save(data, "PNG")\ntorch.save(state, data)',
    'a, data = 1, io.BytesIO()\nsoundfile.write(data, wave, 16_000, format="FLAC")',
    "write_folder(folder, model.save_pretrained)",
    "write_folder(folder, lambda into: torch.save(state, into / name))",
    "def fill(into):\n    model.save_pretrained(into)\nwrite_folder(out, fill)",
    "report.save(folder)",
]


@pytest.mark.parametrize("source", NO_WAYS)
def test_what_reads_or_fills_a_folder_of_write_folder_is_no_other_way(source):
    assert not ways_in(source)
