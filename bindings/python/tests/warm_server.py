"""warm_server.py FOLDER TITLE MODULE...: imports modules, then starts programs in forks of itself.

A client (warm_client.py) hands over its arguments, environment, folder and standard files, as a
launcher gave them to it; the program runs in a process of its own, which began where the imports
had ended. The server has no thread, and ends when its standard input does. TITLE: as long as
command lines may get, which forks write into that place.
"""

import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import select
import shutil
import signal
import socket
import sys
import types
from pathlib import Path

LENGTH_BYTES = 8
PR_SET_PDEATHSIG = 1
IO_UNBUFFERED = 2
LIMIT_S = 60
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def receive(connection):
    """The request of a client, with its three files; None where it has gone."""
    files, parts = [], []
    with contextlib.suppress(OSError):
        connection.settimeout(LIMIT_S)
        length, files, _, _ = socket.recv_fds(connection, LENGTH_BYTES, 3)
        missing = int.from_bytes(length, "little")
        while missing and (part := connection.recv(missing)):
            parts.append(part)
            missing -= len(part)
        if parts and not missing:
            return {**json.loads(b"".join(parts)), "files": files}
    for file in files:
        os.close(file)
    connection.close()
    return None


class Server:
    def __init__(self, folder):
        self.folder = folder
        self.listener = socket.socket(socket.AF_UNIX)
        os.chdir(folder)
        self.listener.bind("socket")  # paths of sockets have 107 characters at most
        self.listener.listen(64)
        self.connections = {}  # of running programs, by process
        self.ended, self.wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self.wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Of a terminal or a group, whose other members the server outlives; programs get them.
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
        (folder / "ready").touch()

    def serve(self):
        """None when it is over; in the process of a program its request."""
        while True:
            watched = [sys.stdin, self.listener, self.ended, *self.connections.values()]
            ready = select.select(watched, [], [])[0]
            if sys.stdin in ready:
                return self._end()
            if self.ended in ready:
                os.read(self.ended, 4096)
                self._reap()
            for process, connection in list(self.connections.items()):
                if connection in ready:
                    self._pass_on(process, connection)
            if self.listener in ready:
                connection = self.listener.accept()[0]
                request = receive(connection)
                if request is not None and self._fork(request, connection) == 0:
                    return request

    def _end(self):
        for process in self.connections:
            kill(process, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _reap(self):
        """Tells clients how their programs ended."""
        for process in list(self.connections):
            pid, status = os.waitpid(process, os.WNOHANG)
            if pid:
                with contextlib.suppress(OSError), self.connections.pop(process) as connection:
                    connection.sendall(status.to_bytes(LENGTH_BYTES, "little"))

    def _pass_on(self, process, connection):
        """Signals that a client was sent; one that was killed takes its program with it."""
        numbers = b""
        with contextlib.suppress(OSError):
            numbers = connection.recv(64)
        for number in numbers or [signal.SIGKILL]:
            kill(process, number)
        if not numbers:
            os.waitpid(process, 0)
            self.connections.pop(process).close()

    def _fork(self, request, connection):
        process = os.fork()
        if process == 0:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for each in (self.listener, connection, *self.connections.values()):
                each.close()
            os.close(self.ended)
            os.close(self.wake)
            return 0
        self.connections[process] = connection
        for file in request["files"]:
            os.close(file)
        return process


def kill(process, number):
    """Also what the program has started, if it is killed."""
    for call in (os.kill, os.killpg) if number == signal.SIGKILL else (os.kill,):
        with contextlib.suppress(ProcessLookupError):
            call(process, number)


# ---- in the process of a program -----------------------------------------------------------------


def set_title(words):
    """Writes a command line where /proc shows it."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    first, end = int(fields[45]), int(fields[46])
    text = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - first - 1]
    ctypes.memmove(first, text.ljust(end - first, b"\0"), end - first)


def set_standard_files(files):
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        raw = open(number, "rb" if number == 0 else "wb", buffering=-1, closefd=False)  # noqa: SIM115
        text = io.TextIOWrapper(
            raw,
            encoding="utf-8",
            errors="backslashreplace" if number == 2 else "surrogateescape",
            line_buffering=number == 2 or os.isatty(number),
            write_through=unbuffered,
        )
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)


def random_numbers_anew():
    """Python's own random numbers differ between forks already."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def end_before_the_modules():
    """At exit what the program has made is destroyed, and not what the server's libraries have:
    PyTorch takes its tables of operators apart, which is most of the time of an end.

    Handlers of exit run from the last to the first.
    """
    libc = ctypes.CDLL(None)
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, IO_UNBUFFERED, 0)
    libc.on_exit(libc._exit, None)


def become(request):
    """This process as if it had been started by the client."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request["environment"])
    set_standard_files(request["files"])
    os.chdir(request["folder"])
    set_title([sys.executable, *request["words"]])
    sys.dont_write_bytecode |= bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [*map(os.path.abspath, paths), *sys.path[1:]]
    random_numbers_anew()
    end_before_the_modules()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)


def execute(code, file=None):
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    if file is not None:
        main.__file__ = file
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def run_program(words):
    """As `python WORDS...` does, of which -B, -u, -c and -m are known."""
    while words[:1] in (["-B"], ["-u"]):
        if words[0] == "-B":
            sys.dont_write_bytecode = True
        else:
            sys.stdout.reconfigure(write_through=True)
        words = words[1:]
    first, *rest = words or ["-"]
    if first == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        execute(compile(rest[0], "<string>", "exec"))
    elif first == "-m":
        import runpy

        sys.argv[:] = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first.startswith("-"):
        sys.exit(
            f"warm_server.py: option {first} of Python is not known here; allowed: -B, -u, -c, -m"
        )
    else:
        sys.argv[:] = words
        sys.path.insert(0, str(Path(first).resolve().parent))
        execute(compile(Path(first).read_bytes(), first, "exec"), first)


def main(folder, _, *modules):
    for name in modules:
        importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit(f"importing {', '.join(modules)} started threads, which forks would not have")
    gc.collect()
    gc.freeze()  # a fork copies no page just to count references in it
    request = Server(Path(folder)).serve()
    if request is None:
        os._exit(0)  # nothing is left to do; taking the modules apart would be most of it
    become(request)
    run_program(request["words"])


if __name__ == "__main__":
    main(*sys.argv[1:])
