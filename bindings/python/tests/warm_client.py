"""warm_client.py FOLDER WORDS...: has the server in the folder start `python WORDS...`, and ends as
that ends: with its exit code, or by the signal. Signals that it gets are passed on."""

import json
import os
import resource
import signal
import socket
import sys

LENGTH_BYTES = 8
PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


def main(folder, *words):
    request = {"words": words, "environment": dict(os.environ), "folder": os.getcwd()}
    data = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as server:
        # By a short path: those of sockets have 107 characters at most.
        server.connect(f"/proc/self/fd/{os.open(folder, os.O_PATH)}/socket")
        for name in PASSED_ON:
            signal.signal(getattr(signal, name), lambda number, _: server.send(bytes([number])))
        socket.send_fds(server, [len(data).to_bytes(LENGTH_BYTES, "little")], [0, 1, 2])
        server.sendall(data)
        for file in (0, 1, 2):
            os.close(file)
        told = server.recv(LENGTH_BYTES)
    if len(told) < LENGTH_BYTES:
        os._exit(1)  # the server has ended, and the program with it
    status = int.from_bytes(told, "little")
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main(*sys.argv[1:])
