"""Where does a project of the user's own lie on this host? In one folder, start after start, as it does at home.

A script runs in WORKDIR/projects/NAME. What is sent replaces what was sent before; what the script wrote stays, and
the next start finds it. WORKDIR/projects/NAME.json says which files were sent: {path: [digest, size, mtime, ctime]}.
Python 3.8 or newer, Linux or macOS, standard library only.
"""

import contextlib
import fcntl
import json
import os
import shutil

BLOCK = 1 << 20
MADE = ("__pycache__",)  # folders whose content Python makes again


def sync(tree, folder):
    """Bring a project's folder up to date with a tree of `files.py`: the pids of runs that are going on there (Linux).

    A file that was sent and is not in the tree any more goes. One that a program wrote into stays, unless it has
    changed at home too: then the program's becomes NAME~, or NAME~2, …
    """
    tree, folder = _absolute(tree), _absolute(folder)
    with open(tree + ".json", "rb") as file:
        content = json.loads(file.read().decode())
    os.makedirs(folder, exist_ok=True)
    with open(folder + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sent, now = _sent(folder), {}
        wanted = {path: (digest + "+x" * executable, executable) for path, digest, _, executable in content["files"]}
        wanted.update({path: ("-> " + to, False) for path, to in content["links"]})
        for path in sent:
            place = _place(folder, path)
            if path not in wanted and _facts(place) == sent[path][1:]:
                os.unlink(place)
                _remove_empty(os.path.dirname(place), folder)
        kept = {path: sent[path] for path in sent if path in wanted and sent[path][0] == wanted[path][0]}
        _write_sent(folder, kept)  # cut off from here on, what is half replaced counts as nobody's
        for path, (digest, executable) in wanted.items():
            place, facts = _place(folder, path), _facts(_place(folder, path))
            known = sent.get(path, [None])
            if facts is not None and known[0] == digest:
                now[path] = known  # it is ours, or what a program made of it
                continue
            if facts is not None and facts != known[1:]:
                os.replace(place, _free(place))
            _put(tree, path, place, digest, executable)
            now[path] = [digest, *_facts(place)]
        _write_sent(folder, now)
    return _working_in(folder)


def written(folder, since, until=None, run=None):
    """What programs wrote there from one Unix time to another: [{"path", "size"}], by path.

    Without what comes home as the records of this run: a script may have joined a run directory of its own.
    """
    folder = _absolute(folder)
    sent, found, joined = _sent(folder), [], None
    with contextlib.suppress(OSError), open(os.path.join(run or "", "host", "joined"), "rb") as file:
        joined = os.path.realpath(file.read())
    for root, folders, names in os.walk(os.fsencode(folder)):
        folders[:] = sorted(name for name in folders if os.fsdecode(name) not in MADE
                            and os.path.realpath(os.path.join(root, name)) != joined)  # fmt: skip
        for name in sorted(names):
            place = os.path.join(root, name)
            try:
                state = os.lstat(place)
            except OSError:
                continue
            path = os.path.relpath(place, os.fsencode(folder)).decode("utf-8", "surrogateescape")
            is_ours = path in sent and _facts(place) == sent[path][1:]
            is_then = state.st_ctime >= since and (until is None or state.st_ctime <= until)
            if is_then and not is_ours and os.path.isfile(place) and not os.path.islink(place):
                found.append({"path": path, "size": state.st_size})
    return found


def _put(tree, path, place, digest, executable):
    os.makedirs(os.path.dirname(place), exist_ok=True)
    temporary = os.path.join(os.path.dirname(place), b".evener." + os.path.basename(place) + b".tmp")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    if digest.startswith("-> "):
        os.symlink(digest[3:].encode("utf-8", "surrogateescape"), temporary)
    else:
        with open(_place(tree, path), "rb") as source, open(temporary, "xb") as target:
            shutil.copyfileobj(source, target, BLOCK)
        os.chmod(temporary, 0o755 if executable else 0o644)
    os.replace(temporary, place)


def _free(place):
    """A name beside a file's that nothing has."""
    number = 1
    while os.path.lexists(place + (b"~" if number == 1 else b"~%d" % number)):
        number += 1
    return place + (b"~" if number == 1 else b"~%d" % number)


def _working_in(folder):
    """Processes of runs whose working directory this is."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else []:
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if os.readlink(f"/proc/{name}/cwd") == os.path.realpath(folder) and b"EVENER_RUN=" in file.read():
                    found.append(int(name))
    return found


def _facts(place):
    """[size, mtime, ctime] of what lies there, a link itself; None where nothing does."""
    try:
        state = os.lstat(place)
    except OSError:
        return None
    return [state.st_size, state.st_mtime_ns, state.st_ctime_ns]


def _sent(folder):
    try:
        with open(folder + ".json", "rb") as file:
            return json.loads(file.read().decode())
    except (OSError, ValueError):
        return {}


def _write_sent(folder, sent):
    with open(folder + ".json.tmp", "wb") as file:
        file.write(json.dumps(sent).encode())
    os.replace(folder + ".json.tmp", folder + ".json")


def _remove_empty(place, top):
    while place != os.fsencode(top):
        try:
            os.rmdir(place)
        except OSError:
            return
        place = os.path.dirname(place)


def _place(folder, path):
    """Bytes: a name need not be text."""
    return os.path.join(os.fsencode(folder), path.encode("utf-8", "surrogateescape"))


def _absolute(path):
    return os.path.abspath(os.path.expanduser(path))
