"""What the command lines of these benchmarks have in common."""

import argparse


def at_least(low):
    def parse(text):
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from {low}")
        return int(text)
    return parse


def check_lines_file(parser, file):
    """--json: lines can be appended to this file, which is known before there are any. None: there is no file."""
    if file is not None:
        try:
            file.open("a", encoding="utf-8").close()
        except OSError as error:
            parser.error(f"--json: cannot write {file}: {error.strerror}")
